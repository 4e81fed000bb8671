"""Plans, fixed and random ones, and lengths that advance or are cropped: tests of planners in the emulator and on a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.support.plan import PlanShape
from tests.support.specs import planned_steps
from tests.unit.lower_cuda.emulate_plan import NO_LIMIT, Planner, advanced, cropped, differences, sparse, unlike

Case = tuple[PlanShape, list[int], int, bool]
"""A shape, lengths of its sequences, a limit of lengths, and whether empty sequences are skipped."""

EXAMPLES: tuple[Case, ...] = (
    (PlanShape(3, 2, 8, 64, 128, 13, 8, fresh=1), [300, 0, 4000], 4000, True),
    (PlanShape(2, 3, 400, 64, 128, 13, 1), [0, 0], NO_LIMIT, False),
    (PlanShape(1, 1, 400, 64, 128, 0, 1), [60000], NO_LIMIT, False),
    (PlanShape(3, 1, 2, 128, 128, 0, 1, tile_residual=16), [1151, 0, 1152], NO_LIMIT, False),  # a range begins in a residual
)
FORTY: Case = (PlanShape(40, 2, 66, 64, 128, 13, 8), unlike(40), NO_LIMIT, False)
OWN_RANGES: Case = (PlanShape(1500, 2, 264, 64, 128, 13, 4, q_len=2, tile_residual=17), sparse(1500), NO_LIMIT, False)
"""More sequences than the kernel has threads, of which few attend: their heads have ranges of their own."""


def of_many(batch: int, heads: int, workers: int) -> Case:
    """Sequences of unlike lengths, one of them without room for its new tokens."""
    return PlanShape(batch, heads, workers, 64, 128, 13, 8, q_len=2, fresh=2), unlike(batch), 29000, True


MANY = (of_many(200, 2, 132), of_many(200, 8, 264), of_many(1500, 1, 400))
"""More heads than the kernel has threads, and more sequences."""


def random_plans_agree(planner: Planner, examples: int) -> None:
    """Any lengths, also without room for the step's tokens; empty sequences that take part and that do not."""

    @settings(max_examples=examples)
    @given(planned_steps())
    def check(case: Case) -> None:
        assert differences(planner, *case) == []

    check()


class OfAnyPlanner:
    """Tests of a planner, which is the fixture `planner` of the module that inherits them."""

    @pytest.mark.parametrize("case", [*EXAMPLES, FORTY, *MANY, OWN_RANGES])
    def test_a_plan_is_the_oracles(self, planner: Planner, case: Case) -> None:
        assert differences(planner, *case) == []

    @pytest.mark.parametrize("batch", [1, 300])
    def test_advance_adds_tokens_where_there_is_room(self, planner: Planner, batch: int) -> None:
        """One count for all leaves empty sequences empty; a sequence with a count of its own gets it, empty or not, but for a
        negative one.
        """
        lengths = [b * 7 % 50 for b in range(batch)]
        for limit in (NO_LIMIT, 40):
            assert advanced(planner, lengths, None, 3, limit)
            assert advanced(planner, lengths, [b % 5 for b in range(batch)], 0, limit)
            assert advanced(planner, lengths, [b % 5 - 1 for b in range(batch)], 0, limit)

    @pytest.mark.parametrize("batch", [1, 300])
    def test_a_crop_takes_back_what_its_rollback_allows(self, planner: Planner, batch: int) -> None:
        """Sequences that are shorter than they were, or empty; numbers that are too large or negative."""
        lengths = [b * 7 % 50 for b in range(batch)]
        least = [max(0, length - b % 9) for b, length in enumerate(lengths)]
        for rollback in (8, 60):
            assert cropped(planner, lengths, [0] * batch, None, 8, rollback)
            assert cropped(planner, lengths, least, None, 3, rollback)
            assert cropped(planner, lengths, least, [b % 11 - 1 for b in range(batch)], 0, rollback)
