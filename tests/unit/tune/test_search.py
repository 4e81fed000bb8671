from __future__ import annotations

import itertools
import math
import random

import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter
from kvgen.measure.measurement import Candidate
from kvgen.spec import Workload
from kvgen.tune.search import Search
from kvgen.tune.storage import CLAIM, STALE_S, Study

WORKLOADS = [Workload(batch=1, kv_len=128), Workload(batch=4, kv_len=1024)]
PARAMETERS = [
    Parameter("block", "layout", (32, 64, 128, 256), ""),
    Parameter("threads", "launch", (1, 2, 4, 8, 16), ""),
    Parameter("tile", "launch", (1, 2, 3, 4), ""),
    Parameter("copy", "launch", ("plain", "bulk"), ""),
]


def schedules(backend: str = "cpu") -> list[Schedule]:
    """A third of the product is valid."""
    product = itertools.product(*(p.values for p in PARAMETERS))
    return [
        Schedule(backend, Params(block=block), Params(threads=threads, tile=tile, copy=copy))
        for block, threads, tile, copy in product
        if threads * tile <= block // 4
    ]


EVERY = len(schedules())


def cost(candidate: Candidate) -> float:
    """Best at 128 16 2 bulk."""
    s = candidate.schedule
    steps = abs(math.log2(s.layout.integer("block") / 128)) + abs(math.log2(s.launch.integer("threads") / 16))
    return 10.0 + steps + 0.5 * abs(s.launch.integer("tile") - 2) + (s.launch["copy"] != "bulk")


def search(storage: BaseStorage | None = None, seed: int = 0, backends: tuple[str, ...] = ("cpu",), shared: bool = False) -> Search:
    storage = storage or InMemoryStorage()
    return Search({
        (backend, work): Study(storage, f"{backend} {work.key}", schedules(backend), PARAMETERS, seed, shared=shared)
        for backend in backends
        for work in WORKLOADS
    })  # fmt: skip


def drive(found: Search, trials: int = 10_000, batch: int = 1) -> list[Candidate]:
    done: list[Candidate] = []
    while len(done) < trials and (candidates := found.next(batch)):
        for candidate in candidates:
            found.finish(candidate.measured("ok", samples=(cost(candidate),)))
        done += candidates
    return done


@pytest.mark.parametrize("backends", [("cpu",), ("cuda", "tilelang")])
def test_every_candidate_is_given_once_and_no_trial_fails(backends: tuple[str, ...]):
    storage = InMemoryStorage()
    found = search(storage, backends=backends)
    candidates = drive(found, batch=7)
    assert len(candidates) == len({(p.backend, *p.key) for p in candidates}) == EVERY * 2 * len(backends)
    states = [trial.state for study in storage.get_all_studies() for trial in storage.get_all_trials(study._study_id)]
    assert set(states) == {TrialState.COMPLETE}
    assert (len(states), found.left) == (len(candidates), 0)


@pytest.mark.parametrize(("ahead", "share"), [(1, 0.5), (8, 0.75)])
def test_the_search_comes_near_the_best_in_half_of_the_trials_of_a_random_order(ahead: int, share: float):
    """And in three quarters with eight candidates on their way. Medians over seeds."""
    every = schedules()

    def trials(seed: int) -> tuple[int, int]:
        study = Study(InMemoryStorage(), "study", every, PARAMETERS, seed)
        pending, number = list[Schedule](), 1
        while True:
            while len(pending) < ahead:
                pending.append(study.propose())
                study.claim(pending[-1])
            if cost(candidate := Candidate(pending.pop(0), WORKLOADS[0])) <= 10.0:
                break
            study.finish(candidate.measured("ok", samples=(cost(candidate),)))
            number += 1
        order = random.Random(seed).sample(every, EVERY)
        return number, next(n for n, one in enumerate(order, 1) if cost(Candidate(one, WORKLOADS[0])) <= 10.0)

    ours, others = (sorted(counts)[5] for counts in zip(*map(trials, range(11)), strict=True))
    assert ours <= share * others


def test_what_leads_comes_first_and_records_of_an_earlier_build_are_not_given_again():
    storage = InMemoryStorage()
    first = Candidate(schedules()[5], WORKLOADS[1])
    found = search(storage)
    found.lead([first])
    known = drive(found, trials=40)
    assert known[0] == first
    resumed = search(storage, seed=1)
    resumed.lead([first])
    again = drive(resumed)
    assert not {p.key for p in again} & {p.key for p in known}
    assert len(again) + len(known) == 2 * EVERY


