"""The comparison of two results of gpu_plane.py."""

from __future__ import annotations

from benchmarks.plane_change import pairs, ratios, summary

BEFORE = {
    "spec": "kv4", "point": "3 of 97 to 2172", "traffic": "rested", "us": "10.0", "best_own_us": "8.0", "own_us": "[10.0, 8.0, null]",
    "read_us": "4.0",
}  # fmt: skip
AFTER = {**BEFORE, "us": "4.0", "best_own_us": "4.0", "own_us": "[4.0, 5.0, 6.0]", "read_us": "2.0"}


def test_rows_of_the_same_point_are_compared_by_lengths():
    equal = {**BEFORE, "point": "8x32768"}
    before = [BEFORE, equal, {**equal, "traffic": "sustained"}]
    assert list(pairs(before, [AFTER, equal, {**AFTER, "spec": "kv2"}], equal=False)) == [(BEFORE, AFTER)]
    assert list(pairs(before, [AFTER, equal], equal=True)) == [(equal, equal)]


def test_times_are_divided_by_the_read_of_their_row_and_launches_that_failed_are_left_out():
    assert ratios(BEFORE, AFTER) == {"taken": [0.8], "fastest": [1.0], "all": [0.8, 1.25]}


def test_a_summary_names_the_points_that_changed_most():
    points = [({**BEFORE, "point": f"{n} of 1 to 2"}, {**AFTER, "point": f"{n} of 1 to 2", "us": str(n)}) for n in range(1, 11)]
    lines = summary(points)
    assert lines[0] == "kv4: 10 points"
    assert lines[1].split() == ["taken", "mean", "0.9057,", "0.200", "to", "2.000"]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2", "3", "4", "7", "8", "9", "10"]
