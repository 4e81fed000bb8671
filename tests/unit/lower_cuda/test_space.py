"""The search space of the CUDA back end: what must be in it, what must not, and its defaults."""

from __future__ import annotations

import pytest

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import CTA_RESERVED, GPUS, Target
from kvgen.lower.backend import get_backend
from kvgen.lower.cuda.shared import shared_memory
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.lower.space import SearchSpace

WORK = [workload_of("8x32768"), workload_of("1x4096")]


def found(words: str, schedule: str, target: Target = "sm90") -> tuple[SearchSpace, Schedule]:
    """A space, and a schedule in short words."""
    backend = get_backend("cuda")
    spec = spec_of(words, target, WORK)
    [found] = schedules_of(schedule, backend, spec, target)
    return backend.space(spec, target), found


def check(words: str, schedule: str, target: Target = "sm90") -> list[str]:
    """Why it cannot be built."""
    space, point = found(words, schedule, target)
    return space.check(point)


def doubts(words: str, schedule: str) -> list[str]:
    """Why it is not searched."""
    space, point = found(words, schedule)
    return space.doubts(point)


@pytest.mark.parametrize(
    ("words", "schedule"),
    [("k8v8", "w8u1d2"), ("k8v8", "w8u1d2.bulk"), ("k4v4", "w8u4d1"), ("k4v4", "w8u4d1.cl8"), ("k2v2", "w16u4d1"), ("k2v2", "w8u4d1c2"),
     ("k4v4:h8/1", "w8u4d1.two"), ("k4v4", "n256.w8u4d1"), ("k4v4:h8/1", "w8u4d1.noexact"), ("k4v4:page64:kg64", "n64.w8u2d2.tile"),
     ("k4v4:token:page16", "w8u1d4"), ("k4v4:token:page32", "w8u4d1"), ("k4v4:token:page16", "w8u4d1.tile"),
     ("k8v8:token:page48", "w8u1d2.bulk"), ("k4v4", "w4u4d1c2"), ("k2v2", "w6u4d1c2"),
     ("k4v4:kg32", "w8u4d1"), ("k8v8:vchannel:sym", "w8u2d1"),
     ("k4v4:vchannel:vg512:kg32", "n512.w8u4d1"), ("k4v4:d64:h32/4:q8", "w4u4d2c2")],
)  # fmt: skip
def test_good_points_are_in_the_space(words: str, schedule: str) -> None:
    assert doubts(words, schedule) == []


@pytest.mark.parametrize(
    ("words", "schedule", "target", "reason"),
    [
        ("k4v4", "n64.w8u2d1", "sm90", "a block of 64 tokens does not hold whole K groups of 128"),
        ("k4v4:page64:token", "n128.w8u2d1", "sm90", "a page of 64 tokens does not hold whole blocks of 128"),
        ("k4v4:token", "n64.w8u4d1", "sm90", "a KV tile (128 tokens) must divide a block (64)"),
        ("k4v4:vchannel:vg256", "n128.w8u4d1", "sm90", "a block of 128 tokens does not hold whole V groups of 256"),
        ("k4v4:d256:kg16", "n256.w8u2d1", "sm90", "the scales of a block (256 tokens) exceed the shared memory of a packing kernel"),
        ("k8v8", "w8u4d1", "sm90", "exceed the shared memory of a CTA (232448 bytes)"),
        ("k4v4", "w8u4d1c2", "sm90", "2 CTAs exceed the shared memory of a multiprocessor"),
        ("k4v4", "w8u4d1.bulk", "sm80", "sm80 has no bulk copies"),
        ("k4v4", "w8u4d1.cl8", "sm80", "sm80 has no clusters"),
        ("k4v4:kg32:page32", "w8u2d1", "sm90", "or be gathered from pages without params per channel"),
        ("k2v4:token:page64", "n16.w8u1d4", "sm90", "words of a 2-bit K hold codes of 32 tokens"),
        ("k4v4", "w8u4d1", "sm89", "exceed the shared memory of a CTA (101376 bytes)"),
        ("k4v4:token:page16", "w8u4d4", "sm90", "looks up the pages of 4 + 1 KV tiles at once"),
    ],
)
def test_points_are_excluded_with_their_reason(words: str, schedule: str, target: Target, reason: str) -> None:
    assert any(reason in given for given in check(words, schedule, target))


@pytest.mark.parametrize(
    ("words", "schedule", "reason"),
    [
        ("k4v4", "w8u1d1", "32 tokens do not overlap"),
        ("k4v4:token:page32", "n16.w8u1d4", "are for pages that hold no blocks of 32"),
        ("k2v2", "w4u2d1", "and the rings of 8 fit"),
        ("k2v2:d64:kg64", "n64.w12u2d1c2", "fewer than 128 registers"),
        ("k4v4", "w8u1d2.tile", "copied alike by bulk"),
        ("k4v4", "w8u1d2.noexact", "saves nothing, or nothing with KV tiles of 32 tokens"),
        ("k2v2", "w8u4d1.exact", "whose own error is hundreds of times as large"),
        ("k4v4", "w16u2d1", "16 warps keep 128 registers"),
        ("k4v4", "w4u4d1c2.cl8", "do not run at once"),
    ],
)
def test_what_did_not_pay_can_be_lowered_and_is_not_searched(words: str, schedule: str, reason: str) -> None:
    space, point = found(words, schedule)
    assert any(reason in given for given in space.doubts(point))
    assert get_backend("cuda").lower(spec_of(words, "sm90", WORK), point, "sm90").text
    assert point not in set(space.schedules())


@pytest.mark.parametrize(("reduction", "heads"), [("cl2", 66), ("cl4", 30), ("cl8", 15)])
def test_no_more_clusters_are_tried_than_the_gpu_holds(reduction: str, heads: int) -> None:
    """They may be fewer than multiprocessors over CTAs."""
    backend = get_backend("cuda")

    def doubts(kv_heads: int) -> list[str]:
        spec = spec_of(f"k4v4:h{2 * kv_heads}/{kv_heads}", "sm90", [workload_of("1x4096")])
        [clustered] = schedules_of(f"w8u4d1.{reduction}", backend, spec, "sm90")
        return backend.space(spec, "sm90").doubts(clustered, spec.workloads[0])

    assert doubts(heads) == []
    assert doubts(heads + 1) == [f"clusters of all 1 x {heads + 1} heads do not fit the 132 multiprocessors at once"]


def test_rings_that_are_too_long_leave_fewer_warps() -> None:
    """Rings of eight warps fit, and are longer than any that gained something."""
    spec = spec_of("k16v8:token", "sm90", WORK)
    assert get_backend("cuda").defaults(spec, "sm90")[0].launch["warps"] == 4


def test_spaces_are_small_enough_to_search_and_fit_their_machines() -> None:
    backend = get_backend("cuda")
    spec = spec_of("k4v4", "sm90", WORK)
    for target in backend.targets:
        space = backend.space(spec, target)
        assert 8 <= space.size <= 2000
        for point in list(space.schedules())[::17]:
            total = shared_memory(spec, layout_of(spec, point.layout), point.launch).total
            assert point.launch.integer("ctas_per_sm") * (total + CTA_RESERVED) <= GPUS[target].shared_per_sm


def test_batches_beyond_a_launch_are_excluded() -> None:
    backend = get_backend("cuda")
    spec = spec_of("k4v4", "sm90", [workload_of("3000x128"), workload_of("1x4096")])
    space = backend.space(spec, "sm90")
    [layout] = [p for p in space.layouts() if p["block"] == 128]
    assert space.launches(layout, spec.workloads[0]) == []
    assert space.launches(layout, spec.workloads[1])
