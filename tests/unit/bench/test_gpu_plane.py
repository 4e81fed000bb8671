"""benchmarks/gpu_plane.py: its points, one measurement on the CPU, and what its rows come to."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from kvgen.registry.dispatch import Cell, DispatchTable
from kvgen.spec.grid import CPU, GPU

from benchmarks import gpu_plane, plane_tables
from benchmarks.gpu_plane import Launches, Point, between, measure, named, summary
from kvgen.errors import CompileError
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure import read_roofline
from kvgen.registry.entry import Entry
from kvgen.spec.traffic import parse
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
    times = json.loads(row["own_us"])
    assert (len(times), times[1], min(times), times[0]) == (2, row["us"], row["best_us"], row["default_us"])
    assert row["regret"] == row["regret_own"] >= 1.0
    assert row["read_us"] == 1.0 + row["bytes"]
    assert launches.serving(Point("1x500", (500,))) == 0


def test_a_row_says_what_a_host_takes_that_does_not_know_the_tokens(launches, monkeypatch):
    """A look-up that gives launch 1 where it is told no tokens."""
    monkeypatch.setattr("benchmarks.gpu_plane.read_roofline", lambda target: SimpleNamespace(samples=lambda nbytes, policy: [1.0]))
    look_up = SimpleNamespace(launch=lambda batch, bound, q_len, tokens: int(tokens is None))
    monkeypatch.setattr(launches, "look_ups", {"rested": look_up})
    row = measure(launches, Point("2 of 2 to 80", (2, 80)), 1, whole=False)
    assert row is not None
    assert (row["launch"], row["launch_unknown"]) == (0, 1)
    assert row["regret_unknown"] == pytest.approx(json.loads(row["own_us"])[1] / row["best_us"], rel=1e-3)


def test_under_load_the_launch_of_sustained_traffic_serves():
    """Of the same call, two cells: under load another launch serves."""
    spec, schedule, source, artifact = naive_spec(), naive_schedule(), naive_source(), naive_artifact()
    other = Schedule(schedule.backend, schedule.layout, Params(threads=7))
    cells = (Cell("4x256", 0, (9.0, 9.5), 9.0), Cell("4x256:sustained", 1, (30.0, 20.0), 20.0))
    more, table = [(parse("4x256"), other, source, artifact)], DispatchTable((), 0, (0, 1), cells)
    both = Launches(spec, Entry.of(spec, "cpu", [(spec.workloads[0], schedule, source, artifact)], more, table, device={}))
    assert [both.serving(Point("4x256", (256,) * 4, load)) for load in ("rested", "sustained")] == [0, 1]


class Queue:
    """Compilers of which one ends well, one badly, and one not in time."""

    def __init__(self, built: Schedule, broken: Schedule) -> None:
        self.built, self.broken = built, broken
        self.asked: list[Schedule] = []

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, schedule: Schedule) -> None:
        self.asked.append(schedule)

    def done(self, schedules, seconds):
        return [schedule for schedule in schedules if schedule in (self.built, self.broken)]

    def artifact(self, schedule: Schedule):
        if schedule == self.broken:
            raise CompileError("no such instruction", "")
        return naive_artifact()


def threads(launches: Launches, count: int) -> Schedule:
    return Schedule("cpu", launches.entry.layout, Params(threads=count))


def test_the_launches_of_the_search_spaces_take_part_once_they_are_compiled(launches, monkeypatch, capsys):
    known, built, broken, late = (threads(launches, count) for count in (7, 8, 9, 10))
    monkeypatch.setattr(launches, "space", lambda work: [known, built, broken])
    launches.take([known, built, broken, late], Queue(built, broken), 0.0)
    assert "no such instruction" in capsys.readouterr().out
    assert launches.known([known, built, broken])
    assert not launches.known([late])
    point = Point("1x60", (60,))
    assert len(launches.at(point, whole=False)) == 2
    assert set(launches.at(point, whole=True)) == {schedule for schedule, _ in launches.own} | {built}


def test_rows_are_written_as_they_come_until_the_time_is_over(launches, monkeypatch, tmp_path, capsys):
    """Whole points come first, but for those whose launches are not compiled by then."""
    small, whole, never = Point("1x60", (60,)), Point("1x70", (70,)), Point("1x80", (80,))
    late = threads(launches, 11)
    monkeypatch.setattr(launches, "queue", lambda: Queue(threads(launches, 8), threads(launches, 9)))
    monkeypatch.setattr(launches, "space", lambda work: [late] if work.kv_len == 80 else [threads(launches, 8)])
    monkeypatch.setattr("benchmarks.gpu_plane.read_roofline", lambda target: SimpleNamespace(samples=lambda nbytes, policy: [1.0]))
    monkeypatch.setenv("OUT", str(tmp_path))
    file, seen = tmp_path / f"cpu_plane.{launches.spec.name}.csv", []

    def spy(*args, **options):
        seen.append(len(file.read_text().splitlines()) if file.exists() else 0)
        return measure(*args, **options)

    monkeypatch.setattr("benchmarks.gpu_plane.measure", spy)
    rows = gpu_plane.run(launches, [small], [whole, never], 1, 3600.0)
    assert [(row["point"], row["whole"], row["candidates"]) for row in rows] == [("1x70", True, 3), ("1x60", False, 2)]
    assert seen == [0, 2]
    assert "not measured for want of time: 1x80" in capsys.readouterr().out
    assert gpu_plane.run(launches, [small], [], 1, 0.0) == []


def test_the_summary_tells_the_worst_point_and_both_comparisons():
    rows = [
        {"spec": "s", "point": name, "traffic": "rested", "regret_own": own, "regret": whole, "whole": bool(whole), "regret_unknown": far}
        for name, own, whole, far in (("a", 1.0, 1.1, 1.44), ("b", 1.21, 0.0, None), ("c", 1.0, 1.0, 1.0))
    ]
    own, whole, unknown = summary(rows)
    assert "at   3 points: worst 1.210 (b, rested), geometric mean 1.066" in own
    assert "at   2 points: worst 1.100 (a, rested), geometric mean 1.049" in whole
    assert "at   2 points: worst 1.440 (a, rested), geometric mean 1.200" in unknown


def test_the_table_of_regrets_counts_points_where_tokens_may_be_unknown_and_those_of_the_whole_space(monkeypatch):
    row = {"traffic": "rested", "regret_own": "1.01", "regret": "1.02", "whole": "False", "default_us": "30.0", "best_own_us": "20.0"}
    points = [
        *[{**row, "regret_unknown": far} for far in ("", "1.25", "1.1")],
        {**row, "traffic": "sustained", "regret_own": "1.4", "regret_unknown": ""},
    ]
    monkeypatch.setattr(plane_tables, "rows", lambda name: [{"spec": "serving-kv8", **point} for point in points])
    assert plane_tables.regrets().splitlines()[2].endswith("| – |")
    points[0]["whole"] = points[3]["whole"] = "True"
    cells = [cell.strip() for cell in plane_tables.regrets().splitlines()[2].strip("|").split("|")]
    assert cells == ["int8", "3", "1.010", "1.010", "1.400 (1)", "1.250 (2)", "1.50", "1.020 (1)"]


def test_the_entries_that_ship_have_a_line_together_once_all_were_measured(monkeypatch):
    row = {"traffic": "rested", "regret": "1.0", "whole": "", "regret_unknown": "", "default_us": "30.0", "best_own_us": "20.0"}
    own = {spec: "1.21" if spec == "serving-kv4" else "1.0" for spec in plane_tables.SHIPPED} | {"default-kv4": "3.0"}
    monkeypatch.setattr(plane_tables, "rows", lambda name: [{"spec": spec, "regret_own": regret, **row} for spec, regret in own.items()])
    *_, last = plane_tables.regrets().splitlines()
    assert [cell.strip() for cell in last.strip("|").split("|")][:4] == ["the five that ship", "5", "1.210", "1.039"]


def test_only_what_was_measured_is_in_the_tables(monkeypatch):
    row = {"spec": "default-kv4", "point": "64x1000", "traffic": "rested", "regret_own": "1", "regret": "1", "regret_unknown": ""}
    times = {"us": "10.0", "read_fraction": "0.9", "default_us": "1", "best_own_us": "1", "whole": "False"}
    monkeypatch.setattr(plane_tables, "rows", lambda name: [{**row, **times}])
    assert plane_tables.traffic().splitlines()[0] == "| traffic | int4, no workloads named |"
    assert [line.split(" | ")[0] for line in plane_tables.regrets().splitlines()[2:]] == ["| int4, no workloads named"]
