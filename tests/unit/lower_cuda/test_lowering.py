"""Specs to CUDA: what is refused, the search space and its defaults, what a rendered source includes."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import CTA_RESERVED, GPUS, Target
from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.lower.cuda.shared import q_tiles, shared_memory
from kvgen.lower.schedule import layout_of
from kvgen.spec import KernelSpec, load_spec, presets
from tests.support.specs import kv4_spec

CUDA = get_backend("cuda")
WORK = [workload_of("8x32768"), workload_of("1x4096")]
SPEC = spec_of("k4v4", "sm90", WORK)
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
REFUSED: dict[str, tuple[KernelSpec, str]] = {
    "boosted channels that are no multiple of 16": (
        kv4_spec(key={"bits": 2, "boost": {"fraction": 0.0625}}), r"boost.fraction \(0.0625 of 128",
    ),
    "boosted channels in groups that are no multiple of 32 tokens": (
        kv4_spec(key={"bits": 2, "group": 48, "boost": {"fraction": 0.125}}), r"key.group \(48\) that is no multiple of 32",
    ),
    "boosted channels of wide heads": (
        kv4_spec(attention={"head_dim": 512}, key={"bits": 2, "boost": {"fraction": 0.125}}), "numbered up to 256, and head_dim is 512",
    ),
    "a 2-bit K in pages that are no multiple of 32 tokens": (
        kv4_spec(key={"bits": 2, "axis": "token"}, cache={"layout": "paged", "page": 16}), "page \\(16\\)",
    ),
    "params per channel in pages that are no multiple of 32 tokens": (
        kv4_spec(key={"group": 16}, cache={"layout": "paged", "page": 48}), "page \\(48\\)",
    ),
    "params per channel in groups of more than 512 tokens": (kv4_spec(value={"axis": "channel", "group": 528}), "value.group 528"),
}  # fmt: skip


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", REFUSED)
def test_a_refused_feature_is_named_and_nothing_else_is_built(feature: str) -> None:
    example, words = REFUSED[feature]
    for target in CUDA.targets:
        with pytest.raises(UnsupportedError, match=words) as raised:
            CUDA.default(example, target)
        assert raised.value.reason == CUDA.unsupported(example, target)


def test_a_group_whose_block_is_too_long_to_be_packed_is_refused() -> None:
    for dim, refused in ((160, []), (192, [496]), (256, [368, 400, 432, 464, 496])):
        found = {group: CUDA.unsupported(kv4_spec(attention={"head_dim": dim}, key={"group": group}, value={"group": dim}), "sm90")
                 for group in range(16, 513, 16)}  # fmt: skip
        assert [group for group, reason in found.items() if reason] == refused
        for group in refused:
            assert f"head_dim {dim} with key.group {group} needs blocks of {lcm(32, group)} tokens" in str(found[group])


@pytest.mark.parametrize(
    ("words", "schedule", "target", "reason"),
    [
        ("k4v4", "n64.w8u2d1", "sm90", "a block of 64 tokens does not hold whole K groups of 128"),
        ("k4v4:page64:token", "n128.w8u2d1", "sm90", "a page of 64 tokens does not hold whole blocks of 128"),
        ("k4v4:token", "n64.w8u4d1", "sm90", "a KV tile (128 tokens) must divide a block (64)"),
        ("k4v4:d256:kg16", "n256.w8u2d1", "sm90", "the scales of a block (256 tokens) exceed the shared memory of a packing kernel"),
        ("k8v8", "w8u4d1", "sm90", "exceed the shared memory of a CTA (232448 bytes)"),
        ("k4v4", "w8u4d1c2", "sm90", "2 CTAs exceed the shared memory of a multiprocessor"),
        ("k4v4", "w8u4d1.bulk", "sm80", "sm80 has no bulk copies"),
        ("k4v4", "w8u4d1.cl8", "sm80", "sm80 has no clusters"),
        ("k4v4:kg32:page32", "w8u2d1", "sm90", "or be gathered from pages without params per channel"),
        ("k2v4:token:page64", "n16.w8u1d4", "sm90", "words of a 2-bit K hold codes of 32 tokens"),
        ("k4v4:token:page16", "w8u4d4", "sm90", "looks up the pages of 4 + 1 KV tiles at once"),
    ],
)
def test_schedules_are_excluded_with_their_reason(words: str, schedule: str, target: Target, reason: str) -> None:
    spec = spec_of(words, target, WORK)
    [point] = schedules_of(schedule, CUDA, spec, target)
    assert any(reason in given for given in CUDA.space(spec, target).check(point))
    with pytest.raises(UnsupportedError):
        CUDA.lower(spec, point, target)


# --- the space and its defaults --------------------------------------------------------------------------------------


def test_spaces_are_small_enough_to_search_and_fit_their_machines() -> None:
    for target in CUDA.targets:
        space = CUDA.space(SPEC, target)
        assert 6 <= space.size <= 2000
        for point in list(space.schedules())[::17]:
            total = shared_memory(SPEC, layout_of(SPEC, point.layout), point.launch).total
            assert point.launch.integer("ctas_per_sm") * (total + CTA_RESERVED) <= GPUS[target].shared_per_sm


@pytest.mark.parametrize("target", list(GPUS))
def test_defaults_lie_in_their_spaces_over_one_layout(target: Target) -> None:
    for spec in (*presets().values(), *(load_spec(file) for file in EXAMPLES)):
        if CUDA.unsupported(spec, target) is not None:
            continue
        for works in (spec.workloads, *((workload_of(word),) for word in ("1x512", "1x32768", "8x32768", "1024x512"))):
            wanted = replace(spec, workloads=works)
            (plain, *others), space = CUDA.defaults(wanted, target), CUDA.space(wanted, target)
            assert (plain.launch["copy"], plain.launch["reduction"]) == ("cp_async", "last_cta")
            assert len(others) <= (3 if GPUS[target].clusters else 0)
            for work in works:
                schedule = CUDA.default(wanted, target, work)
                assert [problem for one in (schedule, plain) for problem in space.doubts(one, work)] == []
            assert {one.layout for one in others} <= {plain.layout}
            assert [problem for one in others for problem in space.check(one)] == []


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("dim", "heads"), [(16, 1), (80, 128), (112, 32), (240, 128), (256, 128), (512, 16)])
def test_every_shape_has_a_default_that_renders(dim: int, heads: int, bits: int) -> None:
    """Head sizes that are multiples of 16, and up to 128 packed-GQA rows."""
    boost = {"boost": {"fraction": 16 / dim}} if bits == 2 and 16 < dim <= 256 else {}
    key, value = {"bits": bits, **boost}, {"bits": bits, "group": dim if bits == 4 or dim % 48 else 48}
    example = kv4_spec(attention={"head_dim": dim, "q_heads": heads, "kv_heads": 1}, key=key, value=value)
    for target in CUDA.targets:
        assert f"kQTiles = {q_tiles(example)};" in CUDA.lower(example, CUDA.default(example, target), target).text


# --- rendering -------------------------------------------------------------------------------------------------------


def test_name_arch_and_workloads_leave_no_trace() -> None:
    other = replace(SPEC, name="another", arch="native", workloads=(workload_of("1x100"),))
    schedule = CUDA.default(SPEC, "sm80")
    assert CUDA.lower(SPEC, schedule, "sm90").id == CUDA.lower(other, schedule, "sm90").id
    assert CUDA.lower(SPEC, schedule, "sm90").id != CUDA.lower(SPEC, schedule, "sm80").id
