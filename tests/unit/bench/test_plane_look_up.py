"""Rows of h200_plane.csv under another look-up than the one that they were measured with."""

from __future__ import annotations

from benchmarks.plane_look_up import looked_up
from kvgen.spec import Workload
from kvgen.spec.dispatch import Dispatch, Measured

ROW = {
    "traffic": "rested", "batch": "4", "longest": "4096", "tokens": "16384", "launch": "0", "us": "12.0", "best_own_us": "10.0",
    "best_us": "8.0", "regret_own": "1.2", "regret": "1.5", "own_us": "[12.0, 10.0, null]", "launch_unknown": "", "regret_unknown": "",
    "read_us": "6.0", "read_fraction": "0.5", "watts": "600", "clock_mhz": "1700", "device": "a GPU",
}  # fmt: skip


def of(launch: int) -> dict[str, Dispatch]:
    """A look-up that gives one launch."""
    return {"rested": Dispatch([Measured(Workload(batch=4, kv_len=4096), launch)], launch)}


def test_another_launch_brings_its_own_time_and_loses_what_was_read_beside_the_first():
    changed = {"launch": "1", "us": "10.0", "regret_own": "1.0", "regret": "1.25", "read_fraction": "0.6", "watts": "", "clock_mhz": ""}
    assert looked_up(ROW, of(1)) == ROW | changed


def test_the_same_launch_leaves_the_row_as_it_is():
    assert looked_up(ROW, of(0)) == ROW


def test_a_call_with_unknown_tokens_is_looked_up_again_too():
    found = looked_up(ROW | {"launch_unknown": "0", "regret_unknown": "1.5"}, of(1))
    assert (found["launch_unknown"], found["regret_unknown"]) == ("1", "1.25")
