"""The plan of a step, as the oracle makes it: every visible KV tile once, work as even as tiles allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby

from hypothesis import given

from tests.support.plan import HeadLoad, Plan, PlanShape, Row, WorkTile, make_plan
from tests.support.specs import planned_steps

Step = tuple[PlanShape, list[int], int, bool]


def all_tiles(plan: Plan) -> list[WorkTile]:
    return [tile for worker in plan.workers for tile in worker]


def by_head(plan: Plan) -> dict[tuple[int, int], list[WorkTile]]:
    return {head: list(tiles) for head, tiles in groupby(all_tiles(plan), key=lambda tile: (tile.sequence, tile.head))}


@given(planned_steps())
def test_every_visible_tile_is_attended_once_and_no_other(step: Step) -> None:
    shape, lengths, limit, skip_empty = step
    plan = make_plan(shape, lengths, limit, skip_empty)
    found = Counter((tile.sequence, tile.head, index) for tile in all_tiles(plan) for index in range(tile.first, tile.end))
    works = [b for b in range(shape.batch) if b not in plan.empty and b not in plan.overflowing]
    assert found == Counter((b, head, index) for b in works for head in range(shape.heads) for index in shape.tiles(lengths[b]))
    assert {(tile.sequence, tile.head) for tile in all_tiles(plan)} == {(b, head) for b in works for head in range(shape.heads)}
    assert all(tile.length == lengths[tile.sequence] for tile in all_tiles(plan))
    slots = [tile.slot for tile in all_tiles(plan)]
    assert slots == sorted(set(slots))
    assert max(slots, default=0) < shape.batch * shape.heads + shape.workers


@given(planned_steps(window=True))
def test_no_tile_before_the_window_and_none_that_a_query_sees_is_left_out(step: Step) -> None:
    shape, lengths, _, _ = step
    for length in lengths:
        packed = max(0, length - shape.unpacked) // shape.block_tokens * shape.block_tokens
        first_visible = max(0, length + shape.fresh - shape.q_len - shape.window + 1)
        seen = {token // shape.tile_tokens for token in range(first_visible, packed)}
        assert seen <= set(shape.tiles(length)) <= seen | {first_visible // shape.tile_tokens}


@given(planned_steps())
def test_no_worker_has_more_than_the_mean_and_a_tile(step: Step) -> None:
    shape, lengths, limit, skip_empty = step
    plan = make_plan(shape, lengths, limit, skip_empty)
    heads = [shape.load(lengths[b]) for b, _ in by_head(plan)]
    most = max(sum(shape.head_cost + sum(load) for load in heads) / shape.workers, shape.least_tiles) + 1 + shape.head_cost
    for worker in plan.workers:
        assert sum(tile.end - tile.first for tile in worker) <= most
        assert sum(tile.end - tile.first + shape.head_cost * (tile.split_idx == 0) for tile in worker) <= most


def loads(*tiles: int) -> list[HeadLoad]:
    """Of sequences of four heads, without a residual."""
    return [HeadLoad(count, 0) for count in tiles for _ in range(4)]


def test_heads_have_ranges_of_their_own_where_that_makes_ranges_shorter() -> None:
    """On 12 workers, shared ranges for 36 tiles and 8 starts that cost 3 each have 5 positions, and own ones suffice with 4."""
    shape = PlanShape(2, 4, 12, tile_tokens=128, block_tokens=128, head_cost=3, least_tiles=1)
    assert replace(shape, workers=7).row(loads(1, 8)).shared  # more heads than workers
    assert shape.row(loads(1, 8)) == Row(4, 0, False)
    plan = make_plan(shape, [128, 8 * 128], 1 << 20)
    assert [[(tile.sequence, tile.head, tile.first, tile.end) for tile in worker] for worker in plan.workers] == [
        [(0, 0, 0, 1)], [(0, 1, 0, 1)], [(0, 2, 0, 1)], [(0, 3, 0, 1)], [(1, 0, 0, 4)], [(1, 0, 4, 8)],
        [(1, 1, 0, 4)], [(1, 1, 4, 8)], [(1, 2, 0, 4)], [(1, 2, 4, 8)], [(1, 3, 0, 4)], [(1, 3, 4, 8)],
    ]  # fmt: skip


def test_unquantized_tokens_count_where_their_head_ends() -> None:
    """The first head has 127 of them, as much to read as 7 tiles, so its worker takes fewer tiles of the second head."""
    shape = PlanShape(2, 1, 2, tile_tokens=128, block_tokens=128, head_cost=0, least_tiles=1)
    for tile_residual, tiles in ((0, 4), (18, 1)):
        plan = make_plan(replace(shape, tile_residual=tile_residual), [8 * 128 + 127, 16 * 128], 1 << 20)
        (first, second), (rest,) = plan.workers
        assert (first.first, first.end, first.num_splits) == (0, 8, 1)
        assert (second.end, rest.first, rest.end) == (tiles, tiles, 16)
