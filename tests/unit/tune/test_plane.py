"""The grid stage of a build: what is measured where, and the table that comes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.errors import MeasureError
from kvgen.lower.backends import backends_for
from kvgen.lower.expression import Expression
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Constraint, SearchSpace
from kvgen.registry import Store
from kvgen.spec import load_spec
from kvgen.spec.distance import mean_length
from kvgen.spec.grid import CPU, GPU, LONGER, SPREAD, Grid, powers, reached
from kvgen.spec.traffic import parse
from kvgen.toolchain import ArtifactCache
from kvgen.tune import plane, tuner
from kvgen.tune.budget import Budget, Clock
from kvgen.tune.candidate import Candidate
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.plane import in_turns
from kvgen.tune.result import TuningResult
from kvgen.tune.tuner import ENOUGH, tune
from tests.support.tuning import FakeBackend, FakeRunner, PlainBackend, tiny_spec

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = Grid(powers(1, 16), powers(128, 8192), 1 << 14, sustained=((4, 1024),), screened=((1, 1024), (16, 128), (4, 4096)))
WORKLOADS = [{"batch": 1, "kv_len": 1024}]
WIDE = [*WORKLOADS, {"batch": 4, "kv_len": 4096}]


def cost(candidate: Candidate) -> float:
    """One thread is best for few tokens, eight for many; layout 64 is the default's and the best."""
    work, threads = candidate.workload, candidate.schedule.launch.integer("threads")
    tokens = work.batch * mean_length(work)
    best = min(8.0, max(1.0, tokens / 1024))
    unequal = 3.0 if work.shortest < work.kv_len and threads == 4 else 0.0
    return 100.0 * (1 + abs(math.log2(threads / best))) + unequal + candidate.schedule.layout.integer("block") / 64


def run(tmp_path: Path, runner: FakeRunner, workloads: list[dict[str, object]] = WORKLOADS, **more: object) -> TuningResult:
    more = {"grid": SMALL, "backends": [FakeBackend()], **more}
    spec = tiny_spec(workloads=workloads)
    runner.policy = {"of": str(tmp_path)}  # the tests share what they compile, and no measurements
    place = {"cache": ArtifactCache(tmp_path.parent / "plane"), "store": Store(tmp_path / "registry")}
    return tune(spec, "cpu", more.pop("budget", None), runner=runner, **place, **more)  # type: ignore[arg-type]


# --- the grid ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [GPU, CPU, SMALL])
def test_cells_are_distinct_within_the_plane_and_read_back(grid):
    cells = grid.cells()
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(parse(cell.key) == cell for cell in cells)
    assert all(cell.batch * mean_length(cell) <= grid.most_tokens for cell in cells)
    assert all(cell.batch > 1 and cell.kv_len == SPREAD * cell.shortest for cell in cells if cell.shortest < cell.kv_len)


def test_the_gpu_grid_is_the_plane_that_docs_describe():
    cells = [cell for cell in GPU.cells() if cell.shortest == cell.kv_len]
    assert {cell.batch for cell in cells} == {*powers(1, 1024), 3, 6, 12, 24, 48}
    assert (min(cell.kv_len for cell in cells), max(cell.kv_len for cell in cells)) == (512, 1 << 20)
    assert max(cell.batch * cell.kv_len for cell in cells) == 1 << 22
    assert sum(cell.load == "sustained" for cell in cells) == 6


def test_a_cut_off_leaves_a_coarse_grid_with_both_kinds_of_lengths_and_loads():
    cells = GPU.cells()
    loads = [cell.load for cell in cells]
    first = cells[: loads.index("sustained")]
    uneven = [cell for cell in first if math.log2(cell.batch) % 1]
    coarse = first[: -len(uneven)]
    assert {(cell.batch, cell.kv_len) for cell in uneven} == {*GPU.uneven}
    assert len(coarse) > 30
    for cell in coarse:
        length = cell.kv_len if cell.shortest == cell.kv_len else cell.kv_len // LONGER
        assert math.log2(cell.batch) % 2 == 0
        assert math.log2(length / 512) % 2 == 0
    assert any(cell.shortest < cell.kv_len for cell in coarse)
    assert len(coarse) < len(cells) / 2


