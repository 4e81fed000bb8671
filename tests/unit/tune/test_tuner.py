from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import sleep

import pytest

from kvgen.arch import Target
from kvgen.errors import CompilerCrash, HostError, MeasureError, UnsupportedError
from kvgen.lower.backend import Source
from kvgen.lower.constraints import Rule
from kvgen.lower.schedule import Schedule
from kvgen.lower.space import SearchSpace
from kvgen.measure.measurement import Candidate, Measurement
from kvgen.registry import Store
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain import compile as compiling
from kvgen.tune import candidates as tune_candidates
from kvgen.tune.budget import Budget, Progress
from kvgen.tune.measuring import CompileQueue
from kvgen.tune.tuner import TuningResult, tune
from tests.support.tuning import FakeBackend, FakeRunner, SeveralDefaults, compile_nothing, fake_cost, tiny_spec

EVERY = 17
"""Candidates of the space."""


class Place:
    """A cache and a registry of their own."""

    def __init__(self, root: Path) -> None:
        self.cache, self.store = ArtifactCache(root / "cache"), Store(root / "registry")

    def tune(self, runner: FakeRunner | None = None, trials: int | None = None, **more: object) -> TuningResult:
        more = {"backends": [FakeBackend()], "budget": Budget(trials=trials), "runner": runner or FakeRunner(), **more}
        return tune(more.pop("spec", tiny_spec()), "cpu", cache=self.cache, store=self.store, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return compile_nothing(monkeypatch)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def searched(runner: FakeRunner) -> list[tuple[str, str]]:
    """What was measured before the final."""
    final = sum(map(len, runner.finals))
    return [candidate.key for candidate in runner.measured[: len(runner.measured) - final]]


def stopping(count: int) -> FakeRunner:
    """Ctrl-C after so many measurements."""

    def outcome(_: Candidate) -> str:
        if len(runner.measured) > count:
            raise KeyboardInterrupt
        return "ok"

    runner = FakeRunner(outcome=outcome)
    return runner


def test_the_best_layout_and_launches_win_and_are_registered(place: Place):
    runner = FakeRunner()
    result = place.tune(runner)
    assert result.entry.layout["block"] == 32
    assert {work.key: launch.params["threads"] for work, launch in result.entry.tuned} == {"1x128": 1, "2x512": 4}
    times = {t.workload.key: (t.us, t.default_us, t.read_us) for t in result.entry.timings}
    assert times == {"1x128": (142.0, 184.0, 50.0), "2x512": (232.0, 284.0, 50.0)}
    assert [(one.entry, one.path) for one in place.store.find(result.spec)] == [(result.entry, result.path)]
    assert runner.closed


@pytest.mark.parametrize("devices", [1, 3])
def test_without_a_budget_every_candidate_is_measured_once_and_lowered_once(place: Place, compiled: list[str], devices: int):
    runner = FakeRunner(devices=devices, exclusive=devices == 1)
    result = place.tune(runner)
    assert len(searched(runner)) == len(set(searched(runner))) == result.measured == EVERY
    assert result.entry.layout["block"] == 32
    assert len(set(compiled)) == len({candidate.schedule.id for candidate in runner.measured})


def test_hints_choose_what_is_searched_and_a_build_without_them_measures_the_rest_alone(place: Place):
    """A winner that hints leave out stays a finalist of later builds with them."""

    class Hinted(FakeBackend):
        def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
            space = super().space(spec, target)
            hints = [Rule("{block} tokens gained nothing", lambda p: p.block == 64)]
            return SearchSpace(space.backend, space.parameters, space.constraints, {}, spec.workloads, hints)

    narrow, wide = FakeRunner(), FakeRunner()
    place.tune(narrow, backends=[Hinted()])
    assert {candidate.layout["block"] for candidate in narrow.measured} == {64}
    result = place.tune(wide, backends=[Hinted()], all_schedules=True)
    assert {candidate.layout["block"] for candidate in wide.measured[: result.measured]} == {32, 128}
    assert place.tune(backends=[Hinted()]).entry.layout["block"] == 32


@pytest.mark.parametrize(("trials", "measured"), [(1, 2), (3, 3), (5, 5)])
def test_trials_bound_the_build_and_the_defaults_are_measured_and_finalists(place: Place, compiled: list[str], trials: int, measured: int):
    runner = FakeRunner()
    result = place.tune(runner, trials=trials)
    default = {(FakeBackend().default(result.spec, "cpu").id, work.key) for work in result.spec.workloads}
    assert len(searched(runner)) == measured
    assert default <= set(searched(runner)[:4])
    assert default <= {candidate.key for candidate in runner.finals[0]}
    assert len(set(compiled)) == len({record.candidate.schedule.id for record in result.records})  # nothing for nothing


def test_finished_candidates_are_never_measured_again(place: Place):
    first, second, third = stopping(4), FakeRunner(), FakeRunner()
    interrupted = place.tune(first)
    assert interrupted.interrupted
    assert place.store.find(interrupted.spec)[0].entry == interrupted.entry
    result = place.tune(second)
    assert 0 < result.known <= 4
    assert not set(searched(second)) & {record.candidate.key for record in interrupted.records}
    assert result.entry.layout["block"] == 32
    assert place.tune(third).known == EVERY
    assert searched(third) == []


@pytest.mark.parametrize("kind", ["wrong", "crash"])
def test_a_module_that_an_earlier_build_measured_is_verified_before_it_is_registered(place: Place, kind: str):
    """The winner of the first build fails in the second one, which has its record; the third one does not believe in it either."""

    def fails(candidate: Candidate) -> bool:
        return (candidate.schedule.launch["threads"], candidate.layout["block"]) == (1, 32)

    assert place.tune().entry.launches[0].params["threads"] == 1
    second = FakeRunner(outcome=lambda candidate: kind if fails(candidate) else "ok")
    result = place.tune(second)
    assert not any(fails(candidate) for final in second.finals for candidate in final)
    assert result.entry.launches[0].params["threads"] == 2
    assert kind in {record.kind for record in result.failures if fails(record.candidate)}
    assert place.tune().entry.launches[0].params["threads"] == 2


def test_what_is_wrong_at_one_workload_serves_none(place: Place):
    """Four threads over blocks of 32 are the best at 2x512, where they are right."""

    def outcome(one: Candidate) -> str:
        return "wrong" if (one.schedule.launch["threads"], one.layout["block"], one.workload.batch) == (4, 32, 1) else "ok"

    entry = place.tune(FakeRunner(outcome=outcome)).entry
    assert (entry.layout["block"], entry.tuned[1][1].params["threads"]) != (32, 4)


def test_an_interrupt_registers_only_what_this_build_has_verified(place: Place):
    """What stays is what an earlier build registered, though records of it are there."""
    first = place.tune(trials=6)
    for count in (0, 1):
        runner = stopping(count)
        with pytest.raises(KeyboardInterrupt):
            place.tune(runner)
        assert runner.closed
    assert [found.entry for found in place.store.all()] == [first.entry]


def test_records_count_for_the_compiler_and_the_sources_that_they_are_of(place: Place, monkeypatch: pytest.MonkeyPatch):
    assert (place.tune().known, place.tune().known) == (0, EVERY)
    with monkeypatch.context() as patch:
        patch.setenv("CPATH", "/elsewhere")
        assert place.tune().known == 0
    monkeypatch.setattr(tune_candidates, "_lowering", lambda: "other")
    assert place.tune().known == 0


def test_failures_of_every_kind_end_no_build_are_named_and_not_tried_again(place: Place):
    kinds = {1: "crash", 4: "timeout", 8: "compile_error"}
    runner = FakeRunner(outcome=lambda candidate: kinds.get(candidate.schedule.launch.integer("threads"), "ok"))
    result = place.tune(runner, backends=[FakeBackend(broken=8)])
    assert all(launch.params["threads"] == 2 for launch in result.entry.launches)
    named = result.to_json()["failures"]
    assert {(item["kind"], item["schedule"]["launch"]["threads"]) for item in named} == {(kind, threads) for threads, kind in kinds.items()}
    assert any("#error no" in item["detail"] for item in named)
    again = FakeRunner()
    assert {record.kind for record in place.tune(again, backends=[FakeBackend(broken=8)]).failures} == set(kinds.values())
    assert searched(again) == []


def test_no_right_schedule_is_an_error_that_says_what_failed(place: Place):
    with pytest.raises(MeasureError, match=r"17 wrong.*made to fail"):
        place.tune(FakeRunner(outcome=lambda _: "wrong"))
    assert place.store.all() == []


def test_each_workload_takes_its_back_end_over_one_layout(place: Place):
    def cost(candidate: Candidate) -> float:
        home = candidate.backend == ("cpu" if candidate.workload.batch == 1 else "tilelang")
        return fake_cost(candidate) * (1.0 if home else 1.5)

    result = place.tune(FakeRunner(cost=cost), backends=[FakeBackend(), FakeBackend("tilelang")])
    assert {work.key: launch.backend for work, launch in result.entry.tuned} == {"1x128": "cpu", "2x512": "tilelang"}
    assert result.why == "fastest layout; cpu at 1x128, tilelang at 2x512"


def test_a_back_end_that_refuses_is_named_and_the_others_go_on(place: Place):
    refusing = FakeBackend("tilelang", reason="it is Tuesday")
    assert place.tune(backends=[refusing, FakeBackend()]).refusals == ("the tilelang back end does not support this spec: it is Tuesday",)
    with pytest.raises(UnsupportedError, match="it is Tuesday"):
        place.tune(backends=[refusing])


def test_the_present_winner_stays_unless_clearly_beaten(place: Place):
    def runner(name: str, costs: dict[int, float]) -> FakeRunner:
        return FakeRunner(cost=lambda candidate: costs[candidate.schedule.layout.integer("block")], policy={"runner": name})

    first = place.tune()
    assert place.tune(runner("same", {32: 100.0, 64: 99.0, 128: 99.0})).entry.layout == first.entry.layout
    fresh = place.tune(runner("fresh", {32: 99.5, 64: 99.5, 128: 99.5}), fresh=True)
    assert fresh.entry.layout["block"] == FakeBackend().default(tiny_spec(), "cpu").layout["block"]
    place.store.put(first.entry)
    assert place.tune(runner("faster", {32: 100.0, 64: 50.0, 128: 70.0})).entry.layout["block"] == 64
    assert len(place.store.all()) == 1


def test_a_short_budget_has_fewer_finalists_and_says_what_a_build_needs(place: Place, monkeypatch: pytest.MonkeyPatch):
    class Slow(FakeRunner):
        def measure(self, candidate: Candidate, artifact: Artifact, device: int, seconds: float = math.inf) -> Measurement | None:
            sleep(0.05)
            return super().measure(candidate, artifact, device)

    whole = FakeRunner()
    assert not place.tune(whole).notes
    monkeypatch.setattr("kvgen.tune.tuner.ROUND_SECONDS", 1.0)
    short = FakeRunner()
    place.tune(short, budget=Budget(seconds=24.0))
    assert 3 * len(short.finals[0]) <= 24 < 3 * len(whole.finals[0])
    (note,) = place.tune(Slow(policy={"runner": "slow"}), budget=Budget(seconds=0.01)).notes
    assert re.fullmatch(r"it took \d+ s of 0 s: the defaults and the final alone need about \d+ s here", note)


def test_a_measurement_that_outlasts_the_search_is_ended_and_has_no_record(place: Place):
    class Long(FakeRunner):
        def measure(self, candidate: Candidate, artifact: Artifact, device: int, seconds: float = math.inf) -> Measurement | None:
            if seconds == math.inf:  # a default
                return super().measure(candidate, artifact, device)
            sleep(seconds)
            return None

    result = place.tune(Long(exclusive=False), budget=Budget(seconds=1.0))
    assert (result.measured, len(result.records)) == (2, 2)
    assert {record.candidate.schedule.id for record in result.records} == {FakeBackend().default(tiny_spec(), "cpu").id}
    assert place.tune().known == 2


def test_the_search_leaves_the_final_the_time_to_verify_what_earlier_builds_measured(place: Place):
    class Taking(FakeRunner):
        def _record(self, candidate: Candidate, artifact: Artifact) -> Measurement:
            return replace(super()._record(candidate, artifact), seconds=1000.0)

    place.tune(Taking(), trials=6)
    again = Taking()
    place.tune(again, budget=Budget(seconds=600.0))
    assert not searched(again)


def test_an_entry_whose_times_were_disturbed_says_so_and_is_not_called_tuned(place: Place):
    class Disturbed(FakeRunner):
        def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Measurement]:
            found = super().final(entrants, seconds)
            return [replace(one, samples=(one.cost, 1.2 * one.cost, one.cost)) if one.key[1] == "2x512" else one for one in found]

    assert (place.tune().entry.made, place.tune().entry.provenance["tuned"]) == ("tuned", True)
    entry = place.tune(Disturbed(), fresh=True).entry
    assert (entry.made, entry.provenance["tuned"]) == ("measured under disturbances", False)
    assert entry.disturbed == {"2x512": pytest.approx(0.2)}


