"""Processes that kvgen starts for one task and waits for: compilers, TileLang, the first load of a module.

Each has a session of its own, and none outlives its task: it ends with its whole group when its time is up, when its caller is interrupted,
and when this process ends in whatever way. What a thread started, another thread can end (`Children.kill`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, local
from typing import Any
from weakref import WeakSet

from kvgen.errors import HostError

_thread = local()
_all: WeakSet[Children] = WeakSet()


class Children:
    """The processes that some threads run. Each of these threads calls `adopt` first."""

    def __init__(self) -> None:
        self._changing = Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False
        _all.add(self)

    def adopt(self) -> None:
        """From now on, this thread's processes are among these."""
        _thread.children = self

    def kill(self) -> None:
        """End all of them with their groups; a thread that starts another one gets a HostError."""
        with self._changing:
            self._ended = True
            for process in self._running:
                _kill(process)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A new process, unless `kill` was called."""
        with self._changing:
            if self._ended:
                raise HostError("the run has ended")
            process = subprocess.Popen(command, **options)
            self._running.add(process)
        return process

    def drop(self, process: subprocess.Popen[str]) -> None:
        """Forget a process that has ended."""
        with self._changing:
            self._running.discard(process)


def run(command: Sequence[str], timeout_s: float, text: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `text` is its input, and its output is captured. `options` are those of `subprocess.Popen`.

    Raises OSError where it cannot be started, subprocess.TimeoutExpired after `timeout_s` seconds.
    """
    children: Children = getattr(_thread, "children", None) or Children()
    setpriv = shutil.which("setpriv")
    bound = [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command
    pipes = {"stdin": subprocess.DEVNULL if text is None else subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = children.start(bound, text=True, errors="replace", start_new_session=True, **{**pipes, **options})
    try:
        output, errors = process.communicate(text, timeout=timeout_s)
    finally:
        if process.returncode is None:
            _kill(process)
            process.communicate()
        children.drop(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_all() -> None:
    """End everything that `run` has started in threads which adopted it."""
    for children in list(_all):
        children.kill()


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # its number is not another's yet
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
