"""`kvgen bench` of linear layers and of operations on a matrix, on the CPU, over tiny shapes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from kvgen.bench import operations
from kvgen.cli import main
from kvgen.measure.inputs import MatrixInputs
from kvgen.spec import MatrixShape

MATRIX = "{name: tiny, operation: dequantize, arch: cpu, matrix: {dtype: float32}, workloads: [{tokens: 64, channels: 96}]}"
LINEAR = "{name: tiny, operation: linear, arch: cpu, linear: {n: 64, k: 128, dtype: float32}, workloads: [{rows: 1}]}"


@pytest.mark.parametrize(
    ("text", "workload", "providers", "nbytes"),
    [
        (MATRIX, "64x96", ["kvgen", "copy"], 64 * 96 * 5 + 384),
        (LINEAR, "rows1", ["kvgen", "torch.matmul, float32", "pure read"], 64 * 128 // 2 + 64 * 4),
    ],
)
def test_operations_are_verified_timed_printed_and_written(
    text: str,
    workload: str,
    providers: list[str],
    nbytes: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("kvgen.cli.bench.pin_threads", lambda: None)
    verified: list[str] = []
    for name in ("MatrixWorkloadCheck", "LinearWorkloadCheck"):
        check = getattr(operations, name)
        monkeypatch.setattr(operations, name, lambda variant, key, *rest, check=check: verified.append(key) or check(variant, key, *rest))
    (tmp_path / "tiny.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(tmp_path / "tiny.yaml"), "--rounds", "1", "--csv", str(tmp_path / "a.csv")])
    assert not ended.value.code
    told = capsys.readouterr().out
    assert all(word in told for word in (workload, *(name.split(",")[0] for name in providers)))
    rows = pd.read_csv(tmp_path / "a.csv")
    assert [*rows.provider] == providers
    assert {*rows.workload} == {*verified} == {workload}
    assert rows.bytes[0] == nbytes
    assert (rows.us > 0).all()
    assert rows.read_us.nunique() == 1


def test_what_does_not_fit_into_memory_leaves_the_rows_before_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def copies(matrix: MatrixInputs, variant: object, shape: MatrixShape, *rest: object) -> None:
        if shape.channels > 96:
            raise torch.OutOfMemoryError
        made(matrix, variant, shape, *rest)

    made = MatrixInputs.__init__
    monkeypatch.setattr(MatrixInputs, "__init__", copies)
    monkeypatch.setattr("kvgen.cli.bench.pin_threads", lambda: None)
    for widths, code in (((96, 128), 0), ((128,), 1)):
        workloads = ", ".join(f"{{tokens: 64, channels: {width}}}" for width in widths)
        (tmp_path / "tiny.yaml").write_text(MATRIX.replace("{tokens: 64, channels: 96}", workloads))
        with pytest.raises(SystemExit) as ended:
            main(["bench", str(tmp_path / "tiny.yaml"), "--rounds", "1"])
        told = capsys.readouterr()
        assert bool(ended.value.code) == bool(code)
        assert "into the memory that is free" in " ".join(told.err.split())
        assert ("64x96" in told.out) == (not code)
