from __future__ import annotations

from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import Workload
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.decide import Kind, decide, finalists, most_finalists, unclear

SHORT, LONG = Workload(batch=1, kv_len=128), Workload(batch=1, kv_len=4096, weight=3.0)


def schedule(block: int, threads: int, backend: str = "cpu") -> Schedule:
    return Schedule(backend, Params(block=block), Params(threads=threads))


def always(one: Schedule) -> dict[str, Schedule]:
    """A back end whose default is the same at every workload."""
    return dict.fromkeys((SHORT.key, LONG.key), one)


def record(block: int, threads: int, workload: Workload, us: float, registers: int = 0, backend: str = "cpu", kind: str = "ok") -> Record:
    resources = {"kernels": {"attend": {"registers": registers, "shared_bytes": 0}}}
    return Record(Candidate(schedule(block, threads, backend), workload), kind, us, samples=(us,), resources=resources)


def compare(new: Record, old: Record) -> Kind:
    """Noise of 5 %."""
    ratio = new.cost / old.cost
    return "faster" if ratio < 0.95 else "slower" if ratio > 1.05 else "same"


def test_a_launch_must_be_clearly_faster_than_the_default():
    default = schedule(64, 1)
    close = [record(64, 1, SHORT, 100.0), record(64, 2, SHORT, 97.0)]
    clear = [record(64, 1, SHORT, 100.0), record(64, 2, SHORT, 80.0)]
    kept, replaced = (decide(records, [SHORT], always(default), {}, compare) for records in (close, clear))
    assert kept is not None
    assert kept.launches[SHORT.key].candidate.schedule == default
    assert replaced is not None
    assert replaced.launches[SHORT.key].candidate.schedule == schedule(64, 2)


def test_each_workload_has_a_default_of_its_own_to_beat():
    records = [record(64, 1, SHORT, 100.0), record(64, 2, SHORT, 97.0), record(64, 1, LONG, 500.0), record(64, 2, LONG, 510.0)]
    defaults = {SHORT.key: schedule(64, 1), LONG.key: schedule(64, 2)}
    decision = decide(records, [SHORT, LONG], defaults, {}, compare)
    assert decision is not None
    assert {key: won.candidate.schedule for key, won in decision.launches.items()} == defaults
    assert unclear(records, [SHORT, LONG], defaults, {}, lambda *_: "unclear") == [SHORT, LONG]
    assert unclear(records, [SHORT, LONG], {**defaults, LONG.key: schedule(64, 1)}, {}, lambda *_: "unclear") == [SHORT]


def test_launches_differ_by_workload_over_one_layout():
    records = [
        record(64, 1, SHORT, 50.0), record(64, 2, SHORT, 80.0), record(64, 1, LONG, 900.0), record(64, 2, LONG, 500.0),
        record(32, 1, SHORT, 70.0), record(32, 2, LONG, 700.0),
    ]  # fmt: skip
    decision = decide(records, [SHORT, LONG], always(schedule(64, 1)), {}, compare)
    assert decision is not None
    assert {key: r.candidate.schedule.launch["threads"] for key, r in decision.launches.items()} == {SHORT.key: 1, LONG.key: 2}
    assert [layout["block"] for layout, _ in decision.runners_up] == [32]


def test_a_layout_that_is_slower_than_the_default_anywhere_never_wins():
    records = [record(64, 1, SHORT, 50.0), record(64, 1, LONG, 900.0), record(32, 1, SHORT, 90.0), record(32, 1, LONG, 100.0)]
    decision = decide(records, [SHORT, LONG], always(schedule(64, 1)), {}, compare)
    assert decision is not None
    assert decision.layout["block"] == 64


