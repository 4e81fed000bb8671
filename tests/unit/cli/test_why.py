"""`kvgen why --workload`: which launch a call takes, and what the grid says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgen.cli.app import main
from kvgen.registry import Store
from kvgen.spec import dump_spec
from kvgen.toolchain import ArtifactCache
from kvgen.tune.grid import Grid, powers
from kvgen.tune.result import TuningResult
from kvgen.tune.tuner import tune
from tests.support.grids import cell, with_grid
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec

GRID = Grid(powers(1, 4), powers(128, 1024), 2048, screened=((1, 512),))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningResult:
    for name in ("CACHE", "REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    spec = tiny_spec()
    (tmp_path / "tiny.yaml").write_text(dump_spec(spec))
    place = {"store": Store(tmp_path / "registry"), "cache": ArtifactCache(tmp_path / "cache")}
    return tune(spec, "cpu", backends=[FakeBackend()], runner=FakeRunner(), grid=GRID, **place)  # type: ignore[arg-type]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr().out


def test_it_names_the_launch_the_measured_workload_and_its_times(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    text = printed(capsys, "why", "tiny.yaml", "--workload", "4x512")
    assert "4x512 takes launch" in text
    assert "measured at 4x512" in text
    cell = next(cell for cell in built.entry.dispatch.cells if cell.workload == "4x512")
    us = built.entry.dispatch.time(cell, cell.launch)
    assert f"{us:.3g} µs" in text
    assert "of the read's speed" in text
    assert "1.00 times the fastest launch measured there" in text
    assert f"dispatch: {len(built.entry.dispatch.members)} launches over {len(built.entry.dispatch.cells)} measured workloads" in text


def test_beyond_the_grid_it_says_that_the_plain_schedule_serves(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    (near, far) = json.loads(printed(capsys, "why", "tiny.yaml", "--workload", "4x450", "--workload", "64x32768", "--json"))
    (near,), (far,) = near["serving"], far["serving"]
    assert near["measured"] == "4x512"
    assert near["us"] > 0
    assert "0.2 doublings away" in near["why"]
    assert (far["measured"], far["us"], far["launch"]) == (None, None, built.entry.dispatch.default)
    assert far["why"] == "the plain schedule: no workload within a doubling of it was measured"


def test_without_a_table_the_nearest_workload_is_named(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    from dataclasses import replace

    for name in ("4x64-512", "8x512:sustained"):  # other traffic is understood, too
        assert name in printed(capsys, "why", "tiny.yaml", "--workload", name)
    store = Store(built.path.parents[2])
    store.put(replace(built.entry, dispatch=None, provenance={**built.entry.provenance, "date": "2099-01-01"}))
    capsys.readouterr()
    assert "tuned for the nearest workload, 2x512; the entry has no dispatch table" in printed(
        capsys, "why", "tiny.yaml", "--workload", "64x32768"
    )


def test_a_workload_of_another_load_is_told_as_it_was_measured(built: TuningResult, capsys: pytest.CaptureFixture[str]):
    """Calls take the launch for the spec's own load, which is rested, whatever load is asked about."""
    serves = cell("4x512:sustained", 0, [8.0, 9.0], 8.0, watts=640.2, clock_mhz=1540.0)
    store = Store(built.path.parents[2])
    capsys.readouterr()
    for sustained, regret in ((serves, "1.00"), (cell("4x512:sustained", 1, [12.0, 9.0], 9.0, watts=640.2, clock_mhz=1540.0), "1.33")):
        store.put(with_grid(built.entry, cell("4x512", 0, [7.0, 9.0], 7.0), sustained))
        text = printed(capsys, "why", "tiny.yaml", "--workload", "4x512:sustained")
        assert "takes launch 0" in text
        assert "measured at 4x512:sustained" in text
        assert f"{sustained['us'][0]:.3g} µs" in text
        assert f"{regret} times the fastest launch measured there" in text
        assert ("640 W, 1540 MHz" in text) == (sustained is serves)
    assert "7 µs" in printed(capsys, "why", "tiny.yaml", "--workload", "4x512")
