from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import CompileError
from kvgen.toolchain import Artifact, ArtifactCache, KernelResources, Resources
from kvgen.tune import compile_only
from kvgen.tune.compile_only import CompileOutcome, compile_space
from tests.support.tuning import FakeBackend, SeveralDefaults, compile_nothing, tiny_spec


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return compile_nothing(monkeypatch)


def compile_in(root: Path, backend: FakeBackend, limit: int | None = None) -> list[CompileOutcome]:
    return compile_space(tiny_spec(), "cpu", backends=[backend], limit=limit, cache=ArtifactCache(root / "cache"))


def test_every_schedule_is_compiled_or_the_defaults_and_some(tmp_path: Path, compiled: list[str]):
    outcomes = compile_in(tmp_path, SeveralDefaults())
    assert len(outcomes) == len(compiled) == 11
    assert {outcome.kind for outcome in outcomes} == {"ok"}
    assert [one.schedule.launch["threads"] for one in compile_in(tmp_path, SeveralDefaults(), limit=1)] == [2, 1, 8]


def test_what_does_not_compile_is_told_by_name(tmp_path: Path):
    failed = [one for one in compile_in(tmp_path, FakeBackend(broken=8)) if one.kind != "ok"]
    assert {(one.kind, one.schedule.launch["threads"]) for one in failed} == {("compile_error", 8)}
    assert all(one.detail for one in failed)


def test_where_nothing_compiles_the_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused = CompileError("g++ ended with 1", "no such header")
    monkeypatch.setattr(compile_only, "build_many", lambda sources, workers, cache: [(i, refused) for i in range(len(sources))])
    with pytest.raises(CompileError, match="no schedule compiles\n.*\n.*no such header"):
        compile_in(tmp_path, FakeBackend())


def test_spills_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def build_many(sources: list[object], workers: object, cache: object) -> list[tuple[int, Artifact]]:
        kernels = {"attend": KernelResources(255, 16, 1024)}
        return [(i, Artifact(str(i), tmp_path, Resources("nvcc", 1.0, kernels if i else {}))) for i in range(len(sources))]

    monkeypatch.setattr(compile_only, "build_many", build_many)
    spilling = [outcome for outcome in compile_in(tmp_path, FakeBackend()) if outcome.kind == "spills"]
    assert len(spilling) == 10
    assert (spilling[0].registers, spilling[0].spill_bytes, spilling[0].shared_bytes) == (255, 16, 1024)