def test_defaults_that_serve_other_calls_are_registered_if_they_are_right(place: Place):
    runner = FakeRunner(outcome=lambda one: "wrong" if one.schedule.launch["threads"] == 8 else "ok")
    result = place.tune(runner, trials=1, backends=[SeveralDefaults()])
    assert [launch.params["threads"] for launch in result.entry.launches if not launch.workloads] == [1]
    assert any("which serves other calls, is left out: wrong" in note for note in result.notes)


def test_defaults_that_may_serve_other_calls_are_compiled_while_the_finalists_are_timed(place: Place, compiled: list[str]):
    class Watching(FakeRunner):
        def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Measurement]:
            for _ in range(1000):
                if len(set(compiled)) < 3:
                    sleep(0.01)
            self.ready = len(set(compiled))
            return super().final(entrants, seconds)

    runner = Watching()
    place.tune(runner, trials=1, backends=[SeveralDefaults()])
    assert runner.ready == 3


def test_progress_tells_best_failures_and_the_end(place: Place):
    seen: list[Progress] = []
    place.tune(FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok"), progress=seen.append)
    last = seen[-1]
    assert (last.phase, last.done, last.planned, last.failures) == ("done", EVERY, EVERY, {"crash": 2})
    assert (last.best["1x128"].us, last.best["1x128"].default_us) == (142.0, 184.0)
    assert {"searching", "finalists"} <= {progress.phase for progress in seen}


def test_what_cannot_be_written_is_said_before_anything_is_compiled(tmp_path: Path, compiled: list[str]):
    (tmp_path / "file").touch()
    good, bad = Place(tmp_path), Place(tmp_path / "file")
    for store, cache in ((bad.store, good.cache), (good.store, bad.cache)):
        with pytest.raises(HostError, match=r"^cannot write .*: Not a directory$"):
            tune(tiny_spec(), "cpu", backends=[FakeBackend()], store=store, cache=cache)
    assert compiled == []


def test_a_compiler_that_takes_too_long_holds_up_neither_search_nor_final(place: Place):
    done = Event()

    class Slow(FakeBackend):
        def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
            assert schedule.launch["threads"] != 4 or done.wait(60.0)
            return super().lower(spec, schedule, target)

    class Finishing(FakeRunner):
        def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Measurement]:
            done.set()
            return super().final(entrants, seconds)

    runner = Finishing(exclusive=False)
    result = place.tune(runner, budget=Budget(seconds=1.5), backends=[Slow()])
    assert not result.interrupted
    assert 4 not in {candidate.schedule.launch["threads"] for candidate in runner.finals[0]}
    assert all(timing.default_us and timing.read_us for timing in result.entry.timings)


