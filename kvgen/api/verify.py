"""Verifies the modules of a fetch against the fp64 reference, each once on this machine, in a process of its own while others compile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from kvgen.arch import device_type
from kvgen.errors import CheckError, HostError, MeasureError
from kvgen.measure.measurement import Job
from kvgen.registry.entry import Entry
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.verify import CheckPolicy

if TYPE_CHECKING:
    from kvgen.measure.worker import Worker

POLICY = CheckPolicy(steps=1, repeats=2, most_tokens=4096)
"""Every call, over shorter sequences than a build's: a program waits for it."""
TIMEOUT_S = 60.0
"""Of each stage of a verification."""


class Verification:
    """Verification of the modules of one entry. Use as a context manager.

    A module whose bytes passed on this machine is not run again. The others run one by one, in a thread that the worker process belongs to.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry, self._cache = entry, ArtifactCache()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if "_worker" in self.__dict__:
            self._worker.close()

    @cached_property
    def _worker(self) -> Worker:
        """The process; most fetches find that everything has passed, and need none."""
        from kvgen.measure.worker import Worker

        return Worker()

    def start(self) -> None:
        """Start the worker process, which imports torch while the first module is compiled. The first job says if it cannot."""
        self._thread.submit(lambda: self._worker.start(device_type(self._entry.arch)))

    def add(self, index: int, artifact: Artifact) -> None:
        """Verify the module of a launch, unless it has passed. Raises as `finish` does where an earlier one has failed meanwhile."""
        entry, launch = self._entry, self._entry.launches[index]
        job = Job(entry.spec, entry.schedule(launch), entry.arch, artifact.path, None, POLICY, None)
        if not self._cache.verified(artifact, job.use):
            name = f"launch {index} ({launch.backend}) of {entry.spec.name} ({artifact.path})"
            self._pending.append(self._thread.submit(self._verify, name, artifact, job))
        for one in self._pending:
            if one.done():
                one.result()

    def finish(self) -> None:
        """Wait for all modules. Raises CheckError for one that is wrong, crashes or hangs; HostError for lack of memory; MeasureError where
        no process can verify.
        """
        for one in self._pending:
            one.result()

    def _verify(self, name: str, artifact: Artifact, job: Job) -> None:
        with self._cache.lock(f"{artifact.id}-verify"):  # of processes that fetch at once, one verifies
            if self._cache.verified(artifact, job.use):
                return
            outcome = self._worker.run(job, TIMEOUT_S)
            if outcome.ok:
                self._cache.mark_verified(artifact, job.use)
            elif outcome.kind == "oom":
                raise HostError(f"{name} could not be verified: {outcome.detail}", artifact.path)
            elif outcome.kind == "unsupported":
                raise MeasureError(f"{name} could not be verified: {outcome.detail}")
            else:
                self._cache.remove(artifact)
                raise CheckError(f"{name} failed verification and is not served: {outcome.kind}: {outcome.detail}")
