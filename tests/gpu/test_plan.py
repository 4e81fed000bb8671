"""Plans made by the CUDA plan kernel on a GPU against the oracle; and lengths that advance or are cropped there.

The emulator runs one CTA after the other. Here all of them run at once, and the compiler is the one that entries are compiled with.
"""

from __future__ import annotations

import pytest

from kvgen._resources import templates
from kvgen.lower.backend import Source
from kvgen.lower.template import reached_headers
from kvgen.toolchain import build
from tests.unit.lower_cuda.emulate_plan import CALLS, Planner
from tests.unit.lower_cuda.plan_checks import OfAnyPlanner, random_plans_agree


def calls() -> Source:
    """The calls of a planner over kvgen's headers."""
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(CALLS, "cuda", "sm90", include, headers=reached_headers(CALLS, include))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(build(calls()).path, gpu=True)


class TestOnAGpu(OfAnyPlanner):
    def test_any_plan_is_the_oracles(self, planner: Planner) -> None:
        random_plans_agree(planner, 200, derandomize=True)
