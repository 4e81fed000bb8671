from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import CompileError, ToolchainMissing
from kvgen.registry import Store
from kvgen.spec import KernelSpec
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.compilers import cpu_name
from kvgen.tune import compile_only, contenders
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import CompileReport, compile_space, covering
from kvgen.tune.trial_store import flatten
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, SeveralDefaults, tiny_spec


def compiled(root: Path, backend: FakeBackend | None = None, limit: int | None = None) -> CompileReport:
    store, cache = Store(root / "registry"), ArtifactCache(root / "cache")
    return compile_space(tiny_spec(), "cpu", backends=[backend or FakeBackend()], limit=limit, store=store, cache=cache)


def test_every_schedule_is_compiled_and_the_default_registered_as_untuned(tmp_path: Path):
    report = compiled(tmp_path)
    assert len(report.outcomes) == report.feasible == 11
    assert {outcome.kind for outcome in report.outcomes} == {"ok"}
    assert report.entry.timings == ()
    assert report.entry.provenance["tuned"] is False
    assert report.path.is_dir()
    assert report.to_json()["excluded"] == []


def test_an_untuned_entry_has_all_defaults(tmp_path: Path):
    entry = compiled(tmp_path, SeveralDefaults(), limit=1).entry
    assert [launch.params["threads"] for launch in entry.launches] == [2, 2]
    assert [launch.params["threads"] for launch in entry.further] == [1, 8]
    assert Store(tmp_path / "registry").all()[0].entry == entry
    for broken in (2, 8):
        with pytest.raises(CompileError, match="a default schedule of cpu"):
            compiled(tmp_path, SeveralDefaults(broken=broken))


def test_what_does_not_compile_is_excluded_by_name(tmp_path: Path):
    report = compiled(tmp_path, FakeBackend(broken=8))
    excluded = report.to_json()["excluded"]
    assert {outcome["schedule"]["launch"]["threads"] for outcome in excluded} == {8}
    assert {outcome["kind"] for outcome in excluded} == {"compile_error"}
    with pytest.raises(CompileError, match="default schedule of cpu"):
        compiled(tmp_path, FakeBackend(broken=2))


def test_spills_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from kvgen.toolchain import Artifact, KernelResources, Resources

    def build_many(sources: list[object], workers: object, cache: object) -> list[tuple[int, Artifact]]:
        kernels = {"attend": KernelResources(255, 16, 1024)}
        return [(i, Artifact(str(i), tmp_path, Resources("nvcc", 1.0, kernels if i else {}))) for i in range(len(sources))]

    monkeypatch.setattr(compile_only, "build_many", build_many)
    report = compiled(tmp_path)
    spilling = [outcome for outcome in report.outcomes if outcome.kind == "spills"]
    assert len(spilling) == 10
    assert (spilling[0].registers, spilling[0].spill_bytes, spilling[0].shared_bytes) == (255, 16, 1024)
    assert "16 bytes" in spilling[0].detail


def test_a_covering_set_holds_every_value(tmp_path: Path):
    backend, spec = FakeBackend(), tiny_spec()
    space = backend.space(spec, "cpu")
    every = list(space.schedules())
    chosen = covering(space, every, [backend.default(spec, "cpu")], 4)
    assert len(chosen) == 4
    assert chosen[0] == backend.default(spec, "cpu")
    assert {item for s in chosen for item in flatten(s).items()} == {item for s in every for item in flatten(s).items()}
    assert len(compiled(tmp_path, limit=2).outcomes) == 2


def test_tuning_later_compiles_nothing_and_takes_the_untuned_entrys_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiled(tmp_path)
    import kvgen.toolchain.compile as compiling

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(compiling, "_compile", refuse)
    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    result = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    assert [one.entry for one in store.all()] == [result.entry]
    again = compiled(tmp_path)
    assert again.entry == result.entry


def test_tuning_leaves_untuned_entries_of_other_workloads_and_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    other = tiny_spec(workloads=[{"batch": 8, "kv_len": 4096}])

    def entry(spec: KernelSpec, device: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("kvgen.tune.register.here", lambda _: {"name": device})
            return compile_space(spec, "cpu", backends=[FakeBackend()], limit=1, store=store, cache=cache).entry.key

    kept = {entry(other, cpu_name()), entry(tiny_spec(), "Another CPU")}
    replaced = entry(tiny_spec(), "")
    result = tune(tiny_spec(), "cpu", Budget(trials=1), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    assert replaced != result.entry.key
    assert {one.key for one in store.all()} == {*kept, result.entry.key}


def test_without_a_compiler_the_reason_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import kvgen.toolchain.compilers as compilers

    def missing(language: str) -> None:
        raise ToolchainMissing("g++ was not found")

    monkeypatch.setattr(compilers, "compiler_for", missing)
    with pytest.raises(ToolchainMissing, match=r"^cannot compile for cpu here: g\+\+ was not found$"):
        compiled(tmp_path)
    assert contenders.contenders(tiny_spec(), "cpu", [FakeBackend()])[0]