def test_more_query_tokens_leave_out_sequences_that_are_shorter():
    assert all(cell.shortest >= 600 and cell.q_len == 600 for cell in GPU.cells(600))
    assert all(cell.q_len == 4 for cell in GPU.anchors(4))


# --- launches that the search did not try ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["serving_kv8", "serving_kv4", "serving_kv2", "serving_kv4_paged", "llama31_8b_k8v4"])
def test_launches_for_short_heads_are_screened_before_the_time_for_compiling_ends(name):
    """Four CTAs per SM (decision 0029) are tried at many short sequences alone, and CUDA is not tried to the end before TileLang."""
    spec = load_spec(EXAMPLES / f"{name}.yaml")
    backends = {backend.name: backend for backend in backends_for("sm90")}
    spaces = {name: backend.space(spec, "sm90") for name, backend in backends.items()}
    found = in_turns(spaces, backends["cuda"].default(spec, "sm90").layout, GPU.anchors())
    assert len(set(found)) == len(found)
    four = [place for place, schedule in enumerate(found) if schedule.launch.get("ctas_per_sm") == 4]
    assert four
    assert max(four) < 50
    assert {schedule.backend for schedule in found[:2]} == {"cuda", "tilelang"}


def test_the_list_goes_round_workloads_and_back_ends_and_names_each_launch_once():
    spec = tiny_spec()
    spaces = {name: FakeBackend(name).space(spec, "cpu") for name in ("cpu", "tilelang")}
    found = in_turns(spaces, FakeBackend().default(spec, "cpu").layout, [parse("1x64"), parse("1x512")])
    assert [(schedule.backend, schedule.launch["threads"]) for schedule in found] == [
        (name, threads) for threads in (1, 2, 4, 8) for name in ("cpu", "tilelang")
    ]


def test_where_few_launches_can_be_compiled_each_workload_has_its_first(tmp_path, monkeypatch):
    """Eight threads are a launch for batch 16 alone, and the time is enough for two compilations."""

    class Backend(FakeBackend):
        def space(self, spec, target):
            space = super().space(spec, target)
            constraint = Constraint(Expression("(threads == 8) == (batch == 16)"), "{threads} threads at batch {batch}")
            return SearchSpace(space.backend, space.parameters, [*space.constraints, constraint], {}, spec.workloads)

    monkeypatch.setattr(CompileQueue, "capacity", lambda self, seconds: 2)
    runner = FakeRunner(cost=cost)
    entry = run(tmp_path, runner, budget=Budget(trials=1, seconds=3600.0), plane=True, backends=[Backend()]).entry
    assert 8 in {entry.every_launch[cell.launch].params["threads"] for cell in entry.dispatch.cells if cell.workload.startswith("16x")}


class EightAtTwo(FakeBackend):
    """Eight threads are the default for batch 2, at which nothing is screened."""

    def default(self, spec, target, work=None):
        plain = super().default(spec, target)
        return plain if work is None or work.batch != 2 else Schedule(self.name, plain.layout, Params(threads=8))


def threads_at_batch_two(result: TuningResult) -> set[object]:
    """Of the launches that serve two sequences."""
    entry = result.entry
    return {entry.every_launch[cell.launch].params["threads"] for cell in entry.dispatch.cells if cell.workload.startswith("2x")}


def test_the_defaults_of_the_grid_come_before_other_launches(tmp_path, monkeypatch):
    """The time is enough for one compilation."""
    monkeypatch.setattr(CompileQueue, "capacity", lambda self, seconds: 1)
    budget = Budget(trials=1, seconds=3600.0)
    assert 8 in threads_at_batch_two(run(tmp_path, FakeRunner(cost=cost), budget=budget, plane=True, backends=[EightAtTwo()]))


def test_the_defaults_are_measured_over_the_grid_before_the_second_fastest(tmp_path, monkeypatch):
    """The only screened workload wants one thread, then two, four, eight, and three of them go on."""
    monkeypatch.setattr(plane, "FINALISTS", 3)
    grid = replace(SMALL, screened=((1, 1024),))
    assert 8 in threads_at_batch_two(run(tmp_path, FakeRunner(cost=cost), grid=grid, backends=[EightAtTwo()]))


