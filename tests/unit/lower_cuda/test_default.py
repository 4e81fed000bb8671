"""The schedules that are taken without measuring: what the CUDA back end picks for workloads, and for calls far from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_words import schedule_word, spec_of, workload_of
from kvgen.arch import GPUS, Target
from kvgen.lower.backends import get_backend
from kvgen.spec import KernelSpec, load_spec, presets

CUDA = get_backend("cuda")
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
WORKLOADS = ("1x512", "1x4096", "1x32768", "4x8192", "8x32768", "32x8192", "1024x512")


def default(words: str, work: str, target: Target = "sm90") -> str:
    """The default for a workload, by its word."""
    return schedule_word(CUDA.default(spec_of(words, target, [workload_of(work)]), target))


def formats() -> list[KernelSpec]:
    return [*presets().values(), *(load_spec(file) for file in EXAMPLES)]


@pytest.mark.parametrize("target", list(GPUS))
def test_defaults_and_plain_schedules_lie_in_their_spaces_over_one_layout(target: Target) -> None:
    for spec in formats():
        if CUDA.unsupported(spec, target) is not None:
            continue
        for works in (spec.workloads, *((workload_of(word),) for word in WORKLOADS)):
            wanted = replace(spec, workloads=works)
            plain, space = CUDA.plain(wanted, target), CUDA.space(wanted, target)
            assert (plain.launch["copy"], plain.launch["reduction"]) == ("cp_async", "last_cta")
            assert plain.launch["exact_q"] or (spec.value.bits == 2 and not spec.value.per_channel), "the strict limit of single rows"
            for work in works:
                schedule = CUDA.default(wanted, target, work)
                assert [problem for one in (schedule, plain) for problem in space.doubts(one, work)] == []
                assert schedule.layout == plain.layout
                if not GPUS[target].clusters:
                    assert schedule == plain


@pytest.mark.parametrize(
    ("words", "work", "schedule"),
    [
        ("k4v4", "1x4096", "n128.w8u1d2c1.cl8"),
        ("k8v8", "1x4096", "n128.w8u1d2c1.cl8"),
        ("k4v4", "1x32768", "n128.w8u4d1c1"),
        ("k4v4", "3x2048", "n128.w8u1d2c1.cl4"),
        ("k4v4", "4x2048", "n128.w8u1d2c1"),
        ("k4v4:h8/1", "1x131072", "n128.w8u1d2c1.cl8"),
        ("k4v4", "8x32768", "n128.w8u4d1c1.cl2"),
        ("k4v4:window4096", "8x32768", "n128.w8u4d1c1.cl2"),
        ("k8v8:sym:vchannel", "8x32768", "n128.w8u2d1c1.cl2"),
        ("k16v16", "8x8192", "n128.w4u1d2c1.cl2"),
        ("k4v4", "16x8192", "n128.w8u4d1c1"),
        ("k4v4", "32x8192", "n128.w4u4d1c2"),
        ("k4v4:kg64:page64", "32x8192", "n64.w4u2d2c2"),
        ("k8v8", "32x8192", "n128.w8u1d2c1"),
        ("k8v8", "64x1024", "n128.w2u1d2c4"),
        ("k8v8:d64:h64/8:window128", "32x8192", "n128.w4u1d2c2"),
        ("k4v4:q8", "32x8192q8", "n128.w4u4d1c2.noexact"),
        ("k8v8:q8", "32x8192q8", "n128.w8u1d2c1"),
        ("k4v4:h512/8", "8x32768", "n128.w8u4d1c1.noexact"),
    ],
)
def test_the_number_of_heads_decides_about_ctas_and_reduction(words: str, work: str, schedule: str) -> None:
    assert default(words, work) == schedule


@pytest.mark.parametrize(
    ("words", "work", "schedule"),
    [
        ("k2v2", "8x32768", "n128.w12u4d1c1.cl2.noexact"),
        ("k2v2", "32x8192", "n128.w4u4d1c2.noexact"),
        ("k2v2", "64x2048", "n128.w4u4d1c2.noexact"),
        ("k2v2:kg32:vg32", "8x32768", "n128.w8u4d1c1.cl2.noexact"),
        ("k2v2:kg32:vg32", "32x8192", "n128.w4u4d1c2.noexact"),
        ("k2v2:kg64:page64", "8x32768", "n64.w12u2d2c1.cl2.noexact"),
        ("k2v2:boost1/8:sink32:local128:page128", "8x32768", "n128.w12u4d1c1.cl2.noexact"),
        ("k2v2:boost1/8:sink32:local128:page128", "32x8192", "n128.w6u4d1c2.noexact"),
        ("k4v4:d64:h64/8", "64x4096", "n128.w4u4d1c2"),
    ],
)
def test_tokens_of_few_bytes_take_more_warps_where_heads_are_few_or_channels_boosted(words: str, work: str, schedule: str) -> None:
    assert default(words, work) == schedule


def test_each_workload_of_a_spec_has_the_default_that_it_has_alone() -> None:
    works = [workload_of(word) for word in ("1x4096", "1x32768", "8x32768", "128x8192")]
    spec = spec_of("k2v2", "sm90", works)
    assert [schedule_word(CUDA.default(spec, "sm90", work)) for work in works] == [default("k2v2", work.key) for work in works]
    assert len({default("k2v2", work.key) for work in works}) == 4
    assert CUDA.default(spec, "sm90") == CUDA.default(spec, "sm90", works[0])


def test_a_gpu_without_clusters_has_the_plain_schedule() -> None:
    for target in ("sm80", "sm89"):
        assert "cl" not in default("k4v4", "1x4096", target)  # type: ignore[arg-type]


def test_only_coarse_codes_let_a_default_leave_out_rounding_errors() -> None:
    assert default("k4v4:bf16", "32x8192") == default("k4v4", "32x8192") == "n128.w4u4d1c2"
    assert ".noexact" in default("k4v2", "32x8192")
    assert ".noexact" in default("k8v2", "32x8192")
    assert ".noexact" not in default("k2v2:vchannel", "32x8192")
    assert ".noexact" in default("k4v4:h16/1", "8x32768")
    assert ".noexact" not in default("k8v8:h16/1", "8x32768")
    assert ".noexact" not in default("k8v2:h16/1", "8x32768")


@pytest.mark.parametrize(
    ("words", "work", "schedule"),
    [
        ("k4v4", "1x16384", "n128.w8u1d2c1"),
        ("k4v4", "1x32768", "n128.w8u4d1c1"),
        ("k4v4", "4x4096", "n128.w8u1d2c1"),
        ("k4v4", "8x2048", "n128.w8u1d2c1.cl2"),
        ("k2v2", "8x2048", "n128.w8u1d2c1.cl2.noexact"),
        ("k4v4", "16x1024", "n128.w8u1d2c1"),
        ("k4v4", "32x512", "n128.w4u1d2c2"),
        ("k4v4", "64x1000", "n128.w2u1d2c4"),
        ("k4v4", "64x2048", "n128.w4u4d1c2"),
        ("k4v4:d64:h64/8", "1x16384", "n128.w8u1d2c1"),
        ("k4v4:h16/1", "8x8192", "n128.w8u1d2c1.noexact"),
        ("k16v16:d256", "64x1000", "n128.w2u1d2c1"),
    ],
)
def test_short_heads_take_short_tiles(words: str, work: str, schedule: str) -> None:
    assert default(words, work) == schedule


def test_every_warp_of_a_short_sequence_has_a_tile() -> None:
    assert default("k4v4", "4x512") == "n128.w8u1d2c1"
    assert default("k4v4", "4x8192") == "n128.w8u4d1c1"


def test_several_k_groups_per_token_take_short_tiles() -> None:
    assert default("k4v4:token:kg32:vg32:bf16:h8/1", "32x8192") == "n128.w8u1d2c1"
    assert default("k4v4:token", "4x8192") == "n128.w8u4d1c1"
