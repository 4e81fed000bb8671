"""The INT8 paper's suite on the CPU, over a tiny shape."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.bench import int8_kernels
from kvgen.bench.int8_paper import SHAPES, vectorized_ms
from kvgen.cli import suite
from kvgen.lower.matrix import PAPER_VARIANTS
from kvgen.measure.job import TimingPolicy
from kvgen.spec import MatrixShape
from tests.support.matrix import cpu_matrix

POLICY = TimingPolicy(seconds=0.002, warmup_seconds=0.0, samples=5, cold_bytes=1 << 18)


def entrant(name: str, threads: int) -> int8_kernels.Entrant:
    return int8_kernels.Entrant(name, "cpu", dict.fromkeys(int8_kernels.CALLS, cpu_matrix()), threads)


def test_entrants_are_verified_timed_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    entrants = [entrant("naive", 1), entrant("kvgen, 1 thread", 1)]
    shapes, kept = [("tiny", MatrixShape(tokens=64, channels=96))], suite.writing(tmp_path / "rows.csv", "cpu")
    rows, errors = int8_kernels.run(entrants, shapes, POLICY, 2, kept=kept)
    assert [(row.variant, row.call) for row in rows] == [
        (name, call) for name in ("naive", "kvgen, 1 thread") for call in ("quantize", "dequantize", "scales")
    ]
    assert all(row.us > 0 and row.roofline_us > 0 for row in rows)
    assert [row.nbytes for row in rows[:3]] == [64 * 96 * 5 + 384, 64 * 96 * 5 + 384, 64 * 96 * 4 + 384]
    assert 0.003 < errors[0].errors.max_abs < 0.00394
    suite.show(rows, errors)
    told = capsys.readouterr().out
    for word in ("quantize", "dequantize", "scales", "naive", "64x96", "of roofline", "attention error", "0.00394"):
        assert word in told
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(rows)


def test_a_shape_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.measure.device.free_bytes", lambda device: 1 << 20)
    told: list[str] = []
    rows, errors = int8_kernels.run([entrant("naive", 1)], [("", MatrixShape(tokens=1024, channels=1024))], POLICY, 1, told.append)
    assert not rows
    assert not errors
    assert told == ["1024x1024 on cpu: it takes 20 MiB, and 1 MiB are free"]


def test_the_papers_shapes_and_figures() -> None:
    assert len(SHAPES) == 8
    assert SHAPES[-1][1] * SHAPES[-1][2] == 1 << 30
    assert vectorized_ms("131072x8192") == pytest.approx(46.6, abs=0.1)
    assert vectorized_ms("2048x128") is None
    assert list(PAPER_VARIANTS) == ["naive", "tiled", "coarsened", "vectorized"]
