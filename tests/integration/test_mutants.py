"""Some planted faults for real: compiled, and refused by the worker that `build` asks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.mutants import emulator
from tests.mutants.judge import Judges
from tests.mutants.run import Suite, chosen, run
from tests.mutants.suite import CASES

FAULTS = ("flush-boundary", "append-old", "unpack-last-token", "causal-attend", "residual-head", "advance-one")


@pytest.mark.slow
def test_planted_faults_are_refused_and_the_variants_without_them_are_not(tmp_path: Path) -> None:
    judges = Judges("cpu", 60.0)
    suite = Suite(chosen("cpu", FAULTS), CASES["cpu"], tmp_path, 2)
    try:
        assert run(suite, judges, argparse.Namespace(suite="cpu", out=tmp_path / "found.json")) == 0
    finally:
        suite.close()
        judges.close()
    rows = json.loads((tmp_path / "found.json").read_text())["faults"]
    assert [row["name"] for row in rows] == [fault.name for fault in chosen("cpu", FAULTS)]
    assert all(row["kind"] == "wrong" and row["detail"] for row in rows)


@pytest.mark.slow
def test_a_planted_cuda_fault_is_seen_in_the_emulator_and_its_variant_is_sound() -> None:
    assert emulator.judge(f"{emulator.SOUND}:attend:residual")["kind"] == "ok"
    assert emulator.judge("residual-second-round")["kind"] == "wrong"
