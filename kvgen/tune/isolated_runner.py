"""Measures candidates in worker processes, one per device, so that a candidate that crashes or hangs costs one measurement."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

from filelock import FileLock, Timeout

from kvgen._machine import available_bytes, cores
from kvgen._nvml import gpu_uuid, named_gpus, visible_gpus
from kvgen.arch import Target, device_type
from kvgen.errors import MeasureError, host_errors
from kvgen.measure.device import fingerprint
from kvgen.measure.measurement import LEAST_ROUNDS, Job, Measurement, TimingPolicy, compare
from kvgen.measure.worker import Worker, compile_read_roofline
from kvgen.plaindata import Facts
from kvgen.spec import AnySpec
from kvgen.toolchain import Artifact
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.decide import Kind
from kvgen.tune.runner import Passed
from kvgen.verify import CheckPolicy

CPU_SEARCH = TimingPolicy(seconds=0.2)
CUDA_SEARCH = TimingPolicy(seconds=0.05, warmup_seconds=0.02)
FINAL = TimingPolicy(seconds=0.05, warmup_seconds=0.01, samples=15, read=True)
ROUNDS = 15
"""Rounds of the final, where there is time."""
CLEAR = 0.01
"""Relative gain that counts as faster: samples of one round are paired, so 1 % is distinguishable from noise."""
OVERHEAD_S = 0.05
"""Seconds that a finalist's sample takes besides the timed calls: graph capture, copies of inputs, the read roofline."""
TIMEOUT_S = 60.0
WAIT_S = 0.2
"""Seconds after which a wait for another process's measurement looks whether the run has ended."""


