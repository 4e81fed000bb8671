from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

from kvgen.registry import Store
from kvgen.report.studies import PAUSE_SECONDS, _clock, study_views
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


def test_a_search_has_results_over_time_failures_and_importances(tmp_path: Path):
    cache = ArtifactCache(tmp_path / "cache")
    runner = FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok")
    result = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=Store(tmp_path / "r"), cache=cache, runner=runner)
    views = study_views(result.entry, cache)
    assert [view.workload for view in views] == [launch.workload.key for launch in result.entry.launches]
    large = next(view for view in views if view.workload == "2x512")
    assert large.trials == 11
    assert [(one.kind, one.count, one.detail) for one in large.failures] == [("crash", 2, "made to fail: crash")]
    assert len(large.results) == 9
    assert min(us for _, us in large.results) == 232.0
    moments = [moment for moment, _ in large.results]
    assert moments == sorted(moments)
    assert moments[0] >= 0
    assert {name for name, _ in large.importances} <= {"layout.block", "launch.threads", "layout.order"}
    assert sum(share for _, share in large.importances) > 0.99
    slices = dict(large.slices)
    assert [(value, best) for value, _, best, _ in slices["layout.block"]] == [("32", 232.0), ("64", 264.0), ("128", 328.0)]
    assert [value for value, *_ in slices["launch.threads"]] == ["1", "2", "4"]
    assert "layout.order" not in slices  # it has one value


def test_an_entry_without_a_journal_has_no_studies(tmp_path: Path):
    made, empty = ArtifactCache(tmp_path / "made"), ArtifactCache(tmp_path / "empty")
    store, budget = Store(tmp_path / "r"), Budget(trials=2)
    result = tune(tiny_spec(), "cpu", budget, backends=[FakeBackend()], store=store, cache=made, runner=FakeRunner())
    assert study_views(result.entry, made)
    assert study_views(result.entry, empty) == []


def test_of_two_studies_of_a_back_end_and_workload_the_latest_is_shown(tmp_path: Path):
    cache, store = ArtifactCache(tmp_path / "cache"), Store(tmp_path / "r")
    for version, trials in (("old", 2), ("new", 4)):
        runner = FakeRunner(policy={"runner": version})
        result = tune(tiny_spec(), "cpu", Budget(trials=trials), backends=[FakeBackend()], store=store, cache=cache, runner=runner)
    views = study_views(result.entry, cache)
    assert len({(view.backend, view.workload) for view in views}) == len(views) == 2
    assert sum(view.trials for view in views) == len(result.records)


def test_a_study_that_cannot_be_read_is_left_out(tmp_path: Path):
    cache, store = ArtifactCache(tmp_path / "cache"), Store(tmp_path / "r")
    result = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    journal = cache.root / "studies" / f"{result.entry.key}.journal"
    lines = journal.read_text().splitlines(keepends=True)
    broken = [line.replace('"layout"', '"lay"') for line in lines]
    assert broken != lines
    journal.write_text("".join(broken))
    assert study_views(result.entry, cache) == []


def test_time_between_two_builds_is_no_time_of_the_search():
    begin = datetime(2026, 1, 1, tzinfo=timezone.utc)
    later = begin + timedelta(seconds=5 + 2 * PAUSE_SECONDS)
    ends = [begin + timedelta(seconds=2), begin + timedelta(seconds=5), later, later + timedelta(seconds=1)]
    trials = [SimpleNamespace(datetime_start=begin, datetime_complete=end) for end in ends]
    assert [_clock(trials)[end] for end in ends] == [2.0, 5.0, 5.0, 6.0]
    assert _clock([]) == {}