# --- the stage ---------------------------------------------------------------------------------------------------------


def test_the_table_serves_every_measured_workload_with_a_fast_launch(tmp_path):
    runner = FakeRunner(cost=cost)
    entry = run(tmp_path, runner).entry
    table = entry.dispatch
    assert table is not None
    assert {cell.workload for cell in table.cells} == {cell.key for cell in SMALL.cells()}
    assert table.worst_regret == max(table.regret(cell) for cell in table.cells) <= 1.04
    threads = [launch.params["threads"] for launch in entry.every_launch]
    assert threads[table.default] == FakeBackend().default(entry.spec, "cpu").launch["threads"]
    served = {cell.workload: threads[cell.launch] for cell in table.cells}
    assert (served["1x512"], served["16x1024"]) == (1, 8)
    assert len(table.members) == len(set(table.members)) <= 6
    for cell in table.cells:
        assert cell.read_us == 50.0
        assert table.time(cell, cell.launch) <= table.time(cell, table.default)
        assert cell.best_us <= table.time(cell, cell.launch)


def test_the_written_entry_looks_up_what_was_measured(tmp_path):
    result = run(tmp_path, FakeRunner(cost=cost))
    (found,) = Store(tmp_path / "registry").find(result.spec)
    assert found.entry == result.entry
    look_up = found.entry.look_up()
    for cell in found.entry.dispatch.cells:
        work = cell.work
        if work.load == "rested":
            tokens = round(work.batch * mean_length(work))
            assert look_up.launch(work.batch, work.kv_len, 1, tokens) == cell.launch, cell.workload
    assert look_up.launch(512, 8192) == found.entry.dispatch.default


def test_screening_comes_first_then_the_workloads_then_the_grid_in_its_order(tmp_path):
    runner = FakeRunner(cost=cost)
    run(tmp_path, runner)
    anchors, rest = [cell.key for cell in SMALL.anchors()], [cell.key for cell in SMALL.cells() if cell.key != "1x1024"]
    assert runner.cells == [*anchors, "1x1024", *rest]


def test_winners_within_two_per_cent_of_each_other_share_a_launch(tmp_path):
    """Two workloads whose fastest launches differ by one and a half per cent: one launch serves both, and the entry says what it took."""

    def close(candidate: Candidate) -> float:
        favourite = 1 if candidate.workload.batch == 1 else 4
        return 100.0 if candidate.schedule.launch["threads"] == favourite else 101.5 if candidate.schedule.launch["threads"] < 8 else 200.0

    works = [{"batch": 1, "kv_len": 1024}, {"batch": 2, "kv_len": 1024}]
    entry = run(tmp_path, FakeRunner(cost=close), works).entry
    assert [launch.params["threads"] for launch in entry.launches] == [2, 2]
    assert [timing.us for timing in entry.timings] == [101.5, 101.5]
    assert len(entry.every_launch) == 2


def test_a_winner_that_is_clearly_faster_stays_for_its_workload(tmp_path):
    entry = run(tmp_path, FakeRunner(cost=cost), [{"batch": 1, "kv_len": 1024}, {"batch": 2, "kv_len": 4096}]).entry
    assert [launch.params["threads"] for launch in entry.launches] == [1, 8]


