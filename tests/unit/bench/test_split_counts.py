from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_builds import row_of
from benchmarks.split_counts import FORCED, HEADER, best_of, chosen_splits, forcible, summary
from kvgen.spec import Workload


def test_the_present_model_can_be_overruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGEN_DATA_DIR", "")
    forcible(tmp_path)
    assert (tmp_path / HEADER).read_text().count(FORCED) == 2
    assert os.environ["KVGEN_DATA_DIR"] == str(tmp_path)
    assert (tmp_path / "search_spaces" / "cuda.yaml").is_file()


def test_a_choice_is_compared_with_the_best_number():
    def row(work: str, splits: int, us: float) -> dict[str, object]:
        return {"spec": "k4v4", "schedule": "w8u4d1", "workload": work, "splits": splits, "chosen": 2, "us": us}

    rows = [row("9x4096", 1, 10.0), row("9x4096", 2, 12.0), row("8x4096", 1, 30.0), row("8x4096", 2, 20.0), row("7x4096", 1, 5.0)]
    told = "2 workloads, 1.095, worst 1.200, 1 above 1.05"
    assert list(summary(rows)) == [f"k4v4 w8u4d1: {told}", f"all: {told}"]
    assert best_of(rows) == [row("7x4096", 1, 5.0)]


def test_equal_schedules_of_two_back_ends_are_told_apart():
    facts = {"spec": "k4v4", "schedule": "w8u2s2", "workload": "9x4096", "splits": 1, "chosen": 1, "us": 5.0}
    found = list(summary([{**facts, "backend": name} for name in ("cuda", "tilelang")]))
    assert [line.split(":")[0] for line in found] == ["cuda k4v4 w8u2s2", "tilelang k4v4 w8u2s2", "all"]


@pytest.mark.parametrize(("split_tokens", "splits"), [(0, 1), (4992, 4), (6656, 3)])
def test_tokens_behind_the_last_kv_tile_are_no_split(split_tokens: int, splits: int):
    module = SimpleNamespace(split_tokens=lambda batch, kv_len, q_len: split_tokens)
    assert chosen_splits(SimpleNamespace(module=module), Workload(batch=12, kv_len=20000), 64) == splits


def test_a_row_of_a_build_says_what_won_and_how_much_slower_the_default_is():
    work = {"batch": 8, "kv_len": 32768, "q_len": 4}
    timing = {"workload": work, "us": 80.0, "read_us": 60.0, "default_us": 100.0}
    row = row_of("q_len 4", timing, {"backend": "cuda", "launch": {"warps": 8}}, {"block": 128}, {"measured": 9, "known": 1})
    assert row["workload"] == "8x32768q4"
    assert (row["read_fraction"], row["default_ratio"], row["candidates"]) == (0.75, 1.25, 10)
    assert row["schedule"] == "block=128 warps=8"
