"""Plans made by the CUDA plan kernel on a GPU against the oracle; and lengths that advance or are cropped there.

The emulator runs one CTA after the other. Here all of them run at once, and the compiler is the one that entries are compiled with.
"""

from __future__ import annotations

import pytest

from kvgen._resources import templates
from kvgen.lower.base import Source
from kvgen.lower.template import reached_headers
from kvgen.toolchain import build
from tests.unit.lower_cuda.emulate_plan import CALLS, Planner, differences
from tests.unit.lower_cuda.plan_checks import (
    EXAMPLES,
    FORTY,
    MANY,
    OWN_RANGES,
    Case,
    lengths_advance,
    lengths_are_cropped,
    random_plans_agree,
)


def calls() -> Source:
    """The calls of a planner over kvgen's headers."""
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(CALLS, "cuda", "sm90", include, headers=reached_headers(CALLS, include))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(build(calls()).path, gpu=True)


@pytest.mark.parametrize("case", [*EXAMPLES, FORTY, *MANY, OWN_RANGES])
def test_the_gpu_makes_the_oracles_plan(planner: Planner, case: Case) -> None:
    assert differences(planner, *case) == []


def test_the_gpu_makes_the_oracles_plan_of_any_lengths(planner: Planner) -> None:
    random_plans_agree(planner, 200, derandomize=True)


@pytest.mark.parametrize("batch", [1, 300])
def test_advance_adds_tokens_where_there_is_room(planner: Planner, batch: int) -> None:
    lengths_advance(planner, batch)


@pytest.mark.parametrize("batch", [1, 300])
def test_a_crop_takes_back_what_its_rollback_allows(planner: Planner, batch: int) -> None:
    lengths_are_cropped(planner, batch)
