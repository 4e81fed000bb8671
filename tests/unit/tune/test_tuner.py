from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from time import sleep

import pytest

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash, MeasureError, UnsupportedError
from kvgen.lower.backend import Source
from kvgen.lower.constraints import Rule
from kvgen.lower.schedule import Schedule
from kvgen.lower.space import SearchSpace
from kvgen.registry import Store
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.tune import contenders
from kvgen.tune.budget import Budget
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.decide import Kind
from kvgen.tune.progress import Progress
from kvgen.tune.result import TuningResult
from kvgen.tune.search import Search
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, fake_cost, tiny_spec


class Place:
    """A cache and a registry of their own."""

    def __init__(self, root: Path) -> None:
        self.cache, self.store = ArtifactCache(root / "cache"), Store(root / "registry")

    def tune(self, runner: FakeRunner, trials: int | None = None, seed: int = 0, **more: object) -> TuningResult:
        more.setdefault("backends", [FakeBackend()])
        budget = more.pop("budget", Budget(trials=trials))
        return tune(tiny_spec(), "cpu", budget, seed=seed, cache=self.cache, store=self.store, runner=runner, **more)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def candidates(runner: FakeRunner) -> list[tuple[str, str]]:
    final = sum(map(len, runner.finals))
    return [candidate.key for candidate in runner.measured[: len(runner.measured) - final]]


def test_the_best_layout_and_launches_win_and_are_registered(place: Place):
    runner = FakeRunner()
    result = place.tune(runner)
    assert result.entry.layout["block"] == 32
    assert {launch.workload.key: launch.params["threads"] for launch in result.entry.launches} == {"1x128": 1, "2x512": 4}
    assert {t.workload.key: (t.us, t.default_us, t.read_us) for t in result.entry.timings} == {
        "1x128": (142.0, 184.0, 50.0),
        "2x512": (232.0, 284.0, 50.0),
    }
    (found,) = place.store.find(result.spec)
    assert found.entry == result.entry
    assert found.path == result.path
    assert result.entry.provenance["tuned"] is True
    assert result.entry.runner_up is not None
    assert result.entry.runner_up["layout"]["layout"]["block"] == 64
    assert result.entry.runner_up["launches"] == {}
    assert runner.closed


def test_every_feasible_point_is_measured_once_without_a_budget(place: Place):
    runner = FakeRunner()
    result = place.tune(runner)
    space = FakeBackend().space(result.spec, "cpu")
    feasible = sum(len(space.launches(layout, work)) for layout in space.layouts() for work in result.spec.workloads)
    assert len(candidates(runner)) == len(set(candidates(runner))) == result.measured == feasible


def test_hints_choose_what_is_searched_and_a_run_without_them_measures_the_rest_alone(place: Place):
    """A winner that hints leave out stays a finalist of later runs with them."""

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
    assert result.entry.layout["block"] == 32
    assert place.tune(FakeRunner(), backends=[Hinted()]).entry.layout["block"] == 32


def test_trials_bound_the_run_and_the_default_comes_first_and_is_a_finalist(place: Place):
    runner = FakeRunner()
    result = place.tune(runner, trials=5)
    default = FakeBackend().default(result.spec, "cpu")
    assert len(candidates(runner)) == 5
    assert [candidate.schedule for candidate in runner.measured[:2]] == [default, default]
    assert {candidate.workload.key for candidate in runner.finals[0] if candidate.schedule == default} == {"1x128", "2x512"}


@pytest.mark.parametrize("exclusive", [True, False])
def test_no_more_is_compiled_than_trials_allow_to_measure(place: Place, exclusive: bool):
    result = place.tune(FakeRunner(exclusive=exclusive), trials=3)
    compiled = list(place.cache.root.glob("modules/*/*"))
    assert len(compiled) == len({record.candidate.schedule.id for record in result.records}) == 2


