"""Whether `build`'s verification refuses a variant: the worker's own answer, nothing else."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Semaphore

from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.verify import CheckPolicy
from tests.mutants.fault import Case

QUICK = TimingPolicy(seconds=0.0, warmup_seconds=0.0, samples=1, cold_bytes=1)
"""Times say nothing here, but a launch is verified at the workloads that it is timed at."""


class Judges:
    """One worker more than verify at once: it starts its process while the others verify."""

    def __init__(self, device: str, timeout_s: float, at_once: int = 1) -> None:
        self.size = at_once + 1
        self._device, self._timeout_s, self._at_once = device, timeout_s, at_once
        self._turn, self._alone = Semaphore(at_once), Lock()
        self._workers = [Worker() for _ in range(self.size)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def judge(self, case: Case, artifact: Path) -> Measurement:
        """What a worker says of a variant. A timeout beside others is asked for again, alone."""
        works = case.workloads or (None,)
        worker, found = self._idle.get(), Measurement("ok")
        try:
            for number, work in enumerate(works):
                job = Job(case.spec, case.schedule, case.target, artifact, work, CheckPolicy(workloads_only=number > 0), QUICK)
                worker.start(self._device)
                with self._turn:
                    found = worker.run(job, self._timeout_s)
                if found.kind == "timeout" and self._at_once > 1:
                    found = self._again(worker, job)
                if not found.ok:
                    return found
            return found
        finally:
            self._idle.put(worker)

    def _again(self, worker: Worker, job: Job) -> Measurement:
        """Alone on the device."""
        worker.start(self._device)
        with self._alone:
            for _ in range(self._at_once):
                self._turn.acquire()
            try:
                return worker.run(job, self._timeout_s)
            finally:
                self._turn.release(self._at_once)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
