"""Lowering in a process of its own: TileLang aborts on some inputs, may hang, and costs seconds to import.

What was lowered once is kept by its sizes, TileLang's version and this package's source, so that it is had again without TileLang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

import kvgen
from kvgen._resources import user_cache
from kvgen.children import run
from kvgen.digest import canonical_json, digest, files_digest
from kvgen.errors import HOST_REASONS, CompileError, CompilerCrash, HostError, ToolchainMissing, host_errors
from kvgen.files import read_json
from kvgen.lower.schedule import Schedule
from kvgen.lower.tilelang.sizes import sizes_of
from kvgen.lower.tilelang.support import missing, tilelang_version
from kvgen.spec import KernelSpec

TIMEOUT_S = 600.0
MOST_BYTES = 1 << 24
"""Largest size of a kept result, in bytes."""
LOG_CHARS = 4000


@dataclass(frozen=True)
class Program:
    """A device kernel as text. `parameters` are the names of its arguments in the order in which it takes them."""

    name: str
    text: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """The kernels of a variant: with the static scheduler, and with a plan."""

    static: Program
    planned: Program

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lowered:
        """What the worker answers. Raises KeyError and TypeError."""
        static, planned = (data[name] for name in ("static", "planned"))
        return cls(*(Program(each["name"], each["text"], tuple(each["parameters"])) for each in (static, planned)))


def lower_apart(spec: KernelSpec, schedule: Schedule, timeout_s: float = TIMEOUT_S) -> Lowered:
    """The kernels of a schedule, which are the same for every target. Processes that want the same ones wait for the one that began.

    Raises ToolchainMissing without TileLang, CompileError where it fails, aborts or takes longer than `timeout_s`, HostError where
    the disk fails, CompilerCrash where it is killed.
    """
    identity = [asdict(sizes_of(spec, schedule)), tilelang_version(), program_digest()]
    file = user_cache() / "lowered" / f"{digest(identity)}.json"
    if kept := _read(file):
        return kept
    if reason := missing():
        raise ToolchainMissing(reason)
    with host_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.with_suffix(".lock"))
        lock.acquire()
    try:
        if kept := _read(file):
            return kept
        text = _run(request_of(spec, schedule), timeout_s)
        with host_errors("write", file):
            part = file.with_suffix(".part")  # of the process that holds the lock
            part.write_text(text)
            part.replace(file)
        return Lowered.from_json(json.loads(text))
    finally:
        lock.release()


def request_of(spec: KernelSpec, schedule: Schedule) -> str:
    """What `worker` reads."""
    return canonical_json({"spec": {**spec.format(), "name": "kernel"}, "schedule": schedule.to_json()})


@cache
def program_digest() -> str:
    """Digest of the sources that decide what is lowered."""
    return files_digest(Path(__file__).parent / name for name in ("program.py", "sizes.py", "worker.py"))


def _run(request: str, timeout_s: float) -> str:
    """The worker's answer."""
    command = [sys.executable, "-m", "kvgen.lower.tilelang.worker"]
    root = str(Path(kvgen.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # TileLang makes its folders at import, in the home directory unless it is told where.
    own = {"TILELANG_CACHE_DIR": str(user_cache() / "tilelang")}
    environment = {**own, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    try:
        with host_errors("run", Path(sys.executable)):
            done = run(command, timeout_s, request, env=environment)
    except subprocess.TimeoutExpired:
        raise CompileError(f"TileLang took longer than {timeout_s:g} s and was stopped") from None
    if done.returncode == -signal.SIGKILL:
        raise CompilerCrash("TileLang was ended by SIGKILL, for want of memory perhaps")
    if done.returncode and (reason := HOST_REASONS.search(done.stderr)):
        raise HostError(f"TileLang could not work: {reason[0]}")
    if done.returncode:
        raise CompileError(f"TileLang failed with exit status {done.returncode}", done.stderr[-LOG_CHARS:])
    return done.stdout


def _read(file: Path) -> Lowered | None:
    try:
        return Lowered.from_json(read_json(file, MOST_BYTES))
    except (OSError, ValueError, KeyError, TypeError):
        return None
