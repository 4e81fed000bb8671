from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvgen.verify.reads import ragged_lengths, single_lengths


def even(share: int, most: int):
    """The CPU's plan: splits of about `share` tokens, at most so many, of whole blocks of 32."""

    def split_tokens(bound: int) -> int:
        count = min(most, -(-bound // share))
        return 0 if count == 1 else math.ceil(math.ceil(bound / count) / 32) * 32

    return split_tokens


def test_every_number_of_splits_that_matters_is_met_on_both_sides_of_its_boundaries() -> None:
    pairs = single_lengths(even(1024, 8), 32, 16384)
    assert {(0, 1), (1, 1), (31, 31), (32, 32), (33, 33)} <= set(pairs)
    by_count = {-(-bound // even(1024, 8)(bound)) if even(1024, 8)(bound) else 1 for _, bound in pairs}
    assert {1, 2, 3, 8} <= by_count
    last = 16384 // 8 * 7
    assert {(last - 1, 16384), (last, 16384), (last + 1, 16384), (16384, 16384), (16383, 16384)} <= set(pairs)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(16, 512), st.integers(8, 300))
def test_lengths_fit_whatever_the_plan_is(share: int, most: int, block: int, blocks: int) -> None:
    room = block * blocks
    for length, bound in single_lengths(even(share, most), block, room):
        assert 0 <= length <= bound <= room
    for lengths in ragged_lengths(even(share, most), block, room, 9):
        assert len(lengths) == 9
        assert min(lengths) >= 0
        assert max(lengths) <= room
