"""What benchmarks/gpu_decode.py --decode measures and shows, without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks import gpu_decode
from benchmarks.gpu_measure import Steps, block_of_steps
from benchmarks.gpu_words import spec_of, workload_of
from kvgen.reference.residual import ResidualRows, residual_rows

KITTY = "k2v2:boost1/8:sink32:local128:page128"
LENGTHS = torch.tensor([32768, 32700, 4097, 700])


def packed(part: Steps, rows: ResidualRows, q_len: int) -> list[int]:
    """Blocks that the steps pack, by sequence, one after the other."""
    found = []
    for length in part.start(LENGTHS, rows).tolist():
        lengths = [length + q_len * step for step in range(part.count + 1)]
        found.append(sum(rows.packed_blocks(after) - rows.packed_blocks(before) for before, after in pairwise(lengths)))
    return found


@pytest.mark.parametrize("words", ["k4v4", KITTY, "k4v4:sink32:local100", "k4v4:rollback8"])
@pytest.mark.parametrize("q_len", [1, 4, 5, 6])
@pytest.mark.parametrize("block", [64, 128])
def test_a_block_of_steps_packs_one_block_and_as_many_others_pack_none(words: str, q_len: int, block: int) -> None:
    rows = residual_rows(spec_of(f"{words}:q{q_len}", "sm90", [workload_of("1x4096")]), block)
    whole, middle = block_of_steps(block, q_len)
    assert [packed(part, rows, q_len) for part in whole] == [[1] * len(LENGTHS)]
    assert [packed(part, rows, q_len) for part in middle] == [[0] * len(LENGTHS)] * 2
    assert sum(part.count for part in middle) == sum(part.count for part in whole)
    mean = [sum(part.count * (2 * part.filled + q_len * part.count) for part in parts) for parts in (whole, middle)]
    assert abs(mean[0] - mean[1]) <= sum(part.count for part in whole), "the newest block is as full on average"


def test_a_step_of_a_whole_block_has_none_beside_it() -> None:
    assert block_of_steps(16, 8) == ([Steps(0, 2)], [Steps(4, 1), Steps(4, 1)])
    assert block_of_steps(16, 16) == ([Steps(0, 1)], [])


def test_the_flush_is_shown_with_its_part_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "kitty", "workloads": [{"batch": 8, "kv_len": 32768, "q_len": 1}]}
    module = {"json": {"backend": "cuda"}, "registers": 168, "spill": 0}
    line: dict[str, Any] = {"schedule": "w12", "workload": 0, "us": 46.0, "low": 45.9, "read_us": 38.0, "bytes": 1, "relative_l2": 1e-4}
    task = {"lengths": [[32768] * 8], "target": "sm90"}

    def row(**more: float | None) -> dict[str, Any]:
        return gpu_decode._row({**line, **more}, spec, {"w12": module}, task, set())

    assert row(decode_us=50.0, flush_us=0.2)["flush_us"] == 0.2
    assert "decode   50.00 (+4.00) flush +0.20 (0.4%)" in capsys.readouterr().out
    assert row(decode_us=50.0, flush_us=None)["flush_us"] is None
    assert "flush" not in capsys.readouterr().out
    assert row()["decode_us"] is None
