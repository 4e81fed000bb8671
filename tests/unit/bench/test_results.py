from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvgen.bench.results import Result, fastest_peers, read_results
from kvgen.bench.run import frame, write_csv
from kvgen.errors import KvgenError

FACTS = {"call": "attend", "load": "burst", "device": "GPU", "threads": "", "driver": "1", "torch": "2", "kvgen": "0", "date": "2026-01-01"}


def row(provider: str, backend: str, us: float) -> dict[str, object]:
    figures = {"bytes": 1000, "tb_s": 1.0, "read_us": 5.0, "read_fraction": 0.5, "relative_l2": 0.0, "watts": None, "clock_mhz": None}
    work = {"batch": 2, "kv_len": 512, "q_len": 1}
    return {"provider": provider, "backend": backend, "spec": "tiny", "workload": work, "us": us, **figures, "rounds": 3}


def test_rows_come_back_as_they_were_written(tmp_path: Path):
    write_csv(tmp_path / "rows.csv", frame([row("kvgen", "cuda", 10.0), row("flashinfer", "batch-decode-fp8", 20.0)], FACTS))
    ours, other = read_results(tmp_path / "rows.csv")
    assert ours == Result("kvgen", "cuda", "tiny", 2, 512, 1, 10.0, 5.0, "burst", "GPU", "2026-01-01")
    assert (other.label("float16"), other.workload, other.idle_rested) == ("FlashInfer fp8", "2x512", True)


def test_the_fastest_of_every_library_and_kind_of_cache_stand_for_it(tmp_path: Path):
    given = [
        row("kvgen", "cuda", 1.0), row("torch", "sdpa-flash-fp16-gqa", 30.0), row("torch", "sdpa-bf16-folded", 20.0),
        row("flashinfer", "batch-decode", 25.0), row("flashinfer", "batch-decode-fp8", 15.0), row("new", "it", 40.0),
    ]  # fmt: skip
    write_csv(tmp_path / "rows.csv", frame(given, FACTS))
    labels = [one.label("bfloat16") for one in fastest_peers(read_results(tmp_path / "rows.csv"))]
    assert labels == ["new bf16", "FlashInfer bf16", "torch bf16", "FlashInfer fp8"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_len": "0"}, "row 2: workload '2x0q1' is out of range"),
        ({"us": "0"}, "row 2: a time must be above 0"),
        ({"us": "nan"}, "row 2: a time must be above 0"),
    ],
)
def test_a_row_that_no_measurement_gives_is_named(tmp_path: Path, changed: dict[str, str], said: str):
    file, table = tmp_path / "rows.csv", frame([row("torch", "x", 10.0), row("torch", "x", 10.0)], FACTS).astype(str)
    table.loc[1, list(changed)] = list(changed.values())
    write_csv(file, table)
    with pytest.raises(KvgenError, match=f"rows.csv is no table.*{said}"):
        read_results(file)


def test_a_binary_file_is_refused_in_words(tmp_path: Path):
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00" * 99)
    with pytest.raises(KvgenError, match="it is not text"):
        read_results(tmp_path / "rows.csv")


@pytest.mark.parametrize(("text", "said"), [(None, "cannot read"), ("a,b\n1,2\n", "no table"), ("provider\nx\n", "no table")])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str | None, said: str):
    file = tmp_path / "rows.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(KvgenError, match=f"{said}.*|.*{said}"):
        read_results(file)


def test_a_file_is_read_with_a_bound(tmp_path: Path):
    with (tmp_path / "endless.csv").open("w") as file:
        os.truncate(file.fileno(), 1 << 40)
    with pytest.raises(KvgenError, match="has more than"):
        read_results(tmp_path / "endless.csv")