def test_a_winner_gives_way_to_a_default_that_the_grid_finds_faster(tmp_path):
    """One thread wins at the workload, and serves shorter sequences; over the grid, the default's two are .1 % faster there."""

    class Runner(FakeRunner):
        def _record(self, candidate, artifact):
            return replace(super()._record(candidate, artifact), accuracy={"relative_l2": candidate.schedule.launch["threads"] * 1e-6})

        def measure_cell(self, entrants, rounds, device):
            records = super().measure_cell(entrants, rounds, device)
            if entrants[0][0].workload.key != "1x1024":
                return records
            return [replace(r, us=99.9) if r.candidate.schedule.launch["threads"] == 2 else r for r in records]

    def one_thread(candidate: Candidate) -> float:
        return 100.0 if candidate.schedule.launch["threads"] == 1 else 150.0

    entry = run(tmp_path, Runner(cost=one_thread)).entry
    table = entry.dispatch
    (tuned,) = (cell for cell in table.cells if cell.workload == "1x1024")
    assert tuned.launch == table.default == 0
    assert entry.launches[0].params["threads"] == 2
    assert entry.timings[0].us == 99.9
    assert entry.accuracy["1x1024"] == {"relative_l2": 2e-6}
    assert 1 in {launch.params["threads"] for launch in entry.every_launch}
    assert all(table.time(cell, cell.launch) <= table.time(cell, table.default) for cell in table.cells)


def test_members_are_verified_at_the_largest_workloads_that_they_serve(tmp_path):
    runner = FakeRunner(cost=cost)
    entry = run(tmp_path, runner).entry
    eight = {candidate.workload.key for candidate in runner.verified if candidate.schedule.launch["threads"] == 8}
    served = [cell.work for cell in entry.dispatch.cells if entry.every_launch[cell.launch].params["threads"] == 8]
    assert max(served, key=lambda work: (work.batch, work.kv_len)).key in eight
    assert max(served, key=lambda work: (work.kv_len, work.batch)).key in eight
    assert len(eight) <= 3


@pytest.mark.parametrize("kind", ["wrong", "crash"])
def test_a_launch_that_fails_over_the_grid_serves_nowhere(tmp_path, kind):
    """It is right at the workloads that the search measures."""

    def outcome(candidate: Candidate) -> str:
        return kind if candidate.schedule.launch["threads"] == 8 and candidate.workload.batch == 16 else "ok"

    result = run(tmp_path, FakeRunner(cost=cost, outcome=outcome))
    assert 8 not in {launch.params["threads"] for launch in result.entry.every_launch}
    assert kind in {record.kind for record in result.failures}
    (told,) = result.entry.provenance["grid"]["failed"]
    assert (told["backend"], told["kind"], told["detail"]) == ("cpu", kind, f"made to fail: {kind}")
    assert told["count"] == len([record for record in result.failures if record.kind == kind]) > 0
    assert " at 16x" in told["example"]


def test_a_launch_that_does_not_compile_is_told(tmp_path):
    """The search had no time for it, and the grid tries it."""
    budget = Budget(trials=1, seconds=3600.0)
    entry = run(tmp_path, FakeRunner(cost=cost), budget=budget, plane=True, backends=[FakeBackend(broken=8)]).entry
    (told,) = entry.provenance["grid"]["failed"]
    assert (told["kind"], told["count"]) == ("compile_error", 1)
    assert "threads=8" in told["example"]
    assert "#error no" in told["detail"]


def test_a_launch_that_only_verification_catches_serves_nowhere(tmp_path):
    class Runner(FakeRunner):
        def verify(self, candidate, artifact):
            record = super().verify(candidate, artifact)
            return record if candidate.schedule.launch["threads"] != 8 else type(record)(candidate, "wrong", detail="bits differ")

    result = run(tmp_path, Runner(cost=cost))
    assert 8 not in {launch.params["threads"] for launch in result.entry.every_launch}
    assert "bits differ" in {record.detail for record in result.failures}


def test_where_a_reference_does_not_fit_into_memory_smaller_workloads_are_verified(tmp_path):
    def tokens(candidate: Candidate) -> int:
        return candidate.workload.batch * candidate.workload.kv_len

    class Runner(FakeRunner):
        def verify(self, candidate, artifact):
            record = super().verify(candidate, artifact)
            return record if tokens(candidate) < 1 << 14 else type(record)(candidate, "oom", detail="it takes 33 GiB")

    runner = Runner(cost=cost)
    result = run(tmp_path, runner)
    assert 8 in {launch.params["threads"] for launch in result.entry.every_launch}
    eight = [tokens(candidate) for candidate in runner.verified if candidate.schedule.launch["threads"] == 8]
    assert min(eight) < 1 << 14 <= max(eight)
    large = [size for size in eight if size >= 1 << 14]
    assert large == sorted(set(large), reverse=True), "what is as large as one that did not fit is not tried"
    assert result.entry.provenance["grid"]["failed"] == []
    worst = result.entry.provenance["grid"]["worst_by_launches"]
    assert worst
    assert sorted(worst.values(), reverse=True) == list(worst.values())
    assert list(worst) == [str(size) for size in range(4, 10)]


