from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import Workload
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.search import Search, search_queues

WORKLOADS = [Workload(batch=1, kv_len=128), Workload(batch=4, kv_len=1024)]
BLOCKS, THREADS, TILES = (32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 3)
LAUNCHES = [Params(threads=threads, tile=tile) for threads in THREADS for tile in TILES]
DEFAULT = Schedule("cpu", Params(block=64), Params(threads=2, tile=2))


def search(seed: int = 0, exhaustive: bool = False, backends: Sequence[str] = ("cpu",)) -> Search:
    starts = [Schedule(backend, DEFAULT.layout, DEFAULT.launch) for backend in backends]
    layouts = [Params(block=block) for block in BLOCKS]
    every = [
        queue
        for start in starts
        for layout in layouts
        for queue in search_queues(layout, dict.fromkeys(WORKLOADS, LAUNCHES), {work.key: start for work in WORKLOADS}, seed)
    ]
    return Search(every, {"block": BLOCKS, "threads": THREADS, "tile": TILES}, lambda _lane: None, exhaustive)


def cost(candidate: Candidate) -> float:
    """Best at block 128, threads 8, tile 3; the same order at every workload."""
    s = candidate.schedule
    return 1.0 + abs(s.layout.integer("block") - 128) + 4 * (8 - s.launch.integer("threads")) + 3 - s.launch.integer("tile")


def drive(found: Search, trials: int = 10_000, batch: int = 1) -> list[Candidate]:
    done: list[Candidate] = []
    while len(done) < trials:
        candidates = found.next(batch)
        if not candidates:
            break
        for candidate in candidates:
            found.take(Record(candidate, "ok", cost(candidate)))
        done += candidates
    return done


def test_every_point_is_given_once():
    for exhaustive in (True, False):
        candidates = drive(search(exhaustive=exhaustive), batch=5)
        assert len(candidates) == len(BLOCKS) * len(LAUNCHES) * len(WORKLOADS)
        assert len({candidate.key for candidate in candidates}) == len(candidates)


def test_order_depends_on_the_seed_alone():
    one, same, other = (drive(search(seed, exhaustive=True)) for seed in (7, 7, 8))
    assert one == same
    assert one != other


def test_the_first_round_tries_the_layouts_near_the_default_with_its_launch():
    first = search().next(1000)
    assert [(p.schedule.layout["block"], p.workload.key) for p in first] == [(b, w.key) for b in (64, 32, 128) for w in WORKLOADS]
    assert {p.schedule.launch for p in first} == {DEFAULT.launch}


def test_neighbours_of_a_new_leader_join_and_those_of_an_old_one_wait():
    away = drive(search(), trials=len(WORKLOADS) * 3 + 20)
    assert {p.schedule.layout["block"] for p in away} == set(BLOCKS)
    found = search()
    for candidate in found.next(1000):
        found.take(Record(candidate, "ok", 1.0 if candidate.schedule.layout["block"] == 64 else 2.0))
    assert 256 not in {p.schedule.layout["block"] for p in found.next(20)}


def test_the_race_finds_the_best_point_early():
    candidates = drive(search(), trials=40)
    assert min(map(cost, candidates)) == 1.0


def test_worse_layouts_are_dropped_first():
    candidates = drive(search(), trials=30)
    per_block = {block: sum(p.schedule.layout["block"] == block for p in candidates) for block in BLOCKS}
    assert per_block[128] > per_block[256]


def test_records_of_an_earlier_run_are_not_given_again():
    known = drive(search(), trials=20)
    resumed = search()
    for candidate in known:
        resumed.take(Record(candidate, "ok", cost(candidate)))
    again = drive(resumed)
    assert not {p.key for p in again} & {p.key for p in known}
    assert len(again) + len(known) == len(BLOCKS) * len(LAUNCHES) * len(WORKLOADS)


def test_pending_points_hold_the_next_round_back():
    found = search()
    first = found.next(1000)
    assert len(first) == 3 * len(WORKLOADS)
    assert found.next(1) == []
    for candidate in first:
        found.take(Record(candidate, "crash"))
    assert found.next(1)


def test_what_is_nearly_best_at_one_workload_is_tried_at_the_other():
    found = search()
    for candidate in found.next(1000):
        found.take(Record(candidate, "ok", 10.0))
    best = Candidate(Schedule("cpu", Params(block=64), Params(threads=8, tile=3)), WORKLOADS[0])
    far = Candidate(Schedule("cpu", Params(block=64), Params(threads=1, tile=1)), WORKLOADS[0])
    found.take(Record(best, "ok", 5.0))
    found.take(Record(far, "ok", 9.0))
    first = next(p for p in found.next(20) if p.workload == WORKLOADS[1] and p.layout == best.layout)
    assert first.schedule == best.schedule


def test_layouts_race_with_the_best_of_all_back_ends():
    """Each back end is good at one workload; a layout's score takes the best of both."""
    found = search(backends=("cuda", "tilelang"))
    for candidate in found.next(1000):
        home = candidate.backend == ("cuda" if candidate.workload == WORKLOADS[0] else "tilelang")
        found.take(Record(candidate, "ok", 4.0 if home else 9.0))
    assert found.score(Params(block=64)) == pytest.approx(4.0)


def test_a_back_end_that_is_far_behind_at_a_workload_waits_there_alone():
    found = search(backends=("cuda", "tilelang"))
    given: dict[tuple[str, str], int] = {}
    for _ in range(120):
        (candidate,) = found.next(1)
        queue = candidate.backend, candidate.workload.key
        given[queue] = given.get(queue, 0) + 1
        behind = queue == ("cuda", WORKLOADS[0].key)
        found.take(Record(candidate, "ok", cost(candidate) * (3.0 if behind else 1.0)))
    others = [count for queue, count in given.items() if queue != ("cuda", WORKLOADS[0].key)]
    assert given["cuda", WORKLOADS[0].key] < min(others) / 1.5


def test_with_several_back_ends_too_every_point_is_given_once():
    candidates = drive(search(backends=("cuda", "tilelang")), batch=5)
    assert len(candidates) == len({candidate.key for candidate in candidates}) == 2 * len(BLOCKS) * len(LAUNCHES) * len(WORKLOADS)


def test_transfers_are_what_did_well_elsewhere_and_nothing_else():
    found = search()
    for candidate in found.next(1000):
        found.take(Record(candidate, "ok", 10.0))
    assert found.transfers(20) == []
    good = Candidate(Schedule("cpu", Params(block=64), Params(threads=8, tile=3)), WORKLOADS[0])
    found.take(Record(good, "ok", 5.0))
    assert found.transfers(0) == []
    (given,) = found.transfers(20)
    assert (given.schedule, given.workload) == (good.schedule, WORKLOADS[1])
    assert given.key in found.pending
    assert found.transfers(20) == []
