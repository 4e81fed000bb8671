"""The bench of real runs: workers of the measure room, one per device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvgen.lower.base import Target
from kvgen.measure.device import fingerprint
from kvgen.measure.finalists import interleave
from kvgen.measure.job import LEAST_ROUNDS, CheckPolicy, Job, Outcome, TimingPolicy
from kvgen.measure.verdict import compare
from kvgen.measure.worker import Worker, ready_yardstick
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact
from kvgen.tune.decide import Kind
from kvgen.tune.point import Point, Record

CPU_SEARCH = TimingPolicy(seconds=0.2)
CUDA_SEARCH = TimingPolicy(seconds=0.05, warmup_seconds=0.02)
FINAL = TimingPolicy(seconds=0.05, warmup_seconds=0.01, samples=15, read=True)
ROUNDS = 15
"""Rounds of the final, where there is time."""
CLEAR = 0.01
"""What a finalist must be faster by: turns are paired, so as little can be told from noise."""
TURN_S = 0.05
"""What a turn takes besides its samples: capture, copies of inputs, its share of the read."""
TIMEOUT_S = 60.0


class Cage:
    """Measures in killable workers. Only one process of the machine measures on a device at a time."""

    def __init__(
        self,
        spec: KernelSpec,
        target: Target,
        locks: Path,
        devices: Sequence[int] | None = None,
        *,
        memory_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
        check: CheckPolicy | None = None,
    ) -> None:
        """`devices` are GPU indices among the visible ones; None means the current device. Lock files go to `locks`.

        Candidates are verified by `check`. One may take `memory_bytes` of host memory (half of what is free by default) and
        `timeout_s` per stage.
        """
        self._timeout_s = timeout_s
        self._check = check or CheckPolicy()
        self._verified: dict[str, Mapping[str, float]] = {}  # by artifact: what no workload is part of is verified once
        self._spec, self._target = spec, target
        names = [_visible(index) for index in devices] if devices and target != "cpu" else [None]
        self.devices = len(names)
        self.exclusive = target == "cpu"
        self._search = CPU_SEARCH if target == "cpu" else CUDA_SEARCH
        self.policy: Mapping[str, Any] = {"device": fingerprint(target), "timing": asdict(self._search), "check": asdict(self._check)}
        self._workers = [Worker(memory_bytes, {} if name is None else {"CUDA_VISIBLE_DEVICES": name}) for name in names]
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self._locks = [locks / f"measure-{'cpu' if target == 'cpu' else name or first}.lock" for name in names]

    def ready(self) -> None:
        """See `Bench`."""
        for device, worker in enumerate(self._workers):
            with self._alone(device):
                worker.start("cpu" if self._target == "cpu" else "cuda")
        ready_yardstick(self._target)

    def shortest_final(self, entrants: int) -> float:
        """See `Bench`."""
        return entrants * LEAST_ROUNDS * (FINAL.seconds + FINAL.warmup_seconds + TURN_S)

    def measure(self, point: Point, artifact: Artifact, device: int) -> Record:
        """See `Bench`."""
        verified = self._verified.get(artifact.id)
        job = self._job(point, artifact, self._search, replace(self._check, workloads_only=verified is not None))
        with self._alone(device):
            outcome = self._workers[device].run(job, self._timeout_s)
        outcome = replace(outcome, accuracy=worst(verified or {}, outcome.accuracy))
        if outcome.ok:
            self._verified[artifact.id] = outcome.accuracy
        return _record(point, artifact, outcome)

    def final(self, entrants: Sequence[tuple[Point, Artifact]], seconds: float | None) -> list[Record]:
        """See `Bench`. All take turns on the first device; who fails is out."""
        jobs = [self._job(point, artifact, FINAL, None) for point, artifact in entrants]
        with self._alone(0):
            outcomes = interleave(jobs, ROUNDS, self._timeout_s, self._workers[0], seconds=seconds)
        return [_record(point, artifact, outcome) for (point, artifact), outcome in zip(entrants, outcomes, strict=True)]

    def compare(self, new: Record, old: Record) -> Kind:
        """See `Bench`."""
        return compare(new.samples, old.samples, min_effect=CLEAR).kind

    def close(self) -> None:
        """See `Bench`."""
        for worker in self._workers:
            worker.close()

    def _job(self, point: Point, artifact: Artifact, timing: TimingPolicy, check: CheckPolicy | None) -> Job:
        return Job(self._spec, point.schedule, self._target, artifact.path, (point.workload,), check, timing)

    @contextmanager
    def _alone(self, device: int) -> Iterator[None]:
        lock = self._locks[device]
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            yield


def worst(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The larger error of two verifications, by name."""
    return {name: max(errors.get(name, 0.0) for errors in (one, other)) for name in {**one, **other}}


def _visible(index: int) -> str:
    """The name of a GPU for a process of its own, given its index among those visible here."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)


def _record(point: Point, artifact: Artifact, outcome: Outcome) -> Record:
    resources = artifact.resources.to_json()
    if not outcome.ok or not outcome.timings:
        return Record(point, outcome.kind, detail=outcome.detail, accuracy=outcome.accuracy, resources=resources)
    timing = outcome.timings[0]
    return Record(point, outcome.kind, timing.us, timing.read_us, timing.samples, outcome.accuracy, outcome.detail, resources)