def test_each_workload_takes_its_fastest_back_end_and_keeps_the_others_best():
    records = [
        record(64, 1, SHORT, 100.0, backend="cuda"), record(64, 1, LONG, 500.0, backend="cuda"), record(64, 2, SHORT, 90.0, backend="cuda"),
        record(64, 9, SHORT, 70.0, backend="tilelang"), record(64, 9, LONG, 540.0, backend="tilelang"),
        record(64, 8, LONG, 530.0, backend="tilelang"),
    ]  # fmt: skip
    decision = decide(records, [SHORT, LONG], always(schedule(64, 1, "cuda")), {}, compare)
    assert decision is not None
    assert {key: r.candidate.backend for key, r in decision.launches.items()} == {SHORT.key: "tilelang", LONG.key: "cuda"}
    assert {key: (r.candidate.backend, r.cost) for key, r in decision.rivals.items()} == {
        SHORT.key: ("cuda", 90.0),
        LONG.key: ("tilelang", 530.0),
    }
    assert decision.why == f"fastest layout; cuda at {LONG.key}, tilelang at {SHORT.key}"


def test_a_back_end_within_noise_of_the_present_winner_does_not_take_its_workload():
    records = [record(64, 1, SHORT, 100.0, backend="cuda"), record(64, 9, SHORT, 97.0, backend="tilelang")]
    decision = decide(records, [SHORT], always(schedule(64, 1, "cuda")), {}, compare)
    assert decision is not None
    assert decision.launches[SHORT.key].candidate.backend == "cuda"
    decision = decide(records, [SHORT], always(schedule(64, 1, "cuda")), {SHORT.key: schedule(64, 9, "tilelang")}, compare)
    assert decision is not None
    assert decision.launches[SHORT.key].candidate.backend == "tilelang"


def test_it_is_asked_again_whether_the_best_launch_beats_the_incumbent_where_that_is_unclear():
    records = [
        record(64, 1, SHORT, 100.0), record(64, 2, SHORT, 80.0), record(64, 4, SHORT, 90.0), record(32, 2, SHORT, 70.0),
        record(64, 1, LONG, 500.0), record(64, 2, LONG, 510.0),
    ]  # fmt: skip
    default = schedule(64, 1)
    often = unclear(records, [SHORT, LONG], always(default), {}, lambda *_: "unclear")
    assert often == [SHORT]
    assert unclear(records, [SHORT, LONG], always(default), {SHORT.key: schedule(64, 2)}, lambda *_: "unclear") == []
    assert unclear(records, [SHORT, LONG], always(default), {}, compare) == []


def test_ties_go_to_fewer_registers_then_to_the_present_winner():
    records = [record(64, 1, SHORT, 200.0), record(64, 2, SHORT, 100.0, registers=90), record(64, 4, SHORT, 101.0, registers=40)]
    decision = decide(records, [SHORT], always(schedule(64, 1)), {}, compare)
    assert decision is not None
    assert decision.launches[SHORT.key].candidate.schedule == schedule(64, 4)
    decision = decide(records, [SHORT], always(schedule(64, 1)), {SHORT.key: schedule(64, 2)}, compare)
    assert decision is not None
    assert decision.launches[SHORT.key].candidate.schedule == schedule(64, 2)


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
    assert Candidate(schedule(32, 1), SHORT) in candidates
    assert Candidate(schedule(16, 1), SHORT) not in candidates
    assert Candidate(schedule(32, 9, "tilelang"), SHORT) in candidates


def test_there_are_never_more_finalists_than_the_final_is_planned_for():
    backends, works = ("cuda", "tilelang"), [SHORT, LONG]
    records = [
        record(block, threads, work, 100.0 + 7 * block + threads * (1 + place), backend=backend)
        for place, backend in enumerate(backends)
        for block in (64, 32, 16)
        for threads in range(1, 9)
        for work in works
    ]
    keep = [Candidate(schedule(64, 8, backend), work) for backend in backends for work in works]
    keep += [Candidate(schedule(64, 7, "cuda"), work) for work in works]
    assert len(finalists(records, works, keep)) <= most_finalists(len(works), len(backends))
