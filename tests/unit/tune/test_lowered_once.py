"""A candidate is lowered once, however many workloads measure it and whatever becomes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvgen.arch import Target
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Schedule
from kvgen.registry import Store
from kvgen.spec import KernelSpec
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import compile_space
from kvgen.tune.regression import source
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


@dataclass
class Counting(FakeBackend):
    lowered: Counter[str] = field(default_factory=Counter)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        self.lowered[schedule.id] += 1
        return super().lower(spec, schedule, target)


def test_by_a_search_with_its_final_and_its_entry(tmp_path: Path) -> None:
    backend, runner = Counting(), FakeRunner()
    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    entry = tune(tiny_spec(), "cpu", Budget(), backends=[backend], store=store, cache=cache, runner=runner).entry
    assert set(backend.lowered) == {candidate.schedule.id for candidate in runner.measured}
    assert set(backend.lowered.values()) == {1}
    assert {entry.schedule(launch).id for launch in entry.launches} <= set(backend.lowered)


def test_by_a_run_that_only_compiles(tmp_path: Path) -> None:
    backend = Counting()
    compile_space(tiny_spec(), "cpu", backends=[backend], store=Store(tmp_path / "registry"), cache=ArtifactCache(tmp_path / "cache"))
    assert len(backend.lowered) == 11
    assert set(backend.lowered.values()) == {1}


def test_by_a_check_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    entry = tune(tiny_spec(), "cpu", Budget(trials=1), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner()).entry
    backend = Counting()
    monkeypatch.setattr(source, "get_backend", lambda name: backend)
    source.render(entry)
    assert set(backend.lowered) == {entry.schedule(launch).id for launch in entry.launches}
    assert set(backend.lowered.values()) == {1}
