from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.measurement import Candidate
from kvgen.spec import Workload
from kvgen.tune.search import Search, open_queues

WORKLOADS = [Workload(batch=1, kv_len=128), Workload(batch=4, kv_len=1024)]
BLOCKS, THREADS, TILES = (32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 3)
LAUNCHES = [Params(threads=threads, tile=tile) for threads in THREADS for tile in TILES]
DEFAULT = Schedule("cpu", Params(block=64), Params(threads=2, tile=2))
SPACE = SimpleNamespace(layouts=lambda: [Params(block=block) for block in BLOCKS], launches=lambda layout, work: LAUNCHES)
EVERY = len(BLOCKS) * len(LAUNCHES) * len(WORKLOADS)


def search(seed: int = 0, exhaustive: bool = False, backends: tuple[str, ...] = ("cpu",), shared: bool = False) -> Search:
    queues = []
    for backend in backends:
        start = Schedule(backend, DEFAULT.layout, DEFAULT.launch)
        contender = SimpleNamespace(space=SPACE, at_workloads={work.key: start for work in WORKLOADS})
        queues += open_queues(WORKLOADS, cast(Any, contender), seed)
    return Search(
        queues, {"block": BLOCKS, "threads": THREADS, "tile": TILES}, lambda queue: queue.start, exhaustive=exhaustive, shared=shared
    )


def cost(candidate: Candidate) -> float:
    """Best at block 128, threads 8, tile 3; the same order at every workload."""
    s = candidate.schedule
    return 1.0 + abs(s.layout.integer("block") - 128) + 4 * (8 - s.launch.integer("threads")) + 3 - s.launch.integer("tile")


def drive(found: Search, trials: int = 10_000, batch: int = 1) -> list[Candidate]:
    done: list[Candidate] = []
    while len(done) < trials and (candidates := found.next(batch)):
        for candidate in candidates:
            found.take(candidate.measured("ok", samples=(cost(candidate),)))
        done += candidates
    return done


@pytest.mark.parametrize("exhaustive", [True, False])
@pytest.mark.parametrize("backends", [("cpu",), ("cuda", "tilelang")])
def test_every_candidate_is_given_once(exhaustive: bool, backends: tuple[str, ...]):
    candidates = drive(search(exhaustive=exhaustive, backends=backends), batch=5)
    assert len(candidates) == len({(p.backend, *p.key) for p in candidates}) == EVERY * len(backends)


def test_the_first_round_tries_the_layouts_near_the_default_with_its_launch():
    found = search()
    first = found.next(1000)
    assert [(p.schedule.layout["block"], p.workload.key) for p in first] == [(b, w.key) for b in (64, 32, 128) for w in WORKLOADS]
    assert {p.schedule.launch for p in first} == {DEFAULT.launch}
    assert found.next(1) == []  # the next round depends on their times
    for candidate in first:
        found.take(candidate.measured("crash"))
    assert found.next(1)


def test_the_best_is_found_early_and_worse_layouts_are_set_aside():
    candidates = drive(search(), trials=40)
    assert min(map(cost, candidates)) == 1.0
    per_block = {block: sum(p.schedule.layout["block"] == block for p in candidates) for block in BLOCKS}
    assert per_block[128] > per_block[32]
    assert per_block[256], "the neighbour of the best joins"


def test_records_of_an_earlier_build_are_not_given_again():
    known, resumed = drive(search(), trials=20), search()
    for candidate in known:
        resumed.take(candidate.measured("ok", samples=(cost(candidate),)))
    again = drive(resumed)
    assert not {p.key for p in again} & {p.key for p in known}
    assert len(again) + len(known) == EVERY


def test_what_is_nearly_best_at_one_workload_is_tried_at_the_other():
    found = search()
    for candidate in found.next(1000):
        found.take(candidate.measured("ok", samples=(10.0,)))
    best, far = (Candidate(Schedule("cpu", DEFAULT.layout, Params(threads=t, tile=n)), WORKLOADS[0]) for t, n in ((8, 3), (1, 1)))
    found.take(best.measured("ok", samples=(5.0,)))
    found.take(far.measured("ok", samples=(9.0,)))
    first = next(p for p in found.next(20) if p.workload == WORKLOADS[1] and p.layout == best.layout)
    assert first.schedule == best.schedule


def test_a_layout_counts_by_its_best_back_ends_and_one_far_behind_waits():
    found = search(backends=("cuda", "tilelang"))
    given: dict[tuple[str, str], int] = {}
    for number in range(120):
        (candidate,) = found.next(1)
        queue = candidate.backend, candidate.workload.key
        given[queue] = given.get(queue, 0) + 1
        behind = queue == ("cuda", WORKLOADS[0].key)
        found.take(candidate.measured("ok", samples=((4.0 if number < 12 else cost(candidate)) * (3.0 if behind else 1.0),)))
        if number == 11:
            assert found.score(DEFAULT.layout) == pytest.approx(4.0)
    others = [count for queue, count in given.items() if queue != ("cuda", WORKLOADS[0].key)]
    assert given["cuda", WORKLOADS[0].key] < min(others) / 1.5


def test_processes_that_share_their_records_seldom_measure_the_same():
    one, other = (search(exhaustive=True, shared=True) for _ in range(2))
    given: list[Candidate] = []
    while pair := [candidate for found in (one, other) for candidate in found.next(1)]:
        given += pair
        for candidate in pair:
            for found in (one, other):
                found.take(candidate.measured("ok", samples=(cost(candidate),)))
    assert len({candidate.key for candidate in given}) == EVERY
    assert len(given) < 1.5 * EVERY
