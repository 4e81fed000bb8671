"""An entry whose workloads are won by two back ends, as the commands tell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import build
from kvgen.cli.app import main
from kvgen.registry import Store
from kvgen.report.page import render
from kvgen.spec import dump_spec
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.candidate import Candidate
from kvgen.tune.result import TuningResult
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, fake_cost, tiny_spec

WON = {"1x128": ("cpu", "tilelang"), "2x512": ("tilelang", "cpu")}


def cost(candidate: Candidate) -> float:
    """Each back end takes half as long again where the other one is at home."""
    return fake_cost(candidate) * (1.0 if candidate.backend == WON[candidate.workload.key][0] else 1.5)


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningResult:
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(dump_spec(tiny_spec()))
    backends = [FakeBackend(), FakeBackend("tilelang")]
    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    return tune(tiny_spec(), "cpu", Budget(), backends=backends, store=store, cache=cache, runner=FakeRunner(cost=cost))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr().out


def of_workload(text: str, key: str) -> list[str]:
    """The words of a workload's row."""
    return next(line.split() for line in text.splitlines() if line.startswith(key))


def test_tables_name_each_workloads_back_end_and_how_far_behind_the_other_is(mixed: TuningResult, capsys: pytest.CaptureFixture[str]):
    build.show(mixed)
    built = capsys.readouterr().out
    for text in (built, printed(capsys, "show", mixed.entry.key), printed(capsys, "why", "tiny.yaml")):
        for key, (winner, other) in WON.items():
            words = of_workload(text, key)
            assert words[1] == winner
            assert words[words.index(other) + 1] == "1.50x"
    assert mixed.why in built
    assert f"\ndecision: {mixed.why}\n" in printed(capsys, "show", mixed.entry.key)


def test_json_has_the_standings(mixed: TuningResult, capsys: pytest.CaptureFixture[str]):
    def launches(data: dict[str, Any]) -> dict[str, tuple[str, str, float]]:
        return {one["workload"]: (one["backend"], one["runner_up"]["backend"], one["runner_up"]["ratio"]) for one in data["launches"]}

    expected = {key: (*names, 1.5) for key, names in WON.items()}
    (answer,) = json.loads(printed(capsys, "why", "tiny.yaml", "--json"))
    assert launches(answer) == expected
    (listed,) = [one for one in json.loads(printed(capsys, "list", "--json")) if one["registry"] == "user"]
    assert launches(listed) == expected
    assert answer["backend"] == listed["backend"] == "cpu+tilelang"
    assert {one["backend"] for one in json.loads(printed(capsys, "show", mixed.entry.key, "--json"))["schedule"]["launches"]} == {
        "cpu",
        "tilelang",
    }


def test_the_list_says_whose_each_time_is(mixed: TuningResult, capsys: pytest.CaptureFixture[str]):
    assert "1x128 142 µs cpu, 2x512 232 µs tilelang" in printed(capsys, "list")


def test_the_report_says_who_won_and_who_came_second(mixed: TuningResult):
    page = render([mixed.entry], ArtifactCache(mixed.path.parents[3] / "none"))
    assert '<td class="keep">1x128</td><td class="keep">cpu</td>' in page
    assert '<td class="keep">2x512</td><td class="keep">tilelang</td>' in page
    assert page.count("1.50×") == 2
    for name in ("kvgen cpu", "best tilelang", "kvgen tilelang", "best cpu", "pure read"):
        assert f">{name}</text>" in page