def test_a_launch_that_serves_cells_of_too_large_references_alone_is_verified_at_a_screened_one(tmp_path):
    class Runner(FakeRunner):
        def verify(self, candidate, artifact):
            record = super().verify(candidate, artifact)
            large = candidate.workload.batch * candidate.workload.kv_len > 1024
            return type(record)(candidate, "oom") if large else record

    runner = Runner(cost=cost)  # the search has no time for eight threads, and verifies them nowhere
    run(tmp_path, runner, budget=Budget(trials=1, seconds=3600.0), plane=True)
    assert "1x1024" in {candidate.workload.key for candidate in runner.verified if candidate.schedule.launch["threads"] == 8}


def test_calls_beyond_the_grid_take_the_plain_schedule(tmp_path):
    """The default is for the workloads of the spec, and may be bad far from them."""
    entry = run(tmp_path, FakeRunner(cost=cost), backends=[PlainBackend()]).entry
    assert PlainBackend().default(entry.spec, "cpu").launch["threads"] == 2
    assert entry.every_launch[entry.dispatch.default].params["threads"] == 4


def test_calls_beyond_the_grid_do_not_take_a_default_that_fails_over_it(tmp_path):
    default = FakeBackend().default(tiny_spec(), "cpu").launch["threads"]

    def outcome(candidate: Candidate) -> str:
        return "wrong" if candidate.schedule.launch["threads"] == default and candidate.workload.batch == 16 else "ok"

    entry = run(tmp_path, FakeRunner(cost=cost, outcome=outcome)).entry
    assert default not in {launch.params["threads"] for launch in entry.every_launch}
    assert entry.every_launch[entry.dispatch.default].params["threads"] == 1


def test_a_workload_that_does_not_fit_into_memory_is_skipped_by_name(tmp_path):
    def outcome(candidate: Candidate) -> str:
        return "unsupported" if candidate.workload.batch == 16 else "ok"

    entry = run(tmp_path, FakeRunner(cost=cost, outcome=outcome)).entry
    table = entry.dispatch
    assert entry.provenance["grid"]["failed"] == []
    assert all(not cell.workload.startswith("16x") for cell in table.cells)
    assert table.skipped["16x512"] == "made to fail: unsupported"


def test_a_build_that_time_cuts_off_says_what_it_did_not_measure(tmp_path, monkeypatch):
    """The clock stands still until the tenth workload, and then jumps beyond the budget."""
    runner = FakeRunner(cost=cost)
    monkeypatch.setattr("kvgen.tune.times.time.monotonic", lambda: 1e12 if len(runner.cells) >= 10 else 0.0)
    table = run(tmp_path, runner, budget=Budget(seconds=3600.0)).entry.dispatch
    measured = {key for key in runner.cells if key in {cell.key for cell in SMALL.cells()}}
    assert {cell.workload for cell in table.cells} == measured
    assert set(table.skipped.values()) == {"the build's time was used up"}
    assert len(table.skipped) + len(table.cells) == len(SMALL.cells())


def test_the_workloads_alone_make_no_table(tmp_path, monkeypatch):
    """Calls beside them take the launch of the nearest, as without a grid. The clock jumps after the workload."""
    runner = FakeRunner(cost=cost)
    monkeypatch.setattr("kvgen.tune.times.time.monotonic", lambda: 1e12 if runner.cells else 0.0)
    result = run(tmp_path, runner, budget=Budget(seconds=3600.0), grid=replace(SMALL, screened=()))
    assert runner.cells == ["1x1024"]
    assert result.entry.dispatch is None
    assert result.notes


