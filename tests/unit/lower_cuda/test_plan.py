"""Plans made by the CUDA plan kernel, run in the emulator, and by the host function, against the oracle; and the advance of lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.verify.plan import make_plan, read_plan
from tests.unit.lower_cuda.emulate_plan import Planner
from tests.unit.lower_cuda.plan_checks import FORTY, MANY, OWN_RANGES, Case, OfAnyPlanner, random_plans_agree


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner.emulated(tmp_path_factory.mktemp("plan"))


class TestInTheEmulator(OfAnyPlanner):
    def test_any_plan_is_the_oracles(self, planner: Planner) -> None:
        random_plans_agree(planner, 60)


@pytest.mark.parametrize("case", MANY)
def test_a_case_of_many_sequences_has_empty_and_overflowing_ones(case: Case) -> None:
    plan = make_plan(*case)
    assert len(plan.overflowing) == 1
    assert len(plan.empty) > 10


def test_the_case_of_own_ranges_has_them() -> None:
    shape, lengths, *_ = OWN_RANGES
    assert not shape.row([shape.load(length) for length in lengths if length for _ in range(shape.heads)]).shared


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
    shape, lengths, *_ = FORTY
    plan = read_plan(shape, planner.device(*FORTY).plan)
    work = [tile for tiles in plan.workers for tile in tiles]
    had = [(tile.sequence, tile.head, number) for tile in work for number in range(tile.first, tile.end)]
    assert len(had) == len(set(had))
    assert set(had) == {(b, head, i) for b, length in enumerate(lengths) for head in range(shape.heads) for i in shape.tiles(length)}
    places = sum(shape.heads * (shape.head_cost + sum(shape.load(length))) for length in lengths if length > 0)
    assert all(sum(tile.end - tile.first for tile in tiles) <= shape.range_length(places) for tiles in plan.workers)
    slots = [tile.slot for tile in work]
    assert len(slots) == len(set(slots))
    assert max(slots) < shape.batch * shape.heads + shape.workers
