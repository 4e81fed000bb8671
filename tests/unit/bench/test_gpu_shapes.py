"""benchmarks/gpu_shapes.py without a GPU: cases are measured as they are compiled, and one that fails ends no other."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_shapes, output
from benchmarks.gpu_measure import in_places
from benchmarks.shape_cases import SHAPES, Shape, named
from kvgen.errors import CompileError
from kvgen.toolchain.pool import CompilePool
from tests.support.naive import naive_artifact

ROW = {"workload": "8x32768", "us": 10.0, "low_us": 9.0, "read_fraction": 0.9, "relative_l2": 1e-4, "spill_bytes": 0}


def rows_of(shape: Shape, rounds: int) -> tuple[list[dict[str, Any]], int]:
    assert rounds == 9
    if shape.name == "faulty":
        raise RuntimeError("an illegal memory access was encountered")
    assert [module["registers"] for module in shape.modules] == [0]
    return [{"case": shape.name, "spec": shape.words, "backend": "cuda", "schedule": "default", **ROW}], 0


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Shape]:
    """One that is right, one that fails, one of whose schedules one does not compile."""
    found = [Shape("right", "k4v4"), Shape("faulty", "k8v8"), Shape("partly", "k2v2", sibling="right")]
    schedule = found[0].points("cuda")[0]
    tasks = [(shape, schedule, source) for shape, sources in zip(found, ("a", "b", "ac"), strict=True) for source in sources]

    def build(self: CompilePool, source: str) -> object:
        if source == "c":
            raise CompileError("no such instruction", "")
        return naive_artifact()

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_shapes.py", "--no-torch"])
    monkeypatch.setattr(gpu_shapes, "SHAPES", found)
    monkeypatch.setattr(gpu_shapes, "lowered", lambda shapes, backends: (tasks, 0))
    monkeypatch.setattr(gpu_shapes.read_roofline, "artifact", lambda target: None)
    monkeypatch.setattr(gpu_shapes, "gpu_facts", lambda policy: {"device": "none"})
    monkeypatch.setattr(CompilePool, "build", build)
    monkeypatch.setattr(gpu_shapes, "measure", rows_of)
    return found


def test_a_case_that_fails_ends_no_other(
    shapes: list[Shape], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "gpu_identity", lambda: {"name": "NVIDIA GeForce RTX 4090"})
    assert gpu_shapes.main() == 1
    told = capsys.readouterr().out
    assert "faulty: RuntimeError: an illegal memory access" in told
    assert "no such instruction" in told
    with (tmp_path / "4090_shapes.csv").open(newline="") as file:
        found = [(row["case"], row["backend"], row["relative"]) for row in csv.DictReader(file)]
    assert found == [("right", "cuda", ""), ("right", "best", ""), ("partly", "cuda", "1.0"), ("partly", "best", "1.0")]


def test_all_right_is_success(shapes: list[Shape]) -> None:
    shapes[1].name = "also right"
    assert gpu_shapes.main() == 0


def test_blocks_of_a_window_lie_where_a_cache_has_them() -> None:
    """Of 7, 2 and 4 packed blocks the newest three or fewer, each in the place that its number has."""
    blocks = torch.arange(8).reshape(1, 1, 8, 1).expand(3, 2, 8, 4)
    kept = in_places(blocks, (7, 2, 4), 3)
    assert kept.shape == (3, 2, 3, 4)
    assert kept[:, 0, :, 0].tolist() == [[6, 4, 5], [0, 1, 2], [3, 1, 2]]


def test_every_case_tries_the_default_once() -> None:
    """Also where it is one of the case's own schedules; not where the back end is not asked for."""
    for shape in SHAPES:
        points = shape.points_with_default("cuda")
        assert points.count(shape.default("cuda")) == 1
        assert set(shape.points("cuda")) < {*points, None}
    assert Shape("none", "k4v4", tilelang=()).points_with_default("tilelang") == []


def test_the_default_stands_beside_the_fastest_and_is_told_where_it_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"case": "plain", "backend": "cuda", "schedule": "n128.w8u4d1", "us": 100.0}
    assert gpu_shapes.beside_default(row, 105.0) == {**row, "default_us": 105.0, "default_ratio": 1.05}
    assert capsys.readouterr().out == ""
    assert gpu_shapes.beside_default(row, 107.04)["default_ratio"] == 1.0704
    assert capsys.readouterr().out == "plain cuda: the default takes 1.07 times the time of n128.w8u4d1\n"
    assert gpu_shapes.beside_default(row, None) == {**row, "default_us": "", "default_ratio": ""}
    assert "no time" in capsys.readouterr().out


def test_a_whole_name_asks_for_one_case_and_a_part_for_all_that_contain_it() -> None:
    def asked(word: str) -> set[str]:
        return {shape.name for shape in SHAPES if named(shape, word, SHAPES)}

    assert asked("2 bits") == {"2 bits"}
    assert asked("kitty pro") == {"kitty pro"}
    assert asked("ragged") == {shape.name for shape in SHAPES if "ragged" in shape.name} > {"ragged, one long"}
    assert not asked("no such case")