def test_the_default_is_measured_at_every_workload_even_with_one_trial(place: Place):
    runner = FakeRunner()
    assert place.tune(runner, trials=1).entry.layout["block"] == 64
    assert len(candidates(runner)) == 2


def test_finished_points_are_never_measured_again_after_an_interrupt(place: Place):
    def stop_at(count: int) -> FakeRunner:
        def outcome(_: Candidate) -> str:
            if len(runner.measured) > count:
                raise KeyboardInterrupt
            return "ok"

        runner = FakeRunner(outcome=outcome)
        return runner

    first = stop_at(4)
    interrupted = place.tune(first)
    assert interrupted.interrupted
    assert place.store.find(interrupted.spec)[0].entry == interrupted.entry
    second = FakeRunner()
    result = place.tune(second)
    assert result.known == 4
    assert not set(candidates(second)) & set(candidates(first)[:4])
    assert result.entry.layout["block"] == 32
    third = FakeRunner()
    place.tune(third)
    assert candidates(third) == []


def threads(wanted: int, block: int) -> Callable[[Candidate], bool]:
    return lambda candidate: (candidate.schedule.launch["threads"], candidate.layout["block"]) == (wanted, block)


@pytest.mark.parametrize("kind", ["wrong", "crash"])
def test_a_module_that_an_earlier_build_measured_is_verified_before_it_is_registered(place: Place, kind: str):
    """The winner of the first build fails in the second one, which has its record; the third one does not believe in it either."""
    assert place.tune(FakeRunner()).entry.launches[0].params["threads"] == 1
    fails = threads(1, 32)
    second = FakeRunner(outcome=lambda candidate: kind if fails(candidate) else "ok")
    result = place.tune(second)
    assert not any(fails(candidate) for final in second.finals for candidate in final)
    assert result.entry.launches[0].params["threads"] == 2
    assert (kind, "1x128") in {(record.kind, record.candidate.workload.key) for record in result.failures if fails(record.candidate)}
    assert place.tune(FakeRunner()).entry.launches[0].params["threads"] == 2


def test_what_is_wrong_at_one_workload_serves_none(place: Place):
    """Four threads over blocks of 32 are the best at 2x512, where they are right."""
    best = threads(4, 32)
    entry = place.tune(FakeRunner(outcome=lambda one: "wrong" if best(one) and one.workload.batch == 1 else "ok")).entry
    assert (entry.layout["block"], entry.launches[1].params["threads"]) != (32, 4)
    assert place.tune(FakeRunner(policy={"runner": "right"}), fresh=True).entry.launches[1].params["threads"] == 4


def test_an_interrupt_registers_only_what_this_build_has_verified(place: Place):
    """What stays is what an earlier build registered, though records of it are there."""
    first = place.tune(FakeRunner(), trials=6)

    def stop(_: Candidate) -> str:
        if len(runner.measured) > 1:
            raise KeyboardInterrupt
        return "ok"

    runner = FakeRunner(outcome=stop)
    with pytest.raises(KeyboardInterrupt):
        place.tune(runner)
    assert [found.entry for found in place.store.all()] == [first.entry]


def test_accuracies_are_of_the_build_that_registers_them(place: Place):
    class Exact(FakeRunner):
        def _judged(self, record: Record) -> Record:
            return super()._judged(dataclasses.replace(record, accuracy={"relative_l2": 3e-6}))

    place.tune(FakeRunner())
    again = Exact()
    entry = place.tune(again).entry
    assert candidates(again) == []
    assert set(map(str, entry.accuracy.values())) == {"{'relative_l2': 3e-06}"}


def test_records_count_for_the_compiler_and_the_sources_that_they_are_of(place: Place, monkeypatch: pytest.MonkeyPatch):
    assert place.tune(FakeRunner()).known == 0
    assert place.tune(FakeRunner()).known > 0
    monkeypatch.setenv("CPATH", "/elsewhere")
    assert place.tune(FakeRunner()).known == 0
    monkeypatch.undo()
    monkeypatch.setattr(contenders, "_lowering", lambda: "other")
    assert place.tune(FakeRunner()).known == 0


