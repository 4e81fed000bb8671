"""An entry to check: fake back ends that change after it was tuned, and answers of the outside world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvgen.arch import Target
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Schedule
from kvgen.lower.space import SearchSpace
from kvgen.measure.measurement import Job, Measurement
from kvgen.measure.worker import Worker
from kvgen.registry import Store
from kvgen.registry.entry import Entry
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache, KernelResources, Resources
from kvgen.tune import regression as entry_check
from kvgen.tune.budget import Budget
from kvgen.tune.regression import Checked, check_entry
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


@dataclass
class LaterBackend(FakeBackend):
    """The same back end after a change: of its template, of its space, or of what it supports."""

    comment: str = ""
    blocks: tuple[int, ...] = ()

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        source = super().lower(spec, schedule, target)
        return replace(source, text=source.text + self.comment)

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        space = super().space(spec, target)
        if not self.blocks:
            return space
        parameters = [replace(p, values=self.blocks) if p.name == "block" else p for p in space.parameters]
        return SearchSpace(self.name, parameters, space.constraints, {}, spec.workloads, space.hints)


class Place:
    """A registry with one tuned entry, a cache, and what the outside world answers."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.patch = ArtifactCache(root / "cache"), monkeypatch
        self.store = Store(root / "registry")
        runner = FakeRunner()
        tuned = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=self.store, cache=self.cache, runner=runner)
        self.entry: Entry = tuned.entry
        self.jobs: list[Job] = []
        self.numbers(Measurement("ok", accuracy={"relative_l2": 1e-6}))
        self.later()

    def later(self, **changes: object) -> None:
        """What the back end is when the entry is checked."""

        def backend(name: str) -> LaterBackend:
            return LaterBackend(name, **changes)  # type: ignore[arg-type]

        self.patch.setattr("kvgen.lower.backend.get_backend", backend)

    def numbers(self, outcome: Measurement) -> None:
        def run(worker: Worker, job: Job) -> Measurement:
            self.jobs.append(job)
            return outcome

        self.patch.setattr(Worker, "run", run)

    def resources(self, registers: int, spills: int) -> None:
        kernels = {"attend": KernelResources(registers, spills, 1024)}
        self.build(lambda source, cache: Artifact("id", Path(), Resources("nvcc", 1.0, kernels)))

    def build(self, build: Callable[[Source, ArtifactCache], Artifact]) -> None:
        self.patch.setattr(entry_check, "build", build)

    def interleaved(self, answer: Callable[[list[Job]], list[Measurement]]) -> None:
        """Set the outcomes that timing jobs A B A B … returns."""
        self.patch.setattr(Worker, "interleave", lambda worker, jobs, rounds: answer(list(jobs)))

    def check(self, speed: bool = False) -> Checked:
        return check_entry(replace(self.entry), self.cache, speed=speed)  # which renders anew


def told(checked: Checked) -> dict[str, str]:
    return {finding.aspect: finding.status for finding in checked.findings}


def detail(checked: Checked, aspect: str) -> str:
    return next(finding.detail for finding in checked.findings if finding.aspect == aspect)
