"""A back end whose sources are one line, and a runner that makes times up: the tuner without kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvgen.arch import Target
from kvgen.errors import CompileError
from kvgen.lower.backend import Source
from kvgen.lower.constraints import Rule
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.measure.measurement import Candidate, Measurement, VerdictKind
from kvgen.spec import AnyWorkload, KernelSpec, load_spec
from kvgen.spec.dispatch import Tiling
from kvgen.toolchain import Artifact, ArtifactCache, Resources
from kvgen.tune.measuring import Runner


def tiny_spec(**changes: Any) -> KernelSpec:
    """One KV head of 32 channels in int4, two workloads."""
    data = {
        "name": "tiny",
        "arch": "cpu",
        "attention": {"q_heads": 2, "kv_heads": 1, "head_dim": 32, "dtype": "float32"},
        "key": {"bits": 4, "axis": "channel", "group": 32},
        "value": {"bits": 4, "axis": "token", "group": 32},
        "workloads": [{"batch": 1, "kv_len": 128}, {"batch": 2, "kv_len": 512}],
    }
    return load_spec({**data, **changes})


@dataclass
class FakeBackend:
    """Three layouts of four launches; `broken` threads do not compile."""

    name: str = "cpu"
    targets: tuple[Target, ...] = ("cpu",)
    reason: str | None = None
    broken: int = -1

    def missing(self) -> str | None:
        return None

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        return self.reason

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        return SearchSpace(
            self.name,
            [
                Parameter("block", "layout", (32, 64, 128), "tokens"),
                Parameter("order", "layout", ("simd",), "order"),
                Parameter("threads", "launch", (1, 2, 4, 8), "threads"),
            ],
            [Rule("{threads} threads have no block each", lambda p: p.threads <= p.kv_len // p.block)],
            {},
            spec.workloads,
        )

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        return Schedule(self.name, Params(block=64, order="simd"), Params(threads=2))

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        return (self.default(spec, target),)

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        return Tiling(1, schedule.launch.integer("threads"), 1, 64, 1024, 1.0)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        text = (
            "#error no\n"
            if schedule.launch["threads"] == self.broken
            else f'extern "C" int id() {{ return {int(schedule.id, 16) % 9999}; }}\n'
        )
        return Source(text, "c++", "cpu")


class SeveralDefaults(FakeBackend):
    """One with three defaults."""

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        return tuple(Schedule(self.name, self.default(spec, target).layout, Params(threads=threads)) for threads in (2, 1, 8))


def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources are compiled in no time, to modules that are not there. Returns their ids, as they are compiled."""
    compiled: list[str] = []

    def build(source: Source, cache: ArtifactCache, **options: object) -> Artifact:
        if "#error" in source.text:
            raise CompileError("it does not compile", source.text)
        compiled.append(source.id)
        return Artifact(source.id, Path("/nothing"), Resources("none", 0.0), sha256=f"sha256 of {source.id}")

    monkeypatch.setattr("kvgen.toolchain.compile.build", build)
    monkeypatch.setattr(ArtifactCache, "mark_verified", lambda *_: None)
    return compiled


def fake_cost(candidate: Candidate) -> float:
    """Best with small blocks and, at the larger workload, with many threads."""
    threads = candidate.schedule.launch.integer("threads")
    return (
        100.0 * candidate.workload.batch
        + candidate.schedule.layout.integer("block")
        + 10.0 * abs(threads - 4 * (candidate.workload.batch - 1))
    )


@dataclass
class FakeRunner(Runner):
    """Times by formula; `outcome` may make a candidate fail, or raise."""

    cost: Callable[[Candidate], float] = fake_cost
    outcome: Callable[[Candidate], str] = lambda _: "ok"
    devices: int = 1
    exclusive: bool = True
    policy: dict[str, Any] = field(default_factory=lambda: {"runner": "fake"})
    measured: list[Candidate] = field(default_factory=list)
    finals: list[list[Candidate]] = field(default_factory=list)
    verified: list[Candidate] = field(default_factory=list)
    passed: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    closed: bool = False

    def measure(self, candidate: Candidate, artifact: Artifact, device: int, seconds: float = math.inf) -> Measurement | None:
        self.measured.append(candidate)
        return self._judge(self._record(candidate, artifact))

    def _judge(self, record: Measurement) -> Measurement:
        if record.kind == "ok":
            self.passed[record.module, record.candidate.workload.key] = record.accuracy or {"relative_l2": 1e-5}
        return record

    def _record(self, candidate: Candidate, artifact: Artifact) -> Measurement:
        kind = self.outcome(candidate)
        if kind != "ok":
            return candidate.measured(kind, detail=f"made to fail: {kind}", module=artifact.sha256)
        cost, resources = self.cost(candidate), artifact.resources.to_json()
        return candidate.measured(
            kind, samples=(cost, cost), read_us=50.0, accuracy={"relative_l2": 1e-5}, resources=resources, module=artifact.sha256
        )

    def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Measurement]:
        self.finals.append([candidate for candidate, _ in entrants])
        self.measured += self.finals[-1]
        return [self._record(candidate, artifact) for candidate, artifact in entrants]

    def verify(self, candidate: Candidate, artifact: Artifact) -> Measurement:
        if (artifact.sha256, candidate.workload.key) in self.passed:
            return candidate.measured("ok", module=artifact.sha256)
        self.verified.append(candidate)
        kind = self.outcome(candidate)
        return self._judge(candidate.measured(kind, detail="" if kind == "ok" else f"made to fail: {kind}", module=artifact.sha256))

    def compare(self, new: Measurement, old: Measurement) -> VerdictKind:
        ratio = new.cost / old.cost
        return "faster" if ratio < 0.98 else "slower" if ratio > 1.02 else "same"

    def close(self) -> None:
        self.closed = True
