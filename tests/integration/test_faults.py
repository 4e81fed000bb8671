"""Candidates that crash, hang, eat all memory, return wrong numbers or do not compile: recorded, named, survived."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.arch import Target
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.measure.measurement import Candidate, Measurement
from kvgen.registry import Store
from kvgen.spec import AnyWorkload, KernelSpec
from kvgen.spec.dispatch import Tiling
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compilers import find_gxx
from kvgen.tune.budget import Budget
from kvgen.tune.measuring import Runner
from kvgen.tune.tuner import TuningResult, tune
from kvgen.verify import CheckPolicy
from tests.support.naive import BLOCK, naive_source, naive_spec
from tests.support.tuning import FakeBackend

KINDS = {"crash": "crash", "hang": "timeout", "eat": "oom", "wrong": "wrong", "broken": "compile_error"}

LIMIT = 256 << 20
FAULTY = ("crash", "hang", "eat", "wrong")


class FaultyBackend(FakeBackend):
    """The default is right. Every other candidate fails in one way: it crashes, hangs, takes all memory, is wrong or does not compile."""

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        faults = Parameter("fault", "launch", ("none", *FAULTY, "broken"), "what it does")
        block, order = (Parameter(name, "layout", (value,), name) for name, value in (("block", BLOCK), ("order", "simd")))
        return SearchSpace(self.name, [block, order, faults], workloads=spec.workloads)

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        return Schedule(self.name, Params(block=BLOCK, order="simd"), Params(fault="none"))

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        return Tiling(1, 1, 1, 64, 1024, 1.0)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        fault = schedule.launch.text("fault")
        if fault == "broken":
            return Source("#error this schedule does not compile\n", "c++", "cpu")
        return naive_source(None if fault == "none" else fault)


def run(root: Path, backend: FaultyBackend | None = None, runner_of: type[Runner] = Runner) -> TuningResult:
    cache = ArtifactCache(root / "cache")
    check = CheckPolicy(most_tokens=1 << 11)
    runner = runner_of(naive_spec(), "cpu", cache.root / "tuning", memory_bytes=LIMIT, timeout_s=12.0, check=check)
    return tune(
        naive_spec(),
        "cpu",
        Budget(),
        backends=[backend or FaultyBackend()],
        store=Store(root / "registry"),
        cache=cache,
        runner=runner,
    )


@pytest.mark.slow
def test_no_fault_ends_the_run_and_each_is_named(tmp_path: Path):
    result = run(tmp_path)
    failures = {record.candidate.schedule.launch["fault"]: record for record in result.failures}
    assert {fault: record.kind for fault, record in failures.items()} == KINDS
    assert all(record.detail for record in failures.values())
    assert "SIGSEGV" in failures["crash"].detail
    assert "this schedule does not compile" in failures["broken"].detail
    assert result.entry.launches[0].params["fault"] == "none"
    named = result.to_json()["failures"]
    assert {(item["kind"], item["schedule"]["launch"]["fault"]) for item in named} == {(kind, fault) for fault, kind in KINDS.items()}


SLOW = 100
FAST = "/* fast */"


class PacedRunner(Runner):
    """In the final a launch takes the time that it names, whatever else the machine does."""

    def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Measurement]:
        found = super().final(entrants, seconds)
        return [replace(one, samples=(1.0 + one.candidate.schedule.launch.integer("pace"),) * len(one.samples)) for one in found]


class PacedBackend(FaultyBackend):
    """The default takes longer than the other launch, which wins as long as it is right."""

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        layout = [Parameter(name, "layout", (value,), name) for name, value in self.default(spec, target).layout.items()]
        return SearchSpace(self.name, [*layout, Parameter("pace", "launch", (SLOW, 0), "time")], workloads=spec.workloads)

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        return Schedule(self.name, super().default(spec, target).layout, Params(pace=SLOW))

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        pace, naive = schedule.launch.integer("pace"), naive_source()
        return replace(naive, text=f"{'int slow;' if pace else FAST}\n{naive.text}")


@pytest.mark.slow
def test_what_no_build_has_verified_is_not_registered_though_it_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second build has records of both launches, and measures none; another compiler of the same version makes the fast one wrong."""
    first = run(tmp_path, PacedBackend(), PacedRunner)
    assert (first.measured, first.entry.launches[0].params["pace"]) == (2, 0)
    wrapper = tmp_path / "g++"
    fault = "s/^.. fast ..$/#define FAULT_WRONG/"
    wrapper.write_text(f"#!/bin/sh\n[ -f kernel.cpp ] && sed -i '{fault}' kernel.cpp\nexec {shutil.which('g++')} \"$@\"\n")
    wrapper.chmod(0o755)
    shutil.rmtree(tmp_path / "cache" / "modules")
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(wrapper))
        find_gxx.cache_clear()
        second = run(tmp_path, PacedBackend(), PacedRunner)
    find_gxx.cache_clear()
    assert (second.measured, second.known) == (0, 2)
    assert [found.entry for found in Store(tmp_path / "registry").all()] == [second.entry]
    assert second.entry.launches[0].params["pace"] == SLOW
    assert [(record.kind, record.candidate.schedule.launch["pace"]) for record in second.failures] == [("wrong", 0)]
    assert second.entry.accuracy["2x96"]["relative_l2"] < 1e-5
