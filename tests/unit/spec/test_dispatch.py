"""Which launch serves a call: the tuned one of its workload, else the one of the least modelled time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.spec.dispatch import ALIKE, Call, Dispatch, Tiling

PLAIN = Tiling(heads=8, resident=132, ctas_per_sm=1, step_tokens=128, tile_bytes=17408, tile_us=0.5)
PAIRS = replace(PLAIN, resident=264, ctas_per_sm=2, step_tokens=32, tile_bytes=4352, tile_us=0.25)
CLUSTERS = replace(PLAIN, resident=66, step_tokens=64, tile_bytes=4352, tile_us=0.125, most_waves=1)
WIDE = replace(CLUSTERS, resident=15, step_tokens=256)
LAUNCHES = [PLAIN, WIDE, CLUSTERS, PAIRS]


@pytest.mark.parametrize(
    ("batch", "length", "launch"),
    [(1, 2048, WIDE), (8, 32768, CLUSTERS), (8, 2000, CLUSTERS), (16, 8192, PLAIN), (64, 1024, PAIRS)],
)
def test_few_heads_take_clusters_and_many_take_several_ctas_per_multiprocessor(batch: int, length: int, launch: Tiling) -> None:
    """8 KV heads on 132 multiprocessors: 64 heads run as 64 of 66 clusters of two at once, 72 would take a second wave."""
    assert LAUNCHES[Dispatch(LAUNCHES).launch(batch, length, 1, batch * length)] == launch


def test_a_call_of_a_tuned_workload_takes_its_winner_and_another_one_does_not() -> None:
    look_up = Dispatch(LAUNCHES, [(Call(8, 32768, 1, 8 * 32768), 1)])
    assert look_up.launch(8, 32768, 1, 8 * 32768) == 1
    assert look_up.launch(8, 30000, 1, 8 * 30000) == 2
    assert look_up.launch(8, 32768, 1, 8 * 32768, equal=False) != 1, "a call with a plan is another one"
    assert look_up.launch(8, 32768, 1, None) != 1


def test_of_launches_that_the_model_does_not_tell_apart_the_nearest_tuned_one_serves() -> None:
    look_up = Dispatch([ALIKE] * 3, [(Call(1, 4096, 1, 4096), 1), (Call(32, 8192, 1, 32 * 8192), 2)])
    assert [look_up.launch(batch, length, 1, batch * length) for batch, length in ((1, 3000), (2, 4096), (64, 4096))] == [1, 1, 2]
    assert Dispatch([ALIKE] * 3).launch(4, 4, 1, 16) == 0


def test_a_plan_spreads_unequal_lengths_over_all_ctas() -> None:
    """The busiest CTA has as many tiles as the mean, however long the longest sequence is."""
    batch, longest = 64, 65536
    equal, unequal = (PLAIN.us(batch, tokens, equal=tokens == longest) for tokens in (longest, longest / 8))
    assert unequal < equal / 4
    assert Dispatch(LAUNCHES).times(batch, longest, batch * longest // 8) != Dispatch(LAUNCHES).times(batch, longest, batch * longest)


def test_a_window_bounds_what_is_read() -> None:
    near, far = (replace(PLAIN, visible=4096).us(8, tokens, equal=True) for tokens in (8192, 1 << 20))
    assert near == far < PLAIN.us(8, 1 << 20, equal=True)


@given(batch=st.integers(1, 600), length=st.integers(1, 1 << 20), launch=st.sampled_from(LAUNCHES))
def test_more_tokens_and_more_sequences_take_no_less_time_but_for_the_steps_of_splits(batch: int, length: int, launch: Tiling) -> None:
    for equal in (True, False):
        us = launch.us(batch, length, equal=equal)
        assert us > 0
        assert launch.us(batch, 2 * length, equal=equal) >= 0.8 * us
        assert launch.us(2 * batch, length, equal=equal) >= 0.8 * us


@given(heads=st.integers(1, 5000), steps=st.integers(1, 9000), launch=st.sampled_from(LAUNCHES))
def test_a_split_has_a_step_and_clusters_run_at_once(heads: int, steps: int, launch: Tiling) -> None:
    splits = launch.splits(heads, steps)
    assert 1 <= splits <= steps
    if launch.most_waves == 1:
        assert heads * splits <= max(heads, launch.resident)


def test_nothing_and_everything_can_be_asked() -> None:
    look_up = Dispatch(LAUNCHES)
    for call in ((1, 0), (1, 1), (4096, 1 << 22), (2, 0, 1, 0), (7, 900, 4, 6000), (7, 900, 4, None)):
        assert 0 <= look_up.launch(*call) < len(LAUNCHES)
    assert Dispatch(()).launch(3, 5) == 0
