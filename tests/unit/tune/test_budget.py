from __future__ import annotations

from typing import Any

import pytest

from kvgen.tune.budget import Budget, Clock, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("3m", 180),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (" 2 M ", 120),
        ("1h 30m", 5400),
        ("5min", 300),
        ("5 minutes", 300),
        ("90sec", 90),
        ("2hrs 1min", 7260),
        ("1 hour", 3600),
    ],
)
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "3x", "-3m", "3m!", "three", "1 30m", "1h30", "1m 30", "1 2", "5mi", "5mins m", "3hs", "2mon"])
def test_what_is_no_duration_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match="3m"):
        parse_duration(text)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="trials"):
        Budget(trials=0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="longer"):
            Budget(seconds=seconds)


@pytest.mark.parametrize("wrong", [{"trials": "5"}, {"trials": 2.0}, {"trials": True}, {"seconds": [1]}, {"seconds": True}])
def test_a_bound_that_is_no_number_is_named(wrong: dict[str, Any]):
    with pytest.raises(TypeError, match=r"^(trials must be a whole number|seconds of a budget must be a number), not "):
        Budget(**wrong)


def test_the_search_ends_by_trials_or_before_the_time_is_up():
    time = [0.0]
    clock = Clock(Budget(trials=2, seconds=100.0), now=lambda: time[0])
    assert (clock.trials_left, clock.left, clock.search_over) == (2, 100.0, False)
    time[0] = 85.0
    assert clock.search_over
    assert clock.left == 15.0
    time[0] = 1.0
    clock.used = 2
    assert clock.search_over


def test_the_final_has_its_time_before_the_search_ends():
    time = [0.0]
    clock = Clock(Budget(seconds=100.0), now=lambda: time[0])
    assert clock.search_left == 80.0
    clock.final_seconds = 30.0
    assert clock.search_left == 70.0
    clock.final_seconds = 1000.0
    assert clock.search_left == 50.0
    time[0] = 60.0
    assert (clock.search_left, clock.search_over) == (0.0, True)
    assert Clock(Budget(trials=3), final_seconds=1000.0).search_left is None


def test_without_bounds_a_run_never_ends_by_itself():
    clock = Clock(Budget(), now=lambda: 1e9)
    assert (clock.trials_left, clock.left, clock.search_over) == (None, None, False)
