"""How many turns finalists take in a given time."""

from __future__ import annotations

import pytest

from kvgen.measure import perform


@pytest.mark.parametrize(
    ("seconds", "shares", "rounds"),
    [(None, 1, 15), (100.0, 1, 15), (12.0, 2, 6), (12.0, 1, 12), (4.0, 2, 3), (-5.0, 1, 3)],
)
def test_a_workload_has_its_share_of_the_time_and_three_rounds_at_least(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, shares: int, rounds: int
):
    now = [1000.0]
    monkeypatch.setattr(perform.time, "monotonic", lambda: now[0])
    taken = 0
    for _ in perform._rounds(15, None if seconds is None else now[0] + seconds, shares):
        now[0] += 1.0
        taken += 1
    assert taken == rounds
