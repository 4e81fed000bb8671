from __future__ import annotations

from pathlib import Path

from kvgen.registry import Store
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.report import polyline, render, study_views
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


def test_the_page_shows_times_failures_importances_and_regret(tmp_path: Path):
    cache = ArtifactCache(tmp_path / "cache")
    runner = FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok")
    result = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=Store(tmp_path / "r"), cache=cache, runner=runner)
    views = {view.workload: view for view in study_views(result.entry, cache)}
    large = views["2x512"]
    assert large.trials == 11
    assert large.failures == (("crash", 2, large.failures[0][2], "made to fail: crash"),)
    assert large.regret[-1] == 1.0
    assert list(large.regret) == sorted(large.regret, reverse=True)
    assert {name for name, _ in large.importances} <= {"layout.block", "launch.threads", "layout.order"}
    assert sum(share for _, share in large.importances) > 0.99
    blocks = dict(large.slices)["layout.block"]
    assert [(value, best) for value, _, best, _ in blocks] == [("32", 232.0), ("64", 264.0), ("128", 328.0)]
    page = render([result.entry], cache)
    for text in (result.entry.key, "made to fail: crash", "142 µs", "layout.block", "<svg"):
        assert text in page


def test_an_entry_without_studies_is_still_shown(tmp_path: Path):
    made, empty = ArtifactCache(tmp_path / "made"), ArtifactCache(tmp_path / "empty")
    runner = FakeRunner()
    result = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=Store(tmp_path / "r"), cache=made, runner=runner)
    assert study_views(result.entry, empty) == []
    assert result.entry.key in render([result.entry], empty)
    assert "Nothing is registered yet" in render([], empty)


def test_a_page_about_accuracy_is_linked_where_there_is_one(tmp_path: Path):
    cache = ArtifactCache(tmp_path)
    assert '<a href="kvgen-accuracy.html">' in render([], cache, accuracy="kvgen-accuracy.html")
    assert "<a href" not in render([], cache)


def test_the_curve_falls_to_the_bottom():
    points = [tuple(map(float, pair.split(","))) for pair in polyline([4.0, 2.0, 1.0], 100, 50).split()]
    assert points == [(0.0, 0.0), (50.0, 25.0), (100.0, 50.0)]