def test_a_few_cells_make_no_table_and_replace_none(tmp_path, monkeypatch):
    """Calls far from them would take the default instead of the nearest launch, and a whole table of an earlier build would be lost."""
    whole = run(tmp_path, FakeRunner(cost=cost), WIDE, grid=CPU).entry.dispatch
    runner = FakeRunner(cost=cost)
    monkeypatch.setattr("kvgen.tune.times.time.monotonic", lambda: 1e12 if len(runner.cells) >= 3 else 0.0)
    again = run(tmp_path, runner, WIDE, budget=Budget(seconds=3600.0), grid=replace(CPU, screened=()))
    assert len(runner.cells) == 3
    assert again.entry.dispatch == whole
    assert "its time was up after 3 of" in again.notes[0]
    assert "stays" in again.notes[1]


def test_a_table_reaches_what_lies_within_a_doubling_of_its_cells():
    cells = GPU.cells()
    assert reached(cells, []) == 1.0
    assert reached(cells[:3], cells[3:]) < 0.5 < reached(cells[:10], cells[10:])
    for grid, enough in ((GPU, 8), (CPU, 4)):  # docs/tuning.md names these
        cells = grid.cells()
        assert reached(cells[: enough - 1], cells[enough - 1 :]) < ENOUGH <= reached(cells[:enough], cells[enough:])
    far = [parse("1x512"), parse("1024x512")]
    assert reached([parse("8x32768")], far) == pytest.approx(1 / 3)


def test_devices_share_the_cells(tmp_path):
    runner = FakeRunner(cost=cost, devices=3)
    table = run(tmp_path, runner).entry.dispatch
    assert len(table.cells) == len(SMALL.cells())


def test_no_grid_where_trials_alone_bound_a_build_or_where_none_is_wanted(tmp_path):
    for number, more in enumerate(({"budget": Budget(trials=3)}, {"plane": False})):
        runner = FakeRunner(cost=cost)
        assert run(tmp_path / str(number), runner, **more).entry.dispatch is None
        assert runner.cells == []
    assert run(tmp_path / "wanted", FakeRunner(cost=cost), budget=Budget(trials=3), plane=True).entry.dispatch is not None


def test_a_build_without_the_grid_keeps_the_table_of_the_same_launches_and_says_so(tmp_path):
    first = run(tmp_path, FakeRunner(cost=cost), WIDE)
    assert first.notes == ()
    assert first.entry.dispatch.launches  # also such that serve no workload of the spec
    again = run(tmp_path, FakeRunner(cost=cost), WIDE, plane=False)
    assert again.entry.dispatch == first.entry.dispatch
    assert again.entry.provenance["grid"] == first.entry.provenance["grid"]
    assert [again.entry.codes[launch.file].text for launch in again.entry.every_launch] == [
        first.entry.codes[launch.file].text for launch in first.entry.every_launch
    ]
    (note,) = again.notes
    assert "the dispatch table of the present entry stays" in note


def test_a_table_whose_further_launch_fails_now_is_not_kept(tmp_path):
    first = run(tmp_path, FakeRunner(cost=cost), WIDE)
    (launch, *_) = first.entry.dispatch.launches
    fails = first.entry.schedule(launch)
    runner = FakeRunner(cost=cost, outcome=lambda candidate: "wrong" if candidate.schedule == fails else "ok")
    again = run(tmp_path, runner, WIDE, plane=False)
    assert fails in {candidate.schedule for candidate in runner.verified}
    assert again.entry.dispatch is None
    assert "the present dispatch table is dropped" in again.notes[0]
    assert fails not in map(again.entry.schedule, again.entry.every_launch)


def test_a_winner_that_is_wrong_somewhere_in_the_grid_is_not_registered(tmp_path):
    entry = run(tmp_path / "right", FakeRunner(cost=cost)).entry
    winner = entry.schedule(entry.launches[0])

    def outcome(candidate: Candidate) -> str:
        return "wrong" if candidate.schedule == winner and candidate.workload.batch > 1 else "ok"

    result = run(tmp_path / "wrong", FakeRunner(cost=cost, outcome=outcome))
    assert winner not in map(result.entry.schedule, result.entry.every_launch)
    assert result.entry.dispatch is None
    assert "a winner is wrong there" in result.notes[0]
    again = run(tmp_path / "wrong", FakeRunner(cost=cost)).entry
    assert winner not in map(again.schedule, again.every_launch)