def test_compilers_rest_while_a_cpu_measures(place: Place, monkeypatch: pytest.MonkeyPatch):
    class Watching(FakeRunner):
        def measure(self, candidate: Candidate, artifact: Artifact, device: int, seconds: float = math.inf) -> Measurement | None:
            busy.append(running)
            sleep(0.002)
            busy.append(running)
            return super().measure(candidate, artifact, device)

    def build(source: Source, cache: ArtifactCache) -> Artifact:
        nonlocal running
        running = True
        sleep(0.002)
        running = False
        return whole(source, cache)

    whole, running, busy = compiling.build, False, list[bool]()
    monkeypatch.setattr(compiling, "build", build)
    place.tune(Watching())
    assert not any(busy)


def test_a_compiler_that_is_killed_judges_no_schedule(place: Place, monkeypatch: pytest.MonkeyPatch):
    """It is told, and a later build tries the schedule."""
    artifact = CompileQueue.artifact

    def failing(queue: CompileQueue, schedule: Schedule) -> Artifact:
        if schedule.launch["threads"] >= 4:
            raise CompilerCrash("g++ was killed by SIGKILL")
        return artifact(queue, schedule)

    with monkeypatch.context() as patch:
        patch.setattr(CompileQueue, "artifact", failing)
        (note,) = place.tune().notes
    assert "could not be compiled here, and were not judged" in note
    result = place.tune()
    assert (result.failures, len(result.records)) == ([], EVERY)