class IsolatedRunner:
    """Measures in killable workers. Of the processes that share a folder of locks, only one measures on a device at a time."""

    def __init__(
        self,
        spec: AnySpec,
        target: Target,
        locks: Path,
        devices: Sequence[int] | None = None,
        *,
        memory_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
        check: CheckPolicy | None = None,
    ) -> None:
        """`devices` are GPU indices among the visible ones; None means the current device. Lock files go to `locks`.

        Candidates are verified by `check`. A candidate may take `memory_bytes` of host memory (half of what is free by default) and
        `timeout_s` per stage.
        Raises KvgenError for a GPU that is not visible.
        """
        self._timeout_s = timeout_s
        self._check = check or CheckPolicy()
        self.passed: dict[Passed, Facts] = {}
        self._verified: dict[str, Mapping[str, float]] = {}  # by sha256: checks that do not depend on the workload run once
        self._verifying: dict[str, Event] = {}  # by sha256: a device runs these checks now
        self._choosing = Lock()
        self._closed = Event()
        self._spec, self._target = spec, target
        visible = [] if target == "cpu" else visible_gpus()
        names: Sequence[str | None] = named_gpus(devices) if devices and target != "cpu" else [None]
        self.devices = len(names)
        self.exclusive = target == "cpu"
        self._search = CPU_SEARCH if target == "cpu" else CUDA_SEARCH
        self.policy: Mapping[str, Any] = {"device": fingerprint(target), "timing": asdict(self._search), "check": asdict(self._check)}
        memory_bytes = memory_bytes if memory_bytes is not None else available_bytes() // (1 + self.devices)
        self._workers = [Worker(memory_bytes, {**_threads(self.devices), **_visible(name)}) for name in names]
        first = visible[0] if visible else "cpu" if target == "cpu" else "gpu"
        self._locks = [locks / f"measure-{gpu_uuid(name or first) if visible else first}.lock" for name in names]

    def ready(self) -> None:
        """See `Runner`. All workers start at the same time, because loading torch takes each of them seconds."""
        with ThreadPoolExecutor(self.devices, thread_name_prefix="start") as pool:
            starting = [pool.submit(self._start, device) for device in range(self.devices)]
            compile_read_roofline(self._target)
            for started in starting:
                started.result()

    def _start(self, device: int) -> None:
        with self._locked(device):
            self._workers[device].start(device_type(self._target))

    def shortest_final(self, entrants: int) -> float:
        """See `Runner`."""
        return entrants * LEAST_ROUNDS * (FINAL.seconds + FINAL.warmup_seconds + OVERHEAD_S)

    def measure(self, candidate: Candidate, artifact: Artifact, device: int) -> Record:
        """See `Runner`."""
        module = artifact.sha256
        with self._choosing:
            running = self._verifying.get(module)
            whole = running is None and module not in self._verified
            if whole:
                self._verifying[module] = Event()
        try:
            outcome = self._run(candidate, artifact, device, whole=whole)
        finally:
            if whole:
                self._verifying.pop(module).set()
        if running is not None:  # another device verified it meanwhile
            running.wait()
            if outcome.ok and module not in self._verified:  # and it is wrong: this record has to say so, too
                outcome = self._run(candidate, artifact, device, whole=True)
        return self._judged(candidate, artifact, outcome)

    def _run(self, candidate: Candidate, artifact: Artifact, device: int, *, whole: bool, timing: bool = True) -> Measurement:
        """Verify, then time; `whole`: with the checks that do not depend on the workload."""
        job = self._job(candidate, artifact, self._search if timing else None, replace(self._check, workloads_only=not whole))
        with self._locked(device):
            outcome = self._workers[device].run(job, self._timeout_s)
        verified = self._verified.get(artifact.sha256)
        outcome = replace(outcome, accuracy=worst(verified or {}, outcome.accuracy))
        if outcome.ok and (whole or verified is not None):
            self._verified[artifact.sha256] = outcome.accuracy
        return outcome

    def _judged(self, candidate: Candidate, artifact: Artifact, outcome: Measurement) -> Record:
        """The record of a candidate that was verified, with the checks that do not depend on the workload."""
        if outcome.ok:
            self.passed[artifact.sha256, candidate.workload.key] = outcome.accuracy
        return _record(candidate, artifact, outcome)

    def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Record]:
        """See `Runner`. The finalists are measured A B C A B C … on the first device; a finalist that fails is out."""
        jobs = [self._job(candidate, artifact, FINAL, None) for candidate, artifact in entrants]
        with self._locked(0):
            outcomes = self._workers[0].interleave(jobs, ROUNDS, self._timeout_s, seconds=seconds)
        return [_record(candidate, artifact, outcome) for (candidate, artifact), outcome in zip(entrants, outcomes, strict=True)]

    def verify(self, candidate: Candidate, artifact: Artifact) -> Record:
        """See `Runner`. On the first device."""
        outcome = self._run(candidate, artifact, 0, whole=artifact.sha256 not in self._verified, timing=False)
        return self._judged(candidate, artifact, outcome)

    def compare(self, new: Record, old: Record) -> Kind:
        """See `Runner`."""
        return compare(new.samples, old.samples, min_effect=CLEAR).kind

    def close(self) -> None:
        """See `Runner`. A thread that waits for a device gives up, too."""
        self._closed.set()
        for worker in self._workers:
            worker.close()

    def _job(self, candidate: Candidate, artifact: Artifact, timing: TimingPolicy | None, check: CheckPolicy | None) -> Job:
        return Job(self._spec, candidate.schedule, self._target, artifact.path, candidate.workload, check, timing)

    @contextmanager
    def _locked(self, device: int) -> Iterator[None]:
        file = self._locks[device]
        with host_errors("lock", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file)
            while True:
                if self._closed.is_set():
                    raise MeasureError("the run has ended")
                try:
                    lock.acquire(timeout=WAIT_S)
                    break
                except Timeout:
                    continue
        try:
            yield
        finally:
            lock.release()


def _visible(name: str | None) -> dict[str, str]:
    return {} if name is None else {"CUDA_VISIBLE_DEVICES": name}


def _threads(devices: int) -> dict[str, str]:
    """Threads of each of several workers, which compute references on the CPU at the same time: a share of the processors."""
    if devices == 1:
        return {}
    share = max(1, cores() // devices)
    given = os.environ.get("OMP_NUM_THREADS", "")
    return {"OMP_NUM_THREADS": str(min(share, int(given)) if given.isdigit() and int(given) else share)}


def worst(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The larger error of two verifications, by name."""
    return {name: max(errors.get(name, 0.0) for errors in (one, other)) for name in {**one, **other}}


def _record(candidate: Candidate, artifact: Artifact, outcome: Measurement) -> Record:
    record = Record(
        candidate, outcome.kind, detail=outcome.detail, accuracy=outcome.accuracy, resources=artifact.resources.to_json(),
        module=artifact.sha256,
    )  # fmt: skip
    if not outcome.ok or not outcome.samples:
        return record
    return replace(
        record, us=outcome.us, read_us=outcome.read_us, samples=outcome.samples, watts=outcome.watts, clock_mhz=outcome.clock_mhz
    )  # fmt: skip
