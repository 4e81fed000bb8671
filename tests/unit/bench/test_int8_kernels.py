"""The INT8 paper's suite on the CPU, over a tiny shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvgen.bench import int8_kernels
from kvgen.cli import main
from kvgen.measure.measurement import TimingPolicy
from kvgen.spec import MatrixShape
from tests.support.cpu import cpu_matrix


def entrant(name: str) -> int8_kernels.Entrant:
    return int8_kernels.Entrant(name, "cpu", lambda *_: cpu_matrix(), 1)


def test_entrants_are_verified_timed_printed_and_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(int8_kernels, "entrants_for", lambda target: [entrant("naive"), entrant("kvgen, 1 thread")])
    monkeypatch.setattr("kvgen.cli.bench.pin_threads", lambda: None)
    words = ["bench", "--suite", "int8-kernels", "--arch", "cpu", "--workload", "64x96", "--rounds", "1", "--csv", str(tmp_path / "a.csv")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().out
    assert not ended.value.code
    assert all(word in told for word in ("quantize", "dequantize", "scales", "naive", "64x96", "of roofline", "attention error"))
    rows = pd.read_csv(tmp_path / "a.csv")
    assert [*zip(rows.variant, rows.call, strict=True)] == [
        (name, call) for name in ("naive", "kvgen, 1 thread") for call in ("quantize", "dequantize", "scales")
    ]
    assert list(rows.nbytes[:3]) == [64 * 96 * 5 + 384, 64 * 96 * 5 + 384, 64 * 96 * 4 + 384]
    assert (rows.us > 0).all()
    assert (rows.roofline_us > 0).all()


def test_errors_are_the_papers_and_a_shape_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, told = TimingPolicy(seconds=0.002, warmup_seconds=0.0, samples=5, cold_bytes=1 << 18), list[str]()
    _, (errors,) = int8_kernels.run([entrant("naive")], [MatrixShape(tokens=64, channels=96)], policy, 1)
    assert 0.003 < errors["max_abs"] < 0.00394
    monkeypatch.setattr(int8_kernels, "free_bytes", lambda device: 1 << 20)
    shapes: Any = [MatrixShape(tokens=1024, channels=1024)]
    assert int8_kernels.run([entrant("naive")], shapes, policy, 1, told.append) == ([], [])
    assert told == ["1024x1024 on cpu: it takes 20 MiB, and 1 MiB are free"]
