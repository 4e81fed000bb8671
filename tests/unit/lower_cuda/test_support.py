"""What the CUDA back end refuses beyond what both GPU back ends do, and how it says so."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.lower.cuda.backend import REFUSALS
from kvgen.lower.cuda.shared import q_tiles
from kvgen.lower.gpu import GPU_REFUSALS, first_refusal
from kvgen.spec import KernelSpec, presets
from tests.support.specs import kv4_spec as spec

REFUSED: dict[str, tuple[KernelSpec, str]] = {
    "boosted channels that are no multiple of 16": (
        spec(key={"bits": 2, "boost": {"fraction": 0.0625}}),
        r"boost.fraction \(0.0625 of 128",
    ),
    "boosted channels in groups that are no multiple of 32 tokens": (
        spec(key={"bits": 2, "group": 48, "boost": {"fraction": 0.125}}),
        r"key.group \(48\) that is no multiple of 32",
    ),
    "a 2-bit K in pages that are no multiple of 32 tokens": (
        spec(key={"bits": 2, "axis": "token"}, cache={"layout": "paged", "page": 16}),
        "page \\(16\\)",
    ),
    "params per channel in pages that are no multiple of 32 tokens": (
        spec(key={"group": 16}, cache={"layout": "paged", "page": 48}),
        "page \\(48\\)",
    ),
    "params per channel in groups of more than 512 tokens": (spec(value={"axis": "channel", "group": 528}), "value.group 528"),
}


def test_every_refusal_has_an_example() -> None:
    assert [entry.feature for entry in REFUSALS if entry not in GPU_REFUSALS] == list(REFUSED)


def test_every_refusal_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
    listed = " ".join(page.partition("## What CUDA refuses")[2].partition("\n## ")[0].split())
    assert [entry.feature for entry in REFUSALS if entry.feature not in listed] == []


@pytest.mark.parametrize("feature", REFUSED)
def test_a_refused_feature_is_named_and_nothing_else_is_built(feature: str) -> None:
    example, words = REFUSED[feature]
    backend = get_backend("cuda")
    assert next(entry for entry in REFUSALS if entry.applies(example)).feature == feature
    for target in backend.targets:
        with pytest.raises(UnsupportedError, match=words) as raised:
            backend.default(example, target)
        assert raised.value.reason == backend.unsupported(example, target) == first_refusal(REFUSALS, example)
        assert "{" not in raised.value.reason


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("dim", "heads"), [(16, 1), (80, 128), (112, 32), (160, 8), (192, 8), (240, 128), (256, 128)])
def test_every_shape_has_a_default_that_renders(dim: int, heads: int, bits: int) -> None:
    """Head sizes that are multiples of 16, and up to 128 packed-GQA rows."""
    boost = {"boost": {"fraction": 16 / dim}} if bits == 2 and dim > 16 else {}
    key, value = {"bits": bits, **boost}, {"bits": bits, "group": dim if bits == 4 or dim % 48 else 48}
    example = spec(attention={"head_dim": dim, "q_heads": heads, "kv_heads": 1}, key=key, value=value)
    backend = get_backend("cuda")
    for target in backend.targets:
        assert f"kQTiles = {q_tiles(example)};" in backend.lower(example, backend.default(example, target), target).text


def test_every_preset_is_supported_everywhere() -> None:
    backend = get_backend("cuda")
    assert not [name for name, preset in presets().items() if any(backend.unsupported(preset, target) for target in backend.targets)]


@pytest.mark.parametrize("group", range(16, 513, 16))
def test_every_group_of_tokens_has_a_default_whose_block_holds_whole_groups(group: int) -> None:
    """For K, for V and for both, in contiguous caches and in the smallest pages."""
    backend, channel = get_backend("cuda"), {"axis": "channel", "group": group}
    for key, value in ((channel, {}), ({"axis": "token"}, channel), (channel, channel)):
        for cache in ({}, {"layout": "paged", "page": lcm(32, group)}):
            example = spec(key=key, value=value, cache=cache)
            for target in backend.targets:
                block = backend.default(example, target).layout.integer("block")
                assert block % lcm(32, group) == 0
                assert block <= max(256, lcm(32, group))


def test_a_group_whose_block_is_too_long_to_be_packed_is_refused() -> None:
    backend = get_backend("cuda")
    for dim, refused in ((128, []), (160, []), (192, [496]), (256, [368, 400, 432, 464, 496])):
        found = {group: backend.unsupported(spec(attention={"head_dim": dim}, key={"group": group}, value={"group": dim}), "sm90")
                 for group in range(16, 513, 16)}  # fmt: skip
        assert [group for group, reason in found.items() if reason] == refused
        for group in refused:
            assert f"head_dim {dim} with key.group {group} needs blocks of {lcm(32, group)} tokens" in str(found[group])


def test_a_block_holds_whole_groups_of_both() -> None:
    small = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
    backend = get_backend("cuda")
    for key, value, block in ((48, 80, 480), (96, 64, 192), (240, 496, None)):
        example = spec(attention=small, key={"group": key}, value={"axis": "channel", "group": value})
        if block is None:
            assert "key.group 240 and value.group 496 needs blocks of 14880 tokens" in str(backend.unsupported(example, "sm90"))
        else:
            assert backend.default(example, "sm90").layout["block"] == block


def test_the_smallest_rings_fit_and_what_no_packing_kernel_holds_is_refused_with_its_size() -> None:
    large = spec(attention={"head_dim": 256}, key={"bits": 16}, value={"bits": 16})
    backend = get_backend("cuda")
    assert backend.default(large, "sm89").launch["tiles_in_flight"] == 1
    fine = spec(key={"group": 16}, value={"axis": "channel", "group": 512})
    assert "key.group 16 and value.group 512 needs blocks of 512 tokens" in str(backend.unsupported(fine, "sm90"))
    assert backend.default(large, "sm90").launch["warps"] == 2


def test_what_no_launch_takes_is_said_with_its_reason() -> None:
    many = replace(spec(), workloads=(replace(spec().workloads[0], batch=3000),))
    with pytest.raises(UnsupportedError, match="a launch takes at most 2048 sequences"):
        get_backend("cuda").default(many, "sm90")
