from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.measurement import Candidate, Measurement, VerdictKind
from kvgen.spec import Workload
from kvgen.tune.final import Decision, decide, finalists

SHORT, LONG = Workload(batch=1, kv_len=128), Workload(batch=1, kv_len=4096, weight=3.0)


def schedule(block: int, threads: int, backend: str = "cpu") -> Schedule:
    return Schedule(backend, Params(block=block), Params(threads=threads))


def always(one: Schedule) -> dict[str, Schedule]:
    """A back end whose default is the same at every workload."""
    return dict.fromkeys((SHORT.key, LONG.key), one)


def record(
    block: int, threads: int, workload: Workload, us: float, registers: int = 0, backend: str = "cpu", kind: str = "ok"
) -> Measurement:
    resources = {"kernels": {"attend": {"registers": registers, "shared_bytes": 0}}}
    return Candidate(schedule(block, threads, backend), workload).measured(kind, samples=(us,), resources=resources)


def compare(new: Measurement, old: Measurement) -> VerdictKind:
    """Noise of 5 %."""
    ratio = new.cost / old.cost
    return "faster" if ratio < 0.95 else "slower" if ratio > 1.05 else "same"


def decided(records: Sequence[Measurement], defaults: Mapping[str, Schedule], present: Mapping[str, Schedule] | None = None) -> Decision:
    works = [work for work in (SHORT, LONG) if any(r.candidate.workload == work for r in records)]
    decision = decide(records, works, defaults, present or {}, compare)
    assert decision is not None
    return decision


@pytest.mark.parametrize(("us", "winner"), [(97.0, 1), (80.0, 2)])
def test_a_launch_must_be_clearly_faster_than_the_default(us: float, winner: int):
    decision = decided([record(64, 1, SHORT, 100.0), record(64, 2, SHORT, us)], always(schedule(64, 1)))
    assert decision.launches[SHORT.key].candidate.schedule == schedule(64, winner)


def test_launches_differ_by_workload_over_one_layout():
    records = [
        record(64, 1, SHORT, 50.0), record(64, 2, SHORT, 80.0), record(64, 1, LONG, 900.0), record(64, 2, LONG, 500.0),
        record(32, 1, SHORT, 70.0), record(32, 2, LONG, 700.0),
    ]  # fmt: skip
    decision = decided(records, always(schedule(64, 1)))
    assert {key: r.candidate.schedule.launch["threads"] for key, r in decision.launches.items()} == {SHORT.key: 1, LONG.key: 2}


def test_a_layout_that_is_slower_than_the_default_anywhere_never_wins():
    records = [record(64, 1, SHORT, 50.0), record(64, 1, LONG, 900.0), record(32, 1, SHORT, 90.0), record(32, 1, LONG, 100.0)]
    assert decided(records, always(schedule(64, 1))).layout["block"] == 64


def test_each_workload_takes_its_fastest_back_end_and_keeps_the_others_best():
    records = [
        record(64, 1, SHORT, 100.0, backend="cuda"), record(64, 1, LONG, 500.0, backend="cuda"), record(64, 2, SHORT, 90.0, backend="cuda"),
        record(64, 9, SHORT, 70.0, backend="tilelang"), record(64, 9, LONG, 540.0, backend="tilelang"),
        record(64, 8, LONG, 530.0, backend="tilelang"),
    ]  # fmt: skip
    decision = decided(records, always(schedule(64, 1, "cuda")))
    assert {key: r.candidate.backend for key, r in decision.launches.items()} == {SHORT.key: "tilelang", LONG.key: "cuda"}
    assert decision.why == f"fastest layout; cuda at {LONG.key}, tilelang at {SHORT.key}"


@pytest.mark.parametrize(("present", "winner"), [({}, "cuda"), ({SHORT.key: schedule(64, 9, "tilelang")}, "tilelang")])
def test_a_back_end_within_noise_of_the_incumbent_does_not_take_its_workload(present: dict[str, Schedule], winner: str):
    records = [record(64, 1, SHORT, 100.0, backend="cuda"), record(64, 9, SHORT, 97.0, backend="tilelang")]
    assert decided(records, always(schedule(64, 1, "cuda")), present).launches[SHORT.key].candidate.backend == winner


@pytest.mark.parametrize(("present", "threads"), [({}, 4), ({SHORT.key: schedule(64, 2)}, 2)])
def test_ties_go_to_the_present_winner_or_to_fewer_registers(present: dict[str, Schedule], threads: int):
    records = [record(64, 1, SHORT, 200.0), record(64, 2, SHORT, 100.0, registers=90), record(64, 4, SHORT, 101.0, registers=40)]
    assert decided(records, always(schedule(64, 1)), present).launches[SHORT.key].candidate.schedule == schedule(64, threads)


def test_nothing_wins_where_a_workload_has_no_right_kernel():
    records = [record(64, 1, SHORT, 50.0), record(64, 1, LONG, 0.0, kind="wrong")]
    assert decide(records, [SHORT, LONG], always(schedule(64, 1)), {}, compare) is None


def test_finalists_hold_the_default_the_best_launches_and_the_other_back_end():
    records = [record(64, threads, SHORT, 100.0 - threads) for threads in range(1, 9)]
    records += [record(32, 1, SHORT, 200.0), record(16, 1, SHORT, 300.0), record(32, 9, SHORT, 500.0, backend="tilelang")]
    default = Candidate(schedule(64, 1), SHORT)
    candidates = finalists(records, [SHORT], [default])
    assert candidates[0] == default
    assert [p.schedule.launch["threads"] for p in candidates if p.schedule.layout["block"] == 64] == [1, 8, 7, 6, 5, 4]
    assert {Candidate(schedule(32, 1), SHORT), Candidate(schedule(32, 9, "tilelang"), SHORT)} <= set(candidates)
    assert Candidate(schedule(16, 1), SHORT) not in candidates
