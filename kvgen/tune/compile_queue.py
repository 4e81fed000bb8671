"""Compiles schedules in the background while others are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from kvgen.lower.backend import Sources
from kvgen.lower.schedule import Schedule
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import CompilePool


class CompileQueue(CompilePool):
    """Artifacts of schedules, each compiled once. Leaving the context drops schedules that have not started."""

    def __init__(self, sources: Sources, cache: ArtifactCache, workers: int | None = None) -> None:
        super().__init__(cache, workers)
        self._sources = sources
        self._jobs: dict[str, Future[Artifact]] = {}
        self._others: list[Future[object]] = []
        self._built: list[float] = []
        """Seconds of each finished compilation."""

    def start(self, schedule: Schedule) -> None:
        """Queue a schedule, unless it was queued before."""
        if schedule.id not in self._jobs:
            self._jobs[schedule.id] = self.run(partial(self._timed, schedule))

    def run_beside(self, task: Callable[[], object]) -> None:
        """Run another task in the pool. Its exception is dropped: the code that needs the result repeats the task and gets it then."""
        self._others.append(self.run(task))

    def wait_idle(self) -> None:
        """Wait until no compiler runs: on a CPU it would disturb measurements."""
        wait(self._jobs.values())
        wait(self._others)

    def first_ready(self, schedules: Sequence[Schedule], seconds: float | None) -> int | None:
        """Index of a schedule whose compilation ended, well or badly; waits up to `seconds`. All of them must have been started."""
        jobs = [self._jobs[schedule.id] for schedule in schedules]
        wait(jobs, seconds, FIRST_COMPLETED)
        return next((index for index, job in enumerate(jobs) if job.done()), None)

    def unfinished(self, schedules: Sequence[Schedule]) -> list[Future[Artifact]]:
        """The compilations of these schedules that have not ended. All of them must have been started."""
        return [job for schedule in schedules if not (job := self._jobs[schedule.id]).done()]

    @property
    def spare(self) -> int:
        """Compilers that have nothing to do."""
        return max(0, self.workers - sum(not job.done() for job in self._jobs.values()))

    def done(self, schedules: Sequence[Schedule], seconds: float | None) -> list[Schedule]:
        """Start schedules, wait up to `seconds` for all of them, and drop those that no compiler has begun then. Returns those whose
        compilation ended, well or badly.
        """
        for schedule in schedules:
            self.start(schedule)
        wait([self._jobs[schedule.id] for schedule in schedules], seconds)
        ended = [schedule for schedule in schedules if self._jobs[schedule.id].done()]
        self.cancel_pending()
        return ended

    def capacity(self, seconds: float) -> int:
        """How many further schedules will probably be compiled within `seconds`, judged by the mean time so far."""
        usual = sum(self._built) / max(1, len(self._built))
        unfinished = sum(not job.done() for job in self._jobs.values())
        batches = seconds / usual if usual else float(len(self._jobs) + self.workers)
        return max(0, self.workers * int(batches) - unfinished)

    def cancel_pending(self) -> None:
        """Drop the schedules that no compiler has begun."""
        self._jobs = {key: job for key, job in self._jobs.items() if not job.cancel()}

    def artifact(self, schedule: Schedule) -> Artifact:
        """The compiled schedule; waits for it. Raises CompileError, CompilerCrash, UnsupportedError, ToolchainMissing or HostError."""
        self.start(schedule)
        return self._jobs[schedule.id].result()

    def _timed(self, schedule: Schedule) -> Artifact:
        began = time.monotonic()
        try:
            return self.build(self._sources.of(schedule))
        finally:
            self._built.append(time.monotonic() - began)
