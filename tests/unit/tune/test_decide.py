from __future__ import annotations

from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import Workload
from kvgen.tune.decide import Kind, decide, finalists
from kvgen.tune.point import Point, Record

SHORT, LONG = Workload(batch=1, kv_len=128), Workload(batch=1, kv_len=4096, weight=3.0)


def schedule(block: int, threads: int, backend: str = "cpu") -> Schedule:
    return Schedule(backend, Params(block=block), Params(threads=threads))


def record(block: int, threads: int, workload: Workload, us: float, registers: int = 0, backend: str = "cpu", kind: str = "ok") -> Record:
    resources = {"kernels": {"attend": {"registers": registers, "shared_bytes": 0}}}
    return Record(Point(schedule(block, threads, backend), workload), kind, us, samples=(us,), resources=resources)


def compare(new: Record, old: Record) -> Kind:
    """Noise of 5 %."""
    ratio = new.cost / old.cost
    return "faster" if ratio < 0.95 else "slower" if ratio > 1.05 else "same"


def test_a_launch_must_be_clearly_faster_than_the_default():
    default = schedule(64, 1)
    close = [record(64, 1, SHORT, 100.0), record(64, 2, SHORT, 97.0)]
    clear = [record(64, 1, SHORT, 100.0), record(64, 2, SHORT, 80.0)]
    kept, replaced = (decide(records, [SHORT], default, {}, compare) for records in (close, clear))
    assert kept is not None
    assert kept.launches[SHORT.key].point.schedule == default
    assert replaced is not None
    assert replaced.launches[SHORT.key].point.schedule == schedule(64, 2)


def test_launches_differ_by_workload_over_one_layout():
    records = [
        record(64, 1, SHORT, 50.0), record(64, 2, SHORT, 80.0), record(64, 1, LONG, 900.0), record(64, 2, LONG, 500.0),
        record(32, 1, SHORT, 70.0), record(32, 2, LONG, 700.0),
    ]  # fmt: skip
    decision = decide(records, [SHORT, LONG], schedule(64, 1), {}, compare)
    assert decision is not None
    assert {key: r.point.schedule.launch["threads"] for key, r in decision.launches.items()} == {SHORT.key: 1, LONG.key: 2}
    assert [arm.layout["block"] for arm, _ in decision.runners_up] == [32]


def test_a_layout_that_is_slower_than_the_default_anywhere_never_wins():
    records = [record(64, 1, SHORT, 50.0), record(64, 1, LONG, 900.0), record(32, 1, SHORT, 90.0), record(32, 1, LONG, 100.0)]
    decision = decide(records, [SHORT, LONG], schedule(64, 1), {}, compare)
    assert decision is not None
    assert decision.arm.layout["block"] == 64


def test_ties_go_to_fewer_registers_then_to_the_present_winner():
    records = [record(64, 1, SHORT, 200.0), record(64, 2, SHORT, 100.0, registers=90), record(64, 4, SHORT, 101.0, registers=40)]
    decision = decide(records, [SHORT], schedule(64, 1), {}, compare)
    assert decision is not None
    assert decision.launches[SHORT.key].point.schedule == schedule(64, 4)
    decision = decide(records, [SHORT], schedule(64, 1), {SHORT.key: schedule(64, 2)}, compare)
    assert decision is not None
    assert decision.launches[SHORT.key].point.schedule == schedule(64, 2)


def test_nothing_wins_where_a_workload_has_no_right_kernel():
    records = [record(64, 1, SHORT, 50.0), record(64, 1, LONG, 0.0, kind="wrong")]
    assert decide(records, [SHORT, LONG], schedule(64, 1), {}, compare) is None


def test_finalists_hold_the_default_the_best_launches_and_the_other_back_end():
    records = [record(64, threads, SHORT, 100.0 - threads) for threads in range(1, 7)]
    records += [record(32, 1, SHORT, 200.0), record(16, 1, SHORT, 300.0), record(32, 9, SHORT, 500.0, backend="tilelang")]
    default = Point(schedule(64, 1), SHORT)
    points = finalists(records, [SHORT], [default])
    assert points[0] == default
    assert [p.schedule.launch["threads"] for p in points if p.schedule.layout["block"] == 64] == [1, 6, 5, 4]
    assert Point(schedule(32, 1), SHORT) in points
    assert Point(schedule(16, 1), SHORT) not in points
    assert Point(schedule(32, 9, "tilelang"), SHORT) in points
