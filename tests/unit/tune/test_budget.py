from __future__ import annotations

from math import inf
from typing import Any

import pytest

from kvgen.tune.budget import Budget, Clock, parse_duration


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("1h30m", 5400), (" 2 M ", 120), ("5min", 300)])
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "3x", "-3m", "1 30m", "1h30", "5mi"])
def test_what_is_no_duration_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match="3m"):
        parse_duration(text)


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"seconds": 0}, {"seconds": float("nan")}, {"seconds": float("inf")}])
def test_a_bound_that_is_none_is_named(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=r"^(trials must be|a budget must be longer)"):
        Budget(**wrong)


def test_the_search_ends_by_trials_or_where_the_final_begins():
    time = [0.0]
    clock = Clock(Budget(trials=2, seconds=100.0), now=lambda: time[0])
    assert (clock.trials_left, clock.left, clock.search_left, clock.search_over) == (2, 100.0, 70.0, False)
    assert clock.measuring_left == 85.0
    clock.needed = 40.0
    assert (clock.search_left, clock.measuring_left) == (60.0, 60.0)
    clock.needed = 0.0
    time[0] = 75.0
    assert (clock.search_left, clock.left, clock.search_over) == (0.0, 25.0, True)
    assert clock.measuring_left == 0.0
    assert Clock(Budget(trials=2), used=2).search_over
    assert (Clock(Budget()).search_over, Clock(Budget()).measuring_left) == (False, inf)
