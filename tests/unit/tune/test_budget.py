from __future__ import annotations

from typing import Any

import pytest

from kvgen.tune.budget import Budget, Clock, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("3m", 180), ("1h30m", 5400), (" 2 M ", 120), ("5 minutes", 300), ("2hrs 1min", 7260)],
)
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "3x", "-3m", "three", "1 30m", "1h30", "5mi", "3hs"])
def test_what_is_no_duration_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match="3m"):
        parse_duration(text)


@pytest.mark.parametrize("wrong", [{"trials": "5"}, {"trials": 2.0}, {"trials": True}, {"seconds": [1]}])
def test_a_bound_that_is_no_number_is_named(wrong: dict[str, Any]):
    with pytest.raises(TypeError, match=r"^(trials must be a whole number|seconds of a budget must be a number), not "):
        Budget(**wrong)


@pytest.mark.parametrize("nothing", [{"trials": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"seconds": float("inf")}])
def test_a_budget_of_nothing_is_refused(nothing: dict[str, Any]):
    with pytest.raises(ValueError, match="trials|longer"):
        Budget(**nothing)


def test_the_search_ends_by_trials_or_where_the_final_needs_the_time():
    time = [0.0]
    clock = Clock(Budget(trials=2, seconds=100.0), now=lambda: time[0])
    assert (clock.trials_left, clock.left, clock.search_left, clock.search_over) == (2, 100.0, 80.0, False)
    clock.final_seconds = 30.0
    assert clock.search_left == 70.0
    clock.final_seconds = 1000.0
    assert clock.search_left == 50.0
    time[0] = 60.0
    assert (clock.search_left, clock.left, clock.search_over) == (0.0, 40.0, True)
    assert Clock(Budget(trials=2), used=2).search_over
    unbounded = Clock(Budget(), final_seconds=1000.0)
    assert (unbounded.trials_left, unbounded.left, unbounded.search_left, unbounded.search_over) == (None, None, None, False)
