"""Compiling ahead of the measurements, a bounded number of schedules at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from kvgen.lower.base import Backend, Target
from kvgen.lower.schedule import Schedule
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache, build


class Ahead:
    """Artifacts of schedules, compiled by a pool of compiler processes. Leaving the context drops what has not started."""

    def __init__(
        self, spec: KernelSpec, target: Target, backends: Mapping[str, Backend], cache: ArtifactCache, workers: int | None = None
    ) -> None:
        self._spec, self._target, self._backends, self._cache = spec, target, backends, cache
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="compile")
        self._jobs: dict[str, Future[Artifact]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, schedule: Schedule) -> None:
        """Begin to compile, unless that was done before."""
        if schedule.id not in self._jobs:
            self._jobs[schedule.id] = self._pool.submit(self._build, schedule)

    def settle(self) -> None:
        """Wait until no compiler runs: on a CPU it would disturb what is measured."""
        wait(self._jobs.values())

    def artifact(self, schedule: Schedule) -> Artifact:
        """The compiled schedule, waited for. Raises CompileError, UnsupportedError or ToolchainMissing."""
        self.start(schedule)
        return self._jobs[schedule.id].result()

    def _build(self, schedule: Schedule) -> Artifact:
        return build(self._backends[schedule.backend].lower(self._spec, schedule, self._target), self._cache)
