"""How many splits a head gets where all lengths are equal: the host's model (`schedule/split_model.cuh`), compiled for the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.spec import dispatch
from kvgen.spec.dispatch import Tiling
from tests.unit.lower_cuda.emulate import library

CALLS = """
#include "kvgen/schedule/split_model.cuh"
extern "C" int cheapest(int heads, int resident, int ctas_per_sm, int tile_bytes, int wave_bytes, int tiles, int limit) {
  return kvgen::SplitModel{heads, resident, ctas_per_sm, tile_bytes, wave_bytes}.cheapest(tiles, limit);
}
extern "C" int most(int heads, int resident, int limit) { return kvgen::SplitModel{heads, resident, 1, 1}.most(limit); }
extern "C" int most_waves() { return kvgen::SplitModel::kMostWaves; }
extern "C" int wave_bytes() { return kvgen::SplitModel::kWaveBytes; }
extern "C" int reduce_bytes() { return kvgen::SplitModel::kReduceBytes; }
"""
SMS = 132
TILE = 16896
"""Bytes of a KV tile of 128 tokens, in 4 bits."""
LIMIT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(library(CALLS, Path(tmp_path_factory.mktemp("splits")))))


def splits(
    model: ctypes.CDLL,
    heads: int,
    tiles: int,
    ctas_per_sm: int = 1,
    limit: int = LIMIT,
    tile_bytes: int = TILE,
    wave_bytes: int = dispatch.WAVE_BYTES,
) -> int:
    return int(model.cheapest(heads, SMS * ctas_per_sm, ctas_per_sm, tile_bytes, wave_bytes, tiles, limit))


@pytest.mark.parametrize(("heads", "tiles", "most"), [(8, 1024, 16), (64, 256, 2), (128, 256, 1), (256, 64, 1), (1024, 64, 1)])
def test_heads_that_fill_the_waves_get_as_many_splits_as_run_at_once(model: ctypes.CDLL, heads: int, tiles: int, most: int) -> None:
    assert splits(model, heads, tiles) == most


@pytest.mark.parametrize(("heads", "tiles", "ctas_per_sm"), [(136, 256, 1), (192, 256, 1), (360, 181, 2)])
def test_more_heads_than_run_at_once_are_split_so_that_the_last_wave_is_fuller(
    model: ctypes.CDLL, heads: int, tiles: int, ctas_per_sm: int
) -> None:
    count, resident = splits(model, heads, tiles, ctas_per_sm), SMS * ctas_per_sm

    def full(count: int) -> float:
        return heads * count / (-(-heads * count // resident) * resident)

    assert count > 1
    assert full(count) > 0.8 > full(1)


@pytest.mark.parametrize("heads", [136, 192, 320])
def test_short_heads_are_not_split_for_a_full_wave_since_every_split_has_a_start(model: ctypes.CDLL, heads: int) -> None:
    assert splits(model, heads, 8) == 1


def test_where_a_wave_takes_longer_to_start_there_are_fewer_waves(model: ctypes.CDLL) -> None:
    """104 heads of 312 tiles on 132 multiprocessors: five splits fill four waves, and one split leaves 28 multiprocessors empty."""
    assert [splits(model, 104, 312, tile_bytes=8960, wave_bytes=kib * 1024) for kib in (160, 256)] == [5, 1]


@given(heads=st.integers(1, 5000), tiles=st.integers(0, 9000), ctas=st.sampled_from([1, 2, 4]), limit=st.sampled_from([8, LIMIT]))
@settings(max_examples=200, deadline=None)
def test_splits_have_a_tile_each_and_a_slot_in_the_workspace(model: ctypes.CDLL, heads: int, tiles: int, ctas: int, limit: int) -> None:
    assert 1 <= splits(model, heads, tiles, ctas, limit) <= min(model.most(heads, SMS * ctas, limit), max(1, tiles))


def test_the_model_of_the_look_up_has_the_numbers_of_the_kernels(model: ctypes.CDLL) -> None:
    assert (model.most_waves(), model.wave_bytes(), model.reduce_bytes()) == (
        dispatch.MOST_WAVES,
        dispatch.WAVE_BYTES,
        dispatch.REDUCE_BYTES,
    )


@given(batch=st.integers(1, 600), tiles=st.integers(1, 4000), ctas=st.sampled_from([1, 2, 4]), kib=st.sampled_from([160, 256]))
@settings(max_examples=200, deadline=None)
def test_the_model_of_the_look_up_finds_as_cheap_a_number_of_splits(
    model: ctypes.CDLL, batch: int, tiles: int, ctas: int, kib: int
) -> None:
    """It tries a number for each count of waves only, and so may miss one that is a little cheaper."""
    own = Tiling(8, SMS * ctas, ctas, 128, TILE, 1.0, wave_bytes=kib * 1024)
    heads = 8 * batch
    chosen = own.cost(heads, tiles, splits(model, heads, tiles, ctas, wave_bytes=own.wave_bytes))
    found = own.cost(heads, tiles, own.splits(heads, tiles))
    assert chosen <= found <= chosen * 1.15


def test_no_heads_divide_by_nothing(model: ctypes.CDLL) -> None:
    """The workspace of an empty batch is asked for through the same function."""
    assert model.most(0, SMS, LIMIT) == LIMIT
