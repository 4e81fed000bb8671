"""What formats take of memory."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.format.sizes import bits_at, bits_per_element, layout_of_format, token_bytes
from kvgen.spec import load_spec, presets
from tests.support.specs import base


@pytest.mark.parametrize(
    ("name", "boosted"),
    [("kitty", 16), ("kitty-pro", 32)],
)
def test_bits_of_kitty_are_codes_scales_and_an_index(name: str, boosted: int) -> None:
    """2 bits, 2 more for boosted channels of K, scale and zero of K and V in 16 bits each, a byte per boosted channel and group."""
    elements = 2 * 128 * 128
    upper, params, index = 2 * 128 * boosted, 2 * 128 * 2 * 16, 8 * boosted
    assert bits_per_element(presets()[name]) == 2 + (upper + params + index) / elements


@pytest.mark.parametrize("length", [8192, 32768])
def test_the_papers_share_of_unquantized_tokens_is_that_of_sink_and_local(length: int) -> None:
    """Kitty states 2.357 + 2200 / N: 160 tokens in 16 bits instead of 2.357 make 2183 / N. A block that is not full comes on top."""
    spec = presets()["kitty"]
    packed = bits_per_element(spec)
    assert pytest.approx(2200, rel=0.01) == 160 * (16 - 2.357)
    full = length - (length - 160) % 128
    assert bits_at(spec, full) == pytest.approx(packed + 160 * (16 - packed) / full)
    assert bits_at(spec, full + 64) == pytest.approx(packed + 224 * (16 - packed) / (full + 64))
    assert 2.357 + 2200 / length == pytest.approx(bits_at(spec, full), rel=0.02)


def test_bits_of_plain_formats() -> None:
    bits = {name: bits_per_element(spec) for name, spec in presets().items()}
    assert bits["bitdecoding-int4"] == 4 + 32 / 128
    assert bits["int8-per-channel"] == 8 + 16 / 128
    assert bits["kivi-int2"] == 2 + 32 / 32
    wide = {"bits": 16}
    assert bits_per_element(load_spec(base(key=wide, value=wide))) == 16


def test_a_token_of_llama_in_all_layers() -> None:
    assert token_bytes(presets()["bitdecoding-int4"], layers=32) == 32 * 8 * 2 * 128 * 4.25 / 8


@pytest.mark.parametrize(
    ("cache", "group", "tokens"),
    [
        ({}, 32, 128),
        ({}, 512, 512),
        ({"layout": "paged", "page": 64}, 64, 64),
        ({"layout": "paged", "page": 256}, 64, 128),
        ({"layout": "paged", "page": 48}, 16, 16),
        ({"layout": "paged", "page": 192}, 16, 64),
        ({}, 1008, 2016),
    ],
)
def test_blocks_hold_the_groups_and_fit_the_pages(cache: dict[str, Any], group: int, tokens: int) -> None:
    spec = load_spec(base(key={"bits": 4, "axis": "channel", "group": group}, cache=cache))
    assert layout_of_format(spec).tokens == tokens
