"""benchmarks/gpu_plane.py: its points, one measurement on the CPU, and what its rows come to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from benchmarks.gpu_plane import Launches, Point, between, measure, named, summary
from kvgen.errors import CompileError
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure import read_roofline
from kvgen.registry.dispatch import Cell, DispatchTable
from kvgen.registry.entry import Entry
from kvgen.spec.traffic import parse
from kvgen.tune.grid import CPU, GPU
from tests.support.naive import naive_artifact, naive_schedule, naive_source, naive_spec


def test_no_point_is_one_that_the_tuner_measures():
    for grid in (CPU, GPU):
        measured = {(cell.batch, cell.kv_len) for cell in grid.cells()}
        points = between(grid, 1 << 22, seed=1, stride=1)
        assert len(points) > 40
        assert not {(point.work.batch, point.work.kv_len) for point in points} & measured
        assert all(math.log2(max(point.lengths)) % 1 for point in points)
        assert all(len(set(point.lengths)) == 1 or len(point.lengths) > 1 for point in points)


def test_another_seed_is_another_half_of_the_points_and_other_lengths():
    one, other = (between(GPU, 1 << 22, seed, stride=2) for seed in (1, 2))
    assert not {point.lengths for point in one} & {point.lengths for point in other}


def test_the_named_rows_are_there_with_their_loads():
    rows = {(point.name, point.load): point for point in named()}
    assert rows["64x1000", "rested"].lengths == (1000,) * 64
    assert sorted(rows["128K beside 63 of 1K", "rested"].lengths)[-2:] == [1024, 131072]
    ragged = rows["48 of .3K to 24K", "rested"].lengths
    assert len(ragged) == 48
    assert max(ragged) == 24576
    assert min(ragged) >= 300
    assert ("128x8192", "sustained") in rows


@pytest.fixture(scope="module")
def launches() -> Launches:
    """The naive kernel twice: launch 0 for one sequence, launch 1 for four."""
    spec, schedule, source, artifact = naive_spec(), naive_schedule(), naive_source(), naive_artifact()
    other = Schedule(schedule.backend, schedule.layout, Params(threads=7))
    cells = (Cell("1x512", 0, (9.0, 9.5), 9.0), Cell("4x256", 1, (30.0, 20.0), 20.0))
    table = DispatchTable((), 0, (0, 1), cells)
    work = spec.workloads[0]
    return Launches(
        spec, Entry.of(spec, "cpu", [(work, schedule, source, artifact)], [(parse("4x256"), other, source, artifact)], table, device={})
    )


def test_a_point_is_measured_beside_all_launches_of_the_entry(launches, monkeypatch):
    class Read:
        def samples(self, nbytes, policy):
            return [1.0 + nbytes]

    monkeypatch.setattr(read_roofline, "read_roofline", lambda target: Read())
    monkeypatch.setattr("benchmarks.gpu_plane.read_roofline", lambda target: Read())
    row = measure(launches, Point("4 of 30 to 400", (30, 90, 400, 210)), 1, whole=False)
    assert row is not None
    assert (row["launch"], row["candidates"], row["tokens"]) == (1, 2, 730)
    assert row["regret"] == row["regret_own"] >= 1.0
    assert row["read_us"] == 1.0 + row["bytes"]
    assert launches.serving(Point("1x500", (500,))) == 0


def test_the_launches_of_the_search_spaces_take_part_once_they_are_compiled(launches, monkeypatch, capsys):
    known, built, broken = (Schedule("cpu", launches.entry.layout, Params(threads=count)) for count in (7, 8, 9))
    monkeypatch.setattr(launches, "space", lambda work: [known, built, broken])
    monkeypatch.setattr(launches, "_sources", SimpleNamespace(of=lambda schedule: schedule))
    asked = []

    def build(sources, workers):
        asked.extend(sources)
        return [naive_artifact() if schedule == built else CompileError("no such instruction", "") for schedule in sources]

    monkeypatch.setattr("benchmarks.gpu_plane.build_sources", build)
    point = Point("1x60", (60,))
    launches.compile(launches.space(point.work))
    assert asked == [built, broken]
    assert "no such instruction" in capsys.readouterr().out
    assert len(launches.at(point, whole=False)) == 2
    assert set(launches.at(point, whole=True)) == {schedule for schedule, _ in launches.own} | {built}


def test_the_summary_tells_the_worst_point_and_both_comparisons():
    rows = [
        {"spec": "s", "point": name, "traffic": "rested", "regret_own": own, "regret": whole, "whole": bool(whole)}
        for name, own, whole in (("a", 1.0, 1.1), ("b", 1.21, 0.0), ("c", 1.0, 1.0))
    ]
    own, whole = summary(rows)
    assert "at   3 points: worst 1.210 (b, rested), geometric mean 1.066" in own
    assert "at   2 points: worst 1.100 (a, rested), geometric mean 1.049" in whole
