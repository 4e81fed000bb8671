"""The flush of TileLang's `decode`, whose header the emulator of the CUDA packer runs, against the reference."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen._resources import templates
from kvgen.format.constants import constants_of
from kvgen.format.layout import packed_layout
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import normal
from tests.unit.lower_cuda.emulate import library
from tests.unit.lower_tilelang.emulate import residual_with_poison

BLOCK = 64
CALL = """
using uint = unsigned;
{header}
using namespace kvgen;
{constants}
using Format_ = Constants;
extern "C" void flush(uint* k, uint* v, uint* block, const int64_t* n) {{
  alignas(16) static uint8_t memory[pack_smem_bytes<Format_>()];
  emulator::launch(1, 64, [&] {{ flush_residual<Format_, 64>(k, v, block, n[0], n[1], n[2], n[3], n[4], n[5], memory, n[6]); }});
}}
"""


@pytest.mark.parametrize("words", ["q4", "q8:sink20:local40", "q3:sink1:local50:rollback20"])
def test_a_flush_packs_the_block_and_keeps_the_step(words: str, tmp_path: Path) -> None:
    spec = spec_of(f"k4v8:h2/1:d64:kg64:{words}", "sm90", [workload_of("2x512")])
    layout = packed_layout(spec, BLOCK, "mma")
    header = (templates() / "tilelang/include/kvgen/tilelang_step.cuh").read_text()
    header = header.replace("#pragma once\n", "").replace('#include "kvgen/tilelang.cuh"\n', "")
    text = CALL.format(header=header, constants=constants_of(spec, layout))
    flush = ctypes.CDLL(str(library(text, tmp_path))).flush
    for spare in (0, 2):
        check(flush, spec, spare)


def check(flush: Any, spec: KernelSpec, spare: int) -> None:
    """One step that fills a block; `spare` of its tokens are left over behind the block and the local tokens."""
    reference, q_len = ReferenceCache(spec, 1, BLOCK), spec.attention.q_len
    layout, rows = packed_layout(spec, BLOCK, "mma"), reference.rows
    length = rows.sink + rows.local + 2 * BLOCK - q_len + spare
    inputs = normal(spec, 1, length + q_len, seed=3)
    reference.prefill(inputs.k[:, :length], inputs.v[:, :length])
    held = residual_with_poison(reference)
    new = [x[:, length:].contiguous() for x in (inputs.k, inputs.v)]
    if rows.rollback:  # the warps that attend to the step's tokens store them
        for residual, x in zip(held, new, strict=True):
            residual[0][:, [rows.row(length + i) for i in range(q_len)]] = x[0].transpose(0, 1)
    reference.prefill(*new)
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    rest = length - rows.first(length)
    offsets = [(x.data_ptr() - residual.data_ptr()) // 16 for x, residual in zip(new, held, strict=True)]
    numbers = [offsets[0], new[0].stride(1) // 8, offsets[1], new[1].stride(1) // 8, rest, rest + q_len, length]
    flush(*(ctypes.c_void_p(x.data_ptr()) for x in (*held, block)), (ctypes.c_int64 * len(numbers))(*numbers))
    assert reference.blocks.tolist() == [2]
    assert torch.equal(block, reference.packed(layout)[0, 0, 1])
    kept = [rows.row(position) for position in (*range(rows.sink), *range(rows.first(length + q_len), length + q_len))]
    for residual, expected in zip(held, reference.residual(), strict=True):
        assert torch.equal(residual[0][:, kept], expected[0][:, kept])
