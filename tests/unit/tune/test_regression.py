from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvgen.errors import ToolchainMissing
from kvgen.lower.base import Source, Target
from kvgen.lower.schedule import Schedule
from kvgen.measure.job import Job, Outcome
from kvgen.measure.worker import Worker
from kvgen.registry import Store
from kvgen.registry.entry import Entry
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache, KernelResources, Resources
from kvgen.tune import regression
from kvgen.tune.budget import Budget
from kvgen.tune.regression import Checked, check_entry
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeBench, tiny_spec


@dataclass
class LaterBackend(FakeBackend):
    """The same back end after a change of its template."""

    comment: str = ""

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        source = super().lower(spec, schedule, target)
        return replace(source, text=source.text + self.comment)


class Place:
    """An entry, a cache, and what the outside world answers."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.patch = ArtifactCache(root / "cache"), monkeypatch
        store = Store(root / "registry")
        tuned = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=store, cache=self.cache, bench=FakeBench())
        self.entry: Entry = tuned.entry
        self.numbers(Outcome("ok", accuracy={"relative_l2": 1e-6}))
        self.render("")

    def render(self, comment: str) -> None:
        self.patch.setattr(regression, "get_backend", lambda name: LaterBackend(name, comment=comment))

    def numbers(self, outcome: Outcome) -> None:
        self.patch.setattr(Worker, "run", lambda worker, job: outcome)

    def resources(self, registers: int, spills: int) -> None:
        kernels = {"attend": KernelResources(registers, spills, 1024)}
        self.patch.setattr(regression, "build", lambda source, cache: Artifact("id", Path(), Resources("nvcc", 1.0, kernels)))

    def check(self, speed: bool = False) -> Checked:
        return check_entry(self.entry, self.cache, speed=speed)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def told(checked: Checked) -> dict[str, str]:
    return {finding.aspect: finding.status for finding in checked.findings}


def test_what_is_as_it_was_is_good(place: Place):
    checked = place.check()
    assert told(checked) == {"source": "good", "resources": "good", "numerics": "good"}
    assert not checked.regressed
    assert checked.renewed == place.entry


def test_a_source_that_renders_differently_regresses_and_can_be_accepted(place: Place):
    place.render("// changed\n")
    checked = place.check()
    assert checked.regressed
    assert "line 2" in checked.findings[0].detail
    assert checked.renewed is not None
    place.entry = checked.renewed
    assert not place.check().regressed
    assert place.entry.timings


def test_more_registers_or_spills_regress_and_fewer_are_a_change(place: Place):
    kernels = {"attend": KernelResources(100, 0, 1024)}
    codes = {file: replace(code, resources=Resources("nvcc", 1.0, kernels)) for file, code in place.entry.codes.items()}
    place.entry = replace(place.entry, codes=codes)
    for registers, spills, status in ((100, 0, "good"), (120, 0, "regressed"), (100, 8, "regressed"), (90, 0, "changed")):
        place.resources(registers, spills)
        checked = place.check()
        assert told(checked)["resources"] == status
        assert checked.regressed == (status == "regressed")


def test_wrong_numbers_regress(place: Place):
    place.numbers(Outcome("wrong", "attend of long: relative l2 is 0.5"))
    checked = place.check()
    assert told(checked)["numerics"] == "regressed"
    assert "relative l2 is 0.5" in checked.to_json()["findings"][2]["detail"]
    assert checked.renewed is None, "what is wrong cannot be accepted"


def test_without_a_compiler_the_rest_is_skipped_by_name(place: Place):
    def missing(source: Source, cache: ArtifactCache) -> Artifact:
        raise ToolchainMissing("g++ was not found")

    place.patch.setattr(regression, "build", missing)
    checked = place.check()
    assert told(checked) == {"source": "good", "resources": "skipped"}
    assert checked.findings[1].detail == "g++ was not found"
    assert checked.renewed is None


def test_speed_compares_a_changed_source_with_the_old_one(place: Place):
    assert told(place.check(speed=True))["speed"] == "good"
    place.render("// slower\n")
    samples = {True: tuple(10.0 + i % 3 for i in range(11)), False: tuple(5.0 + i % 2 for i in range(11))}

    def turns(jobs: list[Job], rounds: int, worker: Worker) -> list[Outcome]:
        from kvgen.spec.timing import Timing

        return [Outcome("ok", timings=(Timing(jobs[0].workloads[0], samples[i == 0][0], samples[i == 0]),)) for i in range(len(jobs))]

    place.patch.setattr(regression, "interleave", turns)
    checked = place.check(speed=True)
    assert told(checked)["speed"] == "regressed"
    assert "slower" in checked.findings[-1].detail
