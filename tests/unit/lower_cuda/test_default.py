"""The schedules that are taken without measuring: at most four for a spec, and the one of the least modelled time for a workload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_words import schedule_word, spec_of, workload_of
from kvgen.arch import GPUS, Target
from kvgen.lower.backend import get_backend
from kvgen.spec import KernelSpec, load_spec, presets

CUDA = get_backend("cuda")
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
WORKLOADS = ("1x512", "1x4096", "1x32768", "4x8192", "8x32768", "32x8192", "1024x512")


def defaults(words: str, target: Target = "sm90") -> list[str]:
    """The defaults of a spec, by their words."""
    return [schedule_word(one) for one in CUDA.defaults(spec_of(words, target, [workload_of("1x4096")]), target)]


def default(words: str, work: str, target: Target = "sm90") -> str:
    """The default for a workload, by its word."""
    return schedule_word(CUDA.default(spec_of(words, target, [workload_of(work)]), target))


def formats() -> list[KernelSpec]:
    return [*presets().values(), *(load_spec(file) for file in EXAMPLES)]


@pytest.mark.parametrize("target", list(GPUS))
def test_defaults_lie_in_their_spaces_over_one_layout(target: Target) -> None:
    for spec in formats():
        if CUDA.unsupported(spec, target) is not None:
            continue
        for works in (spec.workloads, *((workload_of(word),) for word in WORKLOADS)):
            wanted = replace(spec, workloads=works)
            (plain, *others), space = CUDA.defaults(wanted, target), CUDA.space(wanted, target)
            assert (plain.launch["copy"], plain.launch["reduction"]) == ("cp_async", "last_cta")
            assert plain.launch["exact_q"] or (spec.value.bits == 2 and not spec.value.per_channel), "the strict limit of single rows"
            assert len(others) <= (3 if GPUS[target].clusters else 0)
            for work in works:
                schedule = CUDA.default(wanted, target, work)
                assert [problem for one in (schedule, plain) for problem in space.doubts(one, work)] == []
            assert {one.layout for one in others} <= {plain.layout}
            assert [problem for one in others for problem in space.check(one)] == []


@pytest.mark.parametrize(
    ("words", "schedules"),
    [
        ("k4v4", ["n128.w8u4d1c1", "n128.w8u1d2c1.cl8", "n128.w8u1d2c1.cl2", "n128.w4u1d2c2"]),
        ("k8v8", ["n128.w8u1d2c1", "n128.w8u1d2c1.cl8", "n128.w8u1d2c1.cl2", "n128.w4u1d2c2"]),
        ("k2v2", ["n128.w8u4d1c1.noexact", "n128.w8u1d2c1.cl8.noexact", "n128.w8u1d2c1.cl2.noexact", "n128.w4u4d1c2.noexact"]),
    ],
)
def test_there_is_one_for_every_call_one_for_each_size_of_cluster_and_one_for_many_heads(words: str, schedules: list[str]) -> None:
    assert defaults(words) == schedules
    assert len(defaults(words, "sm80")) == 1, "no other was measured on GPUs without clusters"


@pytest.mark.parametrize(
    ("work", "schedule"),
    [
        ("1x2048", "n128.w8u1d2c1.cl8"),
        ("9x30000", "n128.w4u1d2c2"),
        ("8x32768", "n128.w8u1d2c1.cl2"),
        ("16x8192", "n128.w8u4d1c1"),
        ("32x8192", "n128.w4u1d2c2"),
        ("64x1024", "n128.w4u1d2c2"),
    ],
)
def test_the_number_of_heads_decides_between_them(work: str, schedule: str) -> None:
    assert default("k4v4", work) == schedule


def test_each_workload_of_a_spec_has_the_default_that_it_has_alone() -> None:
    works = [workload_of(word) for word in ("1x2048", "16x8192", "8x32768", "128x8192")]
    spec = spec_of("k2v2", "sm90", works)
    assert [schedule_word(CUDA.default(spec, "sm90", work)) for work in works] == [default("k2v2", work.key) for work in works]
    assert len({default("k2v2", work.key) for work in works}) == 4
    assert CUDA.default(spec, "sm90") == CUDA.default(spec, "sm90", works[0])


def test_only_coarse_codes_let_a_default_leave_out_rounding_errors() -> None:
    assert default("k4v4:bf16", "32x8192") == default("k4v4", "32x8192")
    assert ".noexact" in default("k4v2", "32x8192")
    assert ".noexact" in default("k8v2", "32x8192")
    assert ".noexact" not in default("k2v2:vchannel", "32x8192")
    assert ".noexact" in default("k4v4:h16/1", "8x32768")
    assert ".noexact" not in default("k8v8:h16/1", "8x32768")
    assert ".noexact" not in default("k8v2:h16/1", "8x32768")
