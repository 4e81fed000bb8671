"""Compiles and measures candidates: compilers run in parallel, ahead of the devices that measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Condition, Event

from kvgen.lower.backend import Sources
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Candidate, Key, Measurement
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import CompilePool
from kvgen.tune.runner import Runner

Outcome = Measurement | BaseException | None
"""A measurement, what ended it, or nothing where there was no time left for it."""


class CompileQueue(CompilePool):
    """Modules of schedules, each compiled once. `exclusive`: compilers rest while something is measured, which they would disturb."""

    def __init__(self, sources: Sources, cache: ArtifactCache, *, exclusive: bool) -> None:
        super().__init__(cache)
        self._sources, self._exclusive = sources, exclusive
        self._jobs: dict[str, Future[Artifact]] = {}
        self._changed, self._compiling, self._resting = Condition(), 0, 0

    def start(self, schedule: Schedule) -> Future[Artifact]:
        """Queue a schedule, unless it was queued before."""
        if schedule.id not in self._jobs:
            self._jobs[schedule.id] = self.run(lambda: self._compile(schedule))
        return self._jobs[schedule.id]

    def artifact(self, schedule: Schedule) -> Artifact:
        """The compiled schedule; waits for it. Raises CompileError, CompilerCrash, UnsupportedError, ToolchainMissing or HostError."""
        return self.start(schedule).result()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A context in which nothing is compiled. It begins when the compilers that run have ended; no further one starts before."""
        if not self._exclusive:
            yield
            return
        with self._changed:
            self._resting += 1
            self._changed.wait_for(lambda: not self._compiling)
        try:
            yield
        finally:
            with self._changed:
                self._resting -= 1
                self._changed.notify_all()

    def _compile(self, schedule: Schedule) -> Artifact:
        with self._changed:
            self._changed.wait_for(lambda: not self._resting)
            self._compiling += 1
        try:
            return self.build(self._sources.of(schedule))
        finally:
            with self._changed:
                self._compiling -= 1
                self._changed.notify_all()


class Pipeline:
    """Candidates on their way: they are compiled, wait for a device, and are measured, what is compiled first at first."""

    def __init__(self, queue: CompileQueue, runner: Runner, timely: Callable[[Candidate], bool]) -> None:
        """`timely` says of a compiled candidate whether there is time to measure it."""
        self._queue, self._runner, self._timely = queue, runner, timely
        self.width = 2 * max(queue.workers, runner.devices)
        """Candidates that keep all compilers and devices busy."""
        self.inside: dict[Key, Candidate] = {}
        self._threads = ThreadPoolExecutor(self.width, "measure")
        self._outcomes: SimpleQueue[tuple[Candidate, Outcome]] = SimpleQueue()
        self._idle: SimpleQueue[int] = SimpleQueue()
        for device in range(runner.devices):
            self._idle.put(device)
        self._ended = Event()

    def start(self, candidate: Candidate) -> None:
        """Begin with a candidate."""
        self.inside[candidate.key] = candidate
        self._queue.start(candidate.schedule)
        self._threads.submit(self._run, candidate)

    def next(self, seconds: float | None) -> tuple[Candidate, Outcome] | None:
        """The next candidate that is done; None if `seconds` pass without one."""
        try:
            candidate, outcome = self._outcomes.get(timeout=seconds)
        except Empty:
            return None
        del self.inside[candidate.key]
        return candidate, outcome

    def end(self) -> list[Measurement]:
        """End what is compiled, wait for what is measured, and return its records."""
        self.stop()
        idle = [self._idle.get() for _ in range(self._runner.devices)]
        outcomes = [self._outcomes.get()[1] for _ in range(self._outcomes.qsize())]
        for device in idle:  # threads that wait for one must end
            self._idle.put(device)
        return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]

    def stop(self) -> None:
        """End what is compiled; nothing further is measured."""
        self._ended.set()
        self._queue.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, candidate: Candidate) -> None:
        device: int | None = None
        outcome: Outcome = None
        try:
            artifact = self._queue.artifact(candidate.schedule)
            with self._queue.at_rest():
                device = self._idle.get()
                if self._timely(candidate) and not self._ended.is_set():
                    outcome = self._runner.measure(candidate, artifact, device)
        except BaseException as error:
            outcome = error
        self._outcomes.put((candidate, outcome))
        if device is not None:
            self._idle.put(device)
