"""Plans made by the CUDA plan kernel, run in the emulator, and by the host function, against the oracle; and the advance of lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen.reference.plan import PlanShape, make_plan, read_plan
from tests.unit.lower_cuda.emulate_plan import NO_LIMIT, Planner, advanced, cropped, differences, sparse, unlike


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("plan"))


@st.composite
def shapes(draw: st.DrawFn) -> PlanShape:
    """Shapes as variants have them: tiles within a block, or of several blocks."""
    block = draw(st.sampled_from([16, 32, 64, 128, 256]))
    tile = block * draw(st.sampled_from([1, 2, 4])) if block < 64 else block // draw(st.sampled_from([1, 2]))
    q_len = draw(st.integers(1, 8))
    return PlanShape(
        batch=0,
        heads=draw(st.integers(1, 4)),
        workers=draw(st.one_of(st.integers(1, 12), st.integers(1, 400))),
        tile_tokens=tile,
        block_tokens=block,
        head_cost=draw(st.integers(0, 20)),
        least_tiles=draw(st.integers(1, 8)),
        window=draw(st.sampled_from([0, 0, 1, 5, 100, 1000])),
        q_len=q_len,
        fresh=draw(st.sampled_from([0, q_len])),
        unpacked=draw(st.sampled_from([0, 0, 5, 160])),
        tile_residual=draw(st.sampled_from([0, 1, 17, 34])),
    )


LENGTH = st.one_of(st.sampled_from([0, 1, 15, 16, 127, 128]), st.integers(0, 600), st.integers(0, 20000))


def test_device_and_host_make_the_oracles_plan(planner: Planner) -> None:
    """Any lengths, also without room for the step's tokens; empty sequences that take part and that do not."""

    @settings(max_examples=60, deadline=None, database=None)
    @given(shapes(), st.lists(LENGTH, min_size=1, max_size=12), st.sampled_from([NO_LIMIT, 600, 128]), st.booleans())
    @example(PlanShape(0, 2, 8, 64, 128, 13, 8, fresh=1), [300, 0, 4000], 4000, True)
    @example(PlanShape(0, 3, 400, 64, 128, 13, 1), [0, 0], NO_LIMIT, False)
    @example(PlanShape(0, 1, 400, 64, 128, 0, 1), [60000], NO_LIMIT, False)
    @example(PlanShape(0, 1, 2, 128, 128, 0, 1, tile_residual=16), [1151, 0, 1152], NO_LIMIT, False)  # a range begins in a residual
    def check(shape: PlanShape, lengths: list[int], limit: int, skip_empty: bool) -> None:
        assert differences(planner, replace(shape, batch=len(lengths)), lengths, limit, skip_empty) == []

    check()


@pytest.mark.parametrize(("batch", "heads", "workers"), [(200, 2, 132), (200, 8, 264), (1500, 1, 400)])
def test_plans_of_many_sequences(planner: Planner, batch: int, heads: int, workers: int) -> None:
    """More heads than the kernel has threads, and more sequences."""
    shape, lengths = PlanShape(batch, heads, workers, 64, 128, 13, 8, q_len=2, fresh=2), unlike(batch)
    assert differences(planner, shape, lengths, 29000, True) == []
    plan = make_plan(shape, lengths, 29000, True)
    assert len(plan.overflowing) == 1
    assert len(plan.empty) > 10


def test_a_plan_of_many_sequences_with_ranges_of_their_own(planner: Planner) -> None:
    """More sequences than the kernel has threads, of which few attend."""
    lengths = sparse(1500)
    shape = PlanShape(len(lengths), 2, 264, 64, 128, 13, 4, q_len=2, tile_residual=17)
    assert not shape.row([shape.load(length) for length in lengths if length for _ in range(shape.heads)]).shared
    assert differences(planner, shape, lengths, NO_LIMIT, False) == []


def test_divisors_divide(planner: Planner) -> None:
    """Dividends of an int, the largest and those about the multiples of the divisor among them."""
    most = 2**31 - 1

    @settings(max_examples=500, deadline=None, database=None)
    @given(st.one_of(st.integers(1, 5000), st.integers(1, most)), st.data())
    def check(divisor: int, data: st.DataObject) -> None:
        times = data.draw(st.integers(0, most // divisor))
        for dividend in (times * divisor - 1, times * divisor, data.draw(st.integers(0, most)), most):
            if dividend >= 0:
                assert planner.divided(dividend, divisor) == divmod(dividend, divisor)

    check()


def test_work_is_shared_equally_and_every_tile_is_had_once(planner: Planner) -> None:
    lengths = unlike(40)
    shape = PlanShape(len(lengths), 2, 66, 64, 128, 13, 8)
    plan = read_plan(shape, planner.device(shape, lengths, NO_LIMIT, False).plan)
    work = [tile for tiles in plan.workers for tile in tiles]
    had = [(tile.sequence, tile.head, number) for tile in work for number in range(tile.first, tile.end)]
    assert len(had) == len(set(had))
    assert set(had) == {(b, head, i) for b, length in enumerate(lengths) for head in range(shape.heads) for i in shape.tiles(length)}
    places = sum(shape.heads * (shape.head_cost + sum(shape.load(length))) for length in lengths if length > 0)
    assert all(sum(tile.end - tile.first for tile in tiles) <= shape.range_length(places) for tiles in plan.workers)
    slots = [tile.slot for tile in work]
    assert len(slots) == len(set(slots))
    assert max(slots) < shape.batch * shape.heads + shape.workers


@pytest.mark.parametrize("batch", [1, 300])
def test_advance_adds_tokens_where_there_is_room(planner: Planner, batch: int) -> None:
    """One count for all leaves empty sequences empty; a sequence with a count of its own gets it, empty or not, but for a
    negative one.
    """
    lengths = [b * 7 % 50 for b in range(batch)]
    for limit in (NO_LIMIT, 40):
        assert advanced(planner, lengths, None, 3, limit)
        assert advanced(planner, lengths, [b % 5 for b in range(batch)], 0, limit)
        assert advanced(planner, lengths, [b % 5 - 1 for b in range(batch)], 0, limit)


@pytest.mark.parametrize("batch", [1, 300])
def test_a_crop_takes_back_what_its_rollback_allows(planner: Planner, batch: int) -> None:
    """Sequences that are shorter than they were, or empty; numbers that are too large or negative."""
    lengths = [b * 7 % 50 for b in range(batch)]
    least = [max(0, length - b % 9) for b, length in enumerate(lengths)]
    for rollback in (8, 60):
        assert cropped(planner, lengths, [0] * batch, None, 8, rollback)
        assert cropped(planner, lengths, least, None, 3, rollback)
        assert cropped(planner, lengths, least, [b % 11 - 1 for b in range(batch)], 0, rollback)