def test_a_table_of_other_sources_is_not_kept(tmp_path, monkeypatch):
    assert run(tmp_path, FakeRunner(cost=cost)).entry.dispatch is not None
    lower = FakeBackend.lower
    monkeypatch.setattr(FakeBackend, "lower", lambda *given: replace(source := lower(*given), text=source.text + "// changed\n"))
    again = run(tmp_path, FakeRunner(cost=cost), plane=False)
    assert again.entry.dispatch is None
    (note,) = again.notes
    assert "has a dispatch table, and the new one has none" in note
    assert run(tmp_path, FakeRunner(cost=cost), plane=False).notes == ()


def test_a_table_that_names_an_absent_back_end_is_not_kept_and_costs_nothing_else(tmp_path):
    first = run(tmp_path, FakeRunner(cost=cost), WIDE)
    table = first.entry.dispatch
    strange = replace(table, launches=tuple(replace(launch, backend="absent") for launch in table.launches))
    Store(tmp_path / "registry").put(replace(first.entry, dispatch=strange))
    again = run(tmp_path, FakeRunner(cost=cost), WIDE, plane=False)
    assert again.entry.dispatch is None
    assert [launch.params for launch in again.entry.launches] == [launch.params for launch in first.entry.launches]


def test_an_interrupt_leaves_the_decision_without_a_table(tmp_path):
    class Runner(FakeRunner):
        def measure_cell(self, entrants, rounds, device):
            raise KeyboardInterrupt

    result = run(tmp_path, Runner(cost=cost))
    assert result.interrupted
    assert result.entry.dispatch is None
    assert result.entry.launches[0].params["threads"] == 1
    assert "because the build was interrupted" in result.notes[0]


def test_a_build_without_the_grid_says_that_a_packaged_table_is_hidden(tmp_path, monkeypatch):
    """The new entry goes before the packaged one, whose table it keeps if the same launches won."""
    packaged = run(tmp_path / "packaged", FakeRunner(cost=cost), WIDE)
    monkeypatch.setattr(tuner, "stores", lambda: (Store(tmp_path / "packaged" / "registry"),))
    kept = run(tmp_path / "same", FakeRunner(cost=cost), WIDE, plane=False)
    assert kept.entry.dispatch == packaged.entry.dispatch
    lower = FakeBackend.lower
    monkeypatch.setattr(FakeBackend, "lower", lambda *given: replace(source := lower(*given), text=source.text + "// changed\n"))
    (note,) = run(tmp_path / "other", FakeRunner(cost=cost), WIDE, plane=False).notes
    assert "has a dispatch table, and the new one has none" in note


def test_a_grid_that_cannot_be_measured_leaves_the_decision_and_says_why(tmp_path):
    class Runner(FakeRunner):
        def measure_cell(self, entrants, rounds, device):
            raise MeasureError("no worker process could be started")

    result = run(tmp_path, Runner(cost=cost))
    assert (result.interrupted, result.entry.dispatch) == (False, None)
    assert result.entry.launches[0].params["threads"] == 1
    (note,) = result.notes
    assert "no worker process could be started" in note


def test_nothing_measured_over_the_grid_is_no_table(tmp_path):
    class Runner(FakeRunner):
        def measure_cell(self, entrants, rounds, device):
            return [
                type(record)(record.candidate, "unsupported", detail="no room") for record in super().measure_cell(entrants, rounds, device)
            ]

    result = run(tmp_path, Runner(cost=cost))
    assert result.entry.dispatch is None
    (note,) = result.notes
    assert "nothing could be measured" in note


def test_the_grid_is_part_of_the_budget():
    clock = Clock(Budget(seconds=100.0), now=lambda: 0.0, plane=True)
    assert (clock.search_left, clock.final_left, clock.left) == (40.0, 60.0, 100.0)
    assert Clock(Budget(), now=lambda: 0.0, plane=True).final_left is None