def test_an_interrupt_before_anything_is_right_is_an_interrupt(place: Place):
    def outcome(_: Candidate) -> str:
        raise KeyboardInterrupt

    runner = FakeRunner(outcome=outcome)
    with pytest.raises(KeyboardInterrupt):
        place.tune(runner, trials=3)
    assert runner.closed
    assert place.store.all() == []


def test_an_error_of_the_callback_is_the_callers_own(place: Place):
    def progress(_: Progress) -> None:
        raise OSError(28, "No space left on device", "log.csv")

    with pytest.raises(OSError, match=r"log\.csv"):
        place.tune(FakeRunner(), trials=3, progress=progress)


def test_the_order_follows_the_seed(tmp_path: Path):
    runs = []
    for index, seed in enumerate((3, 3, 4)):
        runner = FakeRunner()
        Place(tmp_path / str(index)).tune(runner, trials=9, seed=seed)
        runs.append(candidates(runner))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_failures_of_every_kind_end_no_run_and_are_named(place: Place):
    kinds = {1: "crash", 4: "timeout", 8: "wrong"}

    def outcome(candidate: Candidate) -> str:
        return kinds.get(candidate.schedule.launch.integer("threads"), "ok")

    result = place.tune(FakeRunner(outcome=outcome))
    assert {record.kind for record in result.failures} == set(kinds.values())
    assert all(launch.params["threads"] == 2 for launch in result.entry.launches)
    named = result.to_json()["failures"]
    assert {(item["kind"], item["schedule"]["launch"]["threads"]) for item in named} == {(kind, threads) for threads, kind in kinds.items()}


def test_what_does_not_compile_is_a_failure_and_nothing_more(place: Place):
    runner = FakeRunner()
    result = place.tune(runner, backends=[FakeBackend(broken=8)])
    assert {record.kind for record in result.failures} == {"compile_error"}
    assert "#error no" in result.failures[0].detail
    assert all(candidate.schedule.launch["threads"] != 8 for candidate in runner.measured)


