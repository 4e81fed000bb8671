"""Tasks on processes side by side: one that crashes, hangs or raises is lost, and takes no other with it."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch

START_S = 300.0
"""A process that has begun no task after so many seconds hangs."""
END_S = 10.0
REASON_CHARS = 6000


@dataclass(frozen=True)
class Doing:
    """What a task begins to do, and after how many seconds it hangs."""

    what: str
    limit_s: float


@dataclass(frozen=True)
class Lost:
    """A task did not end."""

    reason: str


class Task(Protocol):
    """Can be pickled."""

    def run(self) -> Iterator[object]:
        """What it gives, and Doing before all that takes time."""


def run(tasks: Sequence[Task], jobs: int, until: float = float("inf")) -> Iterator[tuple[int, object]]:
    """What the tasks give, with their numbers, as they give it; `Lost` of one that does not end. None begins after `until` (`time.time`).

    After a loss the process is replaced: a GPU's context does not survive a fault of a kernel.
    """
    left = deque(enumerate(tasks))
    workers = [_Worker() for _ in range(min(jobs, len(tasks)))]
    try:
        while True:
            for worker in workers:
                if worker.task is None and left and time.time() < until:
                    worker.give(*left.popleft())
            busy = {worker.connection: worker for worker in workers if worker.task is not None}
            if not busy:
                return
            ready = wait(list(busy), timeout=0.5)
            for connection, worker in busy.items():
                number, given = worker.task, worker.taken() if connection in ready else worker.overdue()
                if isinstance(given, Lost):
                    worker.end()
                    workers[workers.index(worker)] = _Worker()
                if given is not None and number is not None:
                    yield number, given
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process, and what it does."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None
        self._doing, self._since = Doing("start", START_S), 0.0

    def give(self, number: int, task: Task) -> None:
        """Let it run a task."""
        self.task = number
        self._begins(Doing("start", START_S))
        self.connection.send(task)

    def taken(self) -> object:
        """What it sent, unless that is for this class."""
        try:
            given = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(END_S)
            return Lost(f"{self._doing.what}: the process ended{_by(self.process.exitcode)}")
        if isinstance(given, Doing):
            self._begins(given)
        elif isinstance(given, Lost):
            return Lost(f"{self._doing.what}: {given.reason}")
        elif isinstance(given, _Done):
            self.task = None
        else:
            return given
        return None

    def overdue(self) -> Lost | None:
        """Lost if it hangs."""
        hangs = time.monotonic() - self._since > self._doing.limit_s
        return Lost(f"{self._doing.what}: it took longer than {self._doing.limit_s:g} s") if hangs else None

    def end(self) -> None:
        """Kill it. A GPU that hangs may keep it for a while."""
        self.process.kill()
        self.process.join(END_S)
        self.connection.close()

    def _begins(self, doing: Doing) -> None:
        self._doing, self._since = doing, time.monotonic()


class _Done:
    """A task ended."""


def _by(status: int | None) -> str:
    if status is None or status >= 0:
        return f" with status {status}"
    return f" by {signal.Signals(-status).name}"


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)  # there are as many processes as processors
    while True:
        task: Task = connection.recv()
        try:
            for given in task.run():
                connection.send(given)
        except Exception:
            connection.send(Lost(traceback.format_exc()[-REASON_CHARS:]))
            return
        connection.send(_Done())