def test_a_build_continues_with_the_workload_that_was_measured_least():
    storage, found = InMemoryStorage(), search()
    found = search(storage)
    for schedule in schedules()[:6]:
        found.finish(Candidate(schedule, WORKLOADS[0]).measured("ok", samples=(10.0,)))
    assert {candidate.workload.key for candidate in search(storage).next(6)} == {WORKLOADS[1].key}


def test_what_is_nearly_best_at_one_workload_is_tried_at_the_other():
    found = search()
    good, far = schedules()[7], schedules()[20]
    for schedule, us in ((good, 5.0), (far, 9.0)):
        found.finish(Candidate(schedule, WORKLOADS[0]).measured("ok", samples=(us,)))
    at_other = [candidate.schedule for candidate in found.next(4) if candidate.workload == WORKLOADS[1]]
    assert good in at_other
    assert far not in at_other


def test_a_back_end_far_behind_waits():
    found, given = search(backends=("cuda", "tilelang")), dict.fromkeys(("cuda", "tilelang"), 0)
    for _ in range(60):
        (candidate,) = found.next(1)
        given[candidate.backend] += 1
        found.finish(candidate.measured("ok", samples=(cost(candidate) * (3.0 if candidate.backend == "cuda" else 1.0),)))
    assert given["cuda"] < 10


def test_processes_that_share_a_storage_divide_it_and_take_over_from_one_that_died(monkeypatch: pytest.MonkeyPatch):
    storage = InMemoryStorage()
    one, other, dead = (search(storage, seed, shared=True) for seed in (0, 1, 2))
    lost, given, last = dead.next(5), list[Candidate](), False
    while True:
        before = len(given)
        for found in (one, other):
            found.read()
            candidates = found.next(3)
            for candidate in candidates[:2]:
                found.finish(candidate.measured("ok", samples=(cost(candidate),)))
            given += candidates[:2]
            for candidate in candidates[2:]:
                found.drop(candidate)
        if len(given) == before and last:
            break
        if len(given) == before:
            assert not {candidate.key for candidate in lost} & {candidate.key for candidate in given}
            monkeypatch.setattr("kvgen.tune.storage.STALE_S", -1.0)
            last = True
    assert len(given) == len({candidate.key for candidate in given}) == 2 * EVERY


def test_of_two_processes_that_claim_at_once_the_first_has_it():
    storage = InMemoryStorage()
    one, other = (search(storage, seed, shared=True) for seed in (0, 1))
    mine = one.next(EVERY)
    assert mine
    found = other.next(3 * EVERY)  # without a look at what the first has claimed
    assert not {candidate.key for candidate in mine} & {candidate.key for candidate in found}
    assert len(mine) + len(found) == 2 * EVERY
    for candidate in (*mine, *found):
        (one if candidate in mine else other).finish(candidate.measured("ok", samples=(1.0,)))
    states = [trial.state for study in storage.get_all_studies() for trial in storage.get_all_trials(study._study_id)]
    assert (states.count(TrialState.COMPLETE), set(states)) == (2 * EVERY, {TrialState.COMPLETE, TrialState.FAIL})


def test_what_is_given_back_waits_for_the_next_build():
    storage = InMemoryStorage()
    found = search(storage, shared=True)
    found.next(4)
    found.end()
    trials = [trial for study in storage.get_all_studies() for trial in storage.get_all_trials(study._study_id)]
    assert {trial.state for trial in trials} == {TrialState.WAITING}
    assert all(CLAIM in trial.user_attrs for trial in trials)
    assert STALE_S > 60
    assert search(storage, shared=True).left == 2 * EVERY


def test_a_claim_of_a_dead_host_that_another_measured_fails_and_reopens_nothing(monkeypatch: pytest.MonkeyPatch):
    storage = InMemoryStorage()
    dead, other = (search(storage, seed, shared=True) for seed in (0, 1))
    first = Candidate(schedules()[0], WORKLOADS[0])
    for found in (dead, other):
        found.lead([first])
        assert found.next(1) == [first]
    other.finish(first.measured("ok", samples=(1.0,)))
    monkeypatch.setattr("kvgen.tune.storage.STALE_S", -1.0)
    for _ in range(2):
        third = search(storage, 2, shared=True)
        assert (third.left, third.records[first.key].cost) == (2 * EVERY - 1, 1.0)
    states = [trial.state for study in storage.get_all_studies() for trial in storage.get_all_trials(study._study_id)]
    assert sorted(states) == [TrialState.COMPLETE, TrialState.FAIL]