def test_failed_points_are_not_tried_again(place: Place):
    place.tune(FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok"))
    again = FakeRunner()
    result = place.tune(again)
    assert candidates(again) == []
    assert {record.kind for record in result.failures} == {"crash"}


def test_no_right_schedule_is_an_error_that_says_what_failed(place: Place):
    with pytest.raises(MeasureError, match=r"17 wrong.*made to fail"):
        place.tune(FakeRunner(outcome=lambda _: "wrong"))
    assert place.store.all() == []


def test_back_ends_compete_and_the_other_ones_best_is_kept(place: Place):
    def cost(candidate: Candidate) -> float:
        return 1000.0 if candidate.schedule.backend == "cpu" else 10.0 + candidate.schedule.layout.integer("block")

    result = place.tune(FakeRunner(cost=cost), backends=[FakeBackend(), FakeBackend("tilelang")])
    assert result.entry.backend == "tilelang"
    assert result.entry.runner_up is not None
    assert {key: one["backend"] for key, one in result.entry.runner_up["launches"].items()} == {"1x128": "cpu", "2x512": "cpu"}


def test_each_workload_takes_its_back_end_over_one_layout(place: Place):
    def cost(candidate: Candidate) -> float:
        home = candidate.backend == ("cpu" if candidate.workload.batch == 1 else "tilelang")
        return fake_cost(candidate) * (1.0 if home else 1.5)

    result = place.tune(FakeRunner(cost=cost), backends=[FakeBackend(), FakeBackend("tilelang")])
    assert {launch.workload.key: launch.backend for launch in result.entry.launches} == {"1x128": "cpu", "2x512": "tilelang"}
    assert result.entry.backend == "cpu+tilelang"
    assert result.entry.rival(result.spec.workloads[0]) == ("tilelang", 1.5)
    assert result.why == "fastest layout; cpu at 1x128, tilelang at 2x512"
    again = place.tune(FakeRunner(cost=cost, policy={"runner": "other"}), backends=[FakeBackend(), FakeBackend("tilelang")])
    assert [launch.backend for launch in again.entry.launches] == ["cpu", "tilelang"]
    alone = place.tune(FakeRunner(cost=cost, policy={"runner": "third"}))
    assert alone.entry.backend == "cpu"


def test_a_back_end_that_refuses_is_named_and_the_others_go_on(place: Place):
    result = place.tune(FakeRunner(), backends=[FakeBackend("tilelang", reason="it is Tuesday"), FakeBackend()])
    assert result.refusals == ("the tilelang back end does not support this spec: it is Tuesday",)
    with pytest.raises(UnsupportedError, match="it is Tuesday"):
        place.tune(FakeRunner(), backends=[FakeBackend("tilelang", reason="it is Tuesday")])


def test_the_present_winner_stays_unless_clearly_beaten(place: Place):
    first = place.tune(FakeRunner())
    kept = place.tune(
        FakeRunner(cost=lambda candidate: 100.0 if candidate.schedule.layout["block"] == 32 else 99.0, policy={"runner": "other"})
    )
    assert kept.entry.layout == first.entry.layout
    anew = place.tune(FakeRunner(cost=lambda candidate: 99.5, policy={"runner": "fresh"}), fresh=True)
    assert anew.entry.layout["block"] == FakeBackend().default(tiny_spec(), "cpu").layout["block"]
    place.store.put(kept.entry)
    beaten = place.tune(
        FakeRunner(
            cost=lambda candidate: {32: 100.0, 64: 50.0, 128: 70.0}[candidate.schedule.layout.integer("block")], policy={"runner": "third"}
        )
    )
    assert beaten.entry.layout["block"] == 64
    assert len(place.store.all()) == 1


def test_a_models_accuracy_over_the_format_outlives_a_build(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    first = place.tune(FakeRunner())
    measured = {"lengths": {"2048": {"perplexity": 5.5, "increase": 0.01}}}
    place.store.replace(first.path, dataclasses.replace(first.entry, quality={**(first.entry.quality or {}), "model": measured}))
    again = place.tune(FakeRunner(policy={"runner": "other"}))
    assert again.entry.quality == {"model": measured, "outputs": (first.entry.quality or {})["outputs"]}
    (found,) = place.store.all()
    assert found.entry == again.entry
    fresh = Store(tmp_path / "fresh")  # its first entry says nothing of a model, and a registry that ships does
    monkeypatch.setattr("kvgen.tune.tuner.stores", lambda: [place.store])
    for name in ("one", "two"):
        own = {"backends": [FakeBackend()], "cache": place.cache, "store": fresh}
        built = tune(tiny_spec(), "cpu", Budget(), runner=FakeRunner(policy={"runner": name}), **own)  # type: ignore[arg-type]
        assert (built.entry.quality or {})["model"] == measured
        fresh.replace(built.path, dataclasses.replace(built.entry, quality=first.entry.quality))


def test_progress_tells_best_failures_and_the_end(place: Place):
    seen: list[Progress] = []
    place.tune(FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok"), progress=seen.append)
    last = seen[-1]
    assert last.phase == "done"
    assert last.best["1x128"].us == 142.0
    assert last.best["1x128"].default_us == 184.0
    assert last.failures == {"crash": 2}
    assert last.done == last.planned == 17
    assert {"compiling", "measuring", "finalists"} <= {progress.phase for progress in seen}


def test_several_devices_measure_every_point_once(place: Place):
    runner = FakeRunner(devices=3, exclusive=False)
    result = place.tune(runner)
    assert len(candidates(runner)) == len(set(candidates(runner))) == 17
    assert result.entry.layout["block"] == 32


def test_nothing_is_left_behind_but_journal_modules_and_entry(place: Place):
    place.tune(FakeRunner(), trials=4)
    names = {path.relative_to(place.cache.root).parts[0] for path in place.cache.root.rglob("*") if path.is_file()}
    assert names == {"modules", "sources", "studies", "tuning"}
    assert {path.suffix for path in (place.cache.root / "studies").iterdir()} <= {".journal", ".lock"}
    assert {path.suffix for path in (place.cache.root / "tuning").iterdir()} == {".lock"}


def test_hosts_share_studies_in_a_database(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    one, other = FakeRunner(), FakeRunner()
    first = Place(tmp_path / "one").tune(one, trials=6, storage=url)
    second = Place(tmp_path / "other").tune(other, storage=url)
    assert (first.measured, second.known) == (6, 6)
    assert not set(candidates(one)) & set(candidates(other))
    assert len(candidates(one)) + len(candidates(other)) == 17
    assert second.entry.layout["block"] == 32


def test_a_final_that_fails_leaves_the_decision_to_the_search(place: Place):
    class Failing(FakeRunner):
        def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Record]:
            return [Record(candidate, "timeout", detail="made to fail") for candidate, _ in entrants]

    result = place.tune(Failing())
    assert result.entry.layout["block"] == 32
    assert {record.kind for record in result.failures} == {"timeout"}


@pytest.mark.parametrize("noisy", [2, 99], ids=["told apart by more", "never told apart"])
def test_whom_the_final_leaves_unclear_takes_more_turns(place: Place, noisy: int):
    """With so few samples as `noisy` the default, which is slower, cannot be told from the best."""

    class Runner(FakeRunner):
        def compare(self, new: Record, old: Record) -> Kind:
            return "unclear" if min(len(new.samples), len(old.samples)) <= noisy else super().compare(new, old)

    runner = Runner(cost=lambda candidate: 100.0 - 5 * candidate.schedule.launch.integer("threads") * (candidate.workload.batch == 2))
    result = place.tune(runner)
    first, again = runner.finals
    default = FakeBackend().default(result.spec, "cpu")
    assert set(again) == {candidate for candidate in first if candidate.workload.key == "2x512"}
    (launch,) = (launch for launch in result.entry.launches if launch.workload.key == "2x512")
    assert (launch.params == default.launch) == (noisy == 99)
    assert {len(record.samples) for record in result.finalists if record.candidate in again} == {4}


@pytest.mark.parametrize("cut", ["timeout", "interrupt"])
def test_more_turns_that_fail_or_are_cut_short(place: Place, cut: str):
    """Who fails in them is out; an interrupt leaves what the whole final found."""

    class Runner(FakeRunner):
        def compare(self, new: Record, old: Record) -> Kind:
            return "unclear" if len(self.finals) == 1 else super().compare(new, old)

        def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Record]:
            records = super().final(entrants, seconds)
            if len(self.finals) == 1:
                return records
            if cut == "interrupt":
                raise KeyboardInterrupt
            return [Record(r.candidate, "timeout") if r.candidate.schedule.launch["threads"] == 4 else r for r in records]

    runner = Runner()
    result = place.tune(runner)
    assert result.interrupted == (cut == "interrupt")
    (launch,) = (launch for launch in result.entry.launches if launch.workload.key == "2x512")
    assert (launch.params["threads"] == 4) == (cut == "interrupt")


def test_a_finalist_that_cannot_be_compiled_here_is_left_out_and_named(place: Place, monkeypatch: pytest.MonkeyPatch):
    """Another run measured it, and its module is no longer in the cache."""
    place.tune(FakeRunner())
    artifact = CompileQueue.artifact

    def crashing(queue: CompileQueue, schedule: Schedule) -> Artifact:
        if schedule.launch["threads"] == 4:
            raise CompilerCrash("g++ was killed by SIGKILL")
        return artifact(queue, schedule)

    monkeypatch.setattr(CompileQueue, "artifact", crashing)
    runner = FakeRunner()
    result = place.tune(runner, fresh=True)
    assert 4 not in {candidate.schedule.launch["threads"] for candidate in runner.finals[0]}
    assert {launch.params["threads"] for launch in result.entry.launches}.isdisjoint({4})
    assert all("was left out of the final: g++ was killed by SIGKILL" in note for note in result.notes)
    assert result.notes


@pytest.mark.parametrize("least", [1, 2])
def test_schedules_whose_compiler_was_killed_are_told(place: Place, monkeypatch: pytest.MonkeyPatch, least: int):
    artifact = CompileQueue.artifact

    def crashing(queue: CompileQueue, schedule: Schedule) -> Artifact:
        if schedule.launch["threads"] >= least:
            raise CompilerCrash("g++ was killed by SIGKILL")
        return artifact(queue, schedule)

    monkeypatch.setattr(CompileQueue, "artifact", crashing)
    if least == 1:
        with pytest.raises(MeasureError, match=r"nothing was measured.*17 schedules could not be compiled here.*killed by SIGKILL"):
            place.tune(FakeRunner())
    else:
        (note,) = place.tune(FakeRunner()).notes
        assert "could not be compiled here, and were not judged" in note


def test_a_bound_of_time_searches_though_trials_cover_the_space(place: Place, monkeypatch: pytest.MonkeyPatch):
    given: list[bool] = []
    monkeypatch.setattr(contenders, "Search", lambda *args: given.append(args[-1]) or Search(*args))
    for budget in (Budget(), Budget(trials=1000), Budget(trials=3), Budget(seconds=60.0), Budget(trials=1000, seconds=60.0)):
        place.tune(FakeRunner(), budget=budget)
    assert given == [True, True, True, False, False]


def test_a_compiler_that_takes_too_long_holds_up_neither_search_nor_final(place: Place):
    done, waited = Event(), []

    class Slow(FakeBackend):
        def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
            if schedule.launch["threads"] == 4:
                waited.append(done.wait(60.0))
            return super().lower(spec, schedule, target)

    class Runner(FakeRunner):
        def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Record]:
            records = super().final(entrants, seconds)
            done.set()
            return records

    runner = Runner(exclusive=False)
    result = place.tune(runner, budget=Budget(seconds=1.5), backends=[Slow()])
    assert not result.interrupted
    assert all(waited)
    assert 4 not in {candidate.schedule.launch["threads"] for candidate in runner.finals[0]}
    assert all(timing.default_us and timing.read_us for timing in result.entry.timings)


def test_the_default_is_measured_though_the_budget_ends_while_it_is_compiled(place: Place):
    class Slow(FakeBackend):
        def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
            sleep(1.5)
            return super().lower(spec, schedule, target)

    runner = FakeRunner(exclusive=False)
    result = place.tune(runner, budget=Budget(seconds=1.0), backends=[Slow()])
    assert not result.interrupted
    assert {candidate.workload.key for candidate in runner.measured} == {workload.key for workload in result.entry.spec.workloads}


def test_the_shortest_final_is_planned_into_the_budget(place: Place):
    class Runner(FakeRunner):
        asked = 0

        def shortest_final(self, entrants: int) -> float:
            self.asked = entrants
            return 1e9

    runner = Runner()
    place.tune(runner, budget=Budget(seconds=3600.0))
    assert runner.asked >= len(runner.finals[0])


def test_what_measuring_needs_is_compiled_beside_the_first_points(place: Place):
    class Runner(FakeRunner):
        prepared = False

        def ready(self) -> None:
            self.prepared = True
            raise CompileError("no reader", "")

    runner = Runner()
    assert place.tune(runner, trials=2).entry.timings
    assert runner.prepared
