"""The numbers of a program: what the kernel reads is where the packed layout says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.format.layout import Which
from kvgen.format.places import code_bits
from kvgen.lower.tilelang.traits import Traits, make_traits
from tests.unit.lower_tilelang.emulate import schedule

WORDS = ("k4v4", "k8v2", "k2v8:token:kg32:vg64", "k4v4:d96", "k2v2:d64:kg64:vg64", "k16v16:d96")


def traits(words: str, block: int = 128, **launch: int) -> Traits:
    return make_traits(spec_of(words, "sm80", [workload_of("1x128")]), schedule(block, **launch))


def element(p: Traits, which: Which, tile: int, step: int, lane: int, half: int, slot: int) -> tuple[int, int]:
    """(token, channel) of an element of an A operand: row 8 * half + g of a 16-row tile, slot of a k-step."""
    row, k = 16 * tile + 8 * half + lane // 4, slot
    if which == "key":
        channel = 32 * (step // 2) + 8 * (k % 8 // 2) + 4 * (step % 2) + 2 * (k // 8) + k % 2
        return row, channel
    chunk, g = tile // 2, lane // 4
    return 16 * step + k, 32 * chunk + 8 * (g // 2) + 4 * (tile % 2) + 2 * half + g % 2


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("which", ["key", "value"])
def test_fragments_are_where_the_layout_puts_them(words: str, which: Which) -> None:
    p = traits(words, kv_tile=32)
    bits = p.layout.operand(which).bits
    places = code_bits(p.layout, which)[: p.layout.subtile] - 8 * p.layout.header_bytes
    seen = 0
    for vector in range(p.vectors(which)):
        for i in range(p.fragments(which)):
            tile, step = p.fragment(which, vector * p.fragments(which) + i)
            for lane in (0, 6, 31):
                for half in range(4 if bits == 2 else 2):
                    for high in range(2):
                        slot = 2 * (lane % 4) + 8 * high
                        token, channel = element(p, which, tile + half // 2, step, lane, half % 2, slot)
                        lane_vector = p.codes(which) + (vector * 32 + lane) * p.vector(which)
                        word = lane_vector + i * p.fragment_words(which) + {16: 2 * high + half, 8: half}.get(bits, 0)
                        shift = {16: 0, 8: 8 * high}.get(bits, 8 * high + bits * half)
                        assert int(places[token, channel]) == 32 * word + shift
                        seen += 1
    assert seen == p.layout.subtile * p.dim // 2 // 32 * 3


def test_units_tile_a_block_and_its_ring() -> None:
    p = traits("k4v4", block=256, kv_tile=64, stages=4, warps=8)
    assert p.block_tiles * p.tile_tokens == p.tokens
    assert p.tiles_in_flight == 2
    assert p.ring_words == 4 * p.subtile_words + 2 * p.channel_words
    assert p.shared_bytes >= 4 * p.warps * p.ring_words


def test_merge_lanes_hit_different_banks() -> None:
    p = traits("k4v4")
    lanes = torch.arange(32)
    g, t = lanes // 4, lanes % 4
    banks = (2 * t * p.merge_stride + 8 * (g // 2) + g % 2) % 32
    assert len(banks.unique()) == 32


def test_spare_columns_carry_the_rest_of_the_query_only_where_it_is_scaled() -> None:
    assert traits("k4v4").doubled
    assert not traits("k4v4").low
    assert traits("k4v4:h8/1").low
    assert not traits("k4v4:token").doubled
    assert not traits("k4v4:token:h8/1").low
