from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import CompileError
from kvgen.registry import Store
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache, KernelResources, Resources
from kvgen.toolchain.compilers import cpu_name
from kvgen.tune import compile_only
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import CompileReport, compile_space
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, SeveralDefaults, compile_nothing, tiny_spec


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return compile_nothing(monkeypatch)


def compile_in(root: Path, backend: FakeBackend | None = None, limit: int | None = None, spec: KernelSpec | None = None) -> CompileReport:
    store, cache = Store(root / "registry"), ArtifactCache(root / "cache")
    return compile_space(spec or tiny_spec(), "cpu", backends=[backend or FakeBackend()], limit=limit, store=store, cache=cache)


def test_every_schedule_is_compiled_and_the_defaults_registered_as_untuned(tmp_path: Path, compiled: list[str]):
    report = compile_in(tmp_path, SeveralDefaults())
    assert len(report.outcomes) == report.feasible == len(compiled) == 11
    assert {outcome.kind for outcome in report.outcomes} == {"ok"}
    assert (report.entry.timings, report.entry.provenance["tuned"]) == ((), False)
    assert [(launch.params["threads"], len(launch.workloads)) for launch in report.entry.launches] == [(2, 2), (1, 0), (8, 0)]
    assert [one.entry for one in Store(tmp_path / "registry").all()] == [report.entry]


def test_what_does_not_compile_is_excluded_by_name(tmp_path: Path):
    excluded = compile_in(tmp_path, FakeBackend(broken=8)).to_json()["excluded"]
    assert {(outcome["kind"], outcome["schedule"]["launch"]["threads"]) for outcome in excluded} == {("compile_error", 8)}
    with pytest.raises(CompileError, match="default schedule of cpu"):
        compile_in(tmp_path, FakeBackend(broken=2))


def test_spills_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def build_many(sources: list[object], workers: object, cache: object) -> list[tuple[int, Artifact]]:
        kernels = {"attend": KernelResources(255, 16, 1024)}
        return [(i, Artifact(str(i), tmp_path, Resources("nvcc", 1.0, kernels if i else {}))) for i in range(len(sources))]

    monkeypatch.setattr(compile_only, "build_many", build_many)
    spilling = [outcome for outcome in compile_in(tmp_path).outcomes if outcome.kind == "spills"]
    assert len(spilling) == 10
    assert (spilling[0].registers, spilling[0].spill_bytes, spilling[0].shared_bytes) == (255, 16, 1024)


def test_a_tuned_entry_takes_the_place_of_an_untuned_one_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of other workloads and machines stay."""

    def entry(spec: KernelSpec, device: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("kvgen.tune.compile_only.here", lambda _: {"name": device})
            return compile_in(tmp_path, limit=1, spec=spec).entry.key

    kept = {entry(tiny_spec(workloads=[{"batch": 8, "kv_len": 4096}]), cpu_name()), entry(tiny_spec(), "Another CPU")}
    entry(tiny_spec(), "")
    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    result = tune(tiny_spec(), "cpu", Budget(trials=1), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    assert {one.key for one in store.all()} == {*kept, result.entry.key}
    assert compile_in(tmp_path, limit=1).entry == result.entry
