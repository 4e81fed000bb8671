"""The CUDA kernel of rotary embeddings: run by the emulator, and compiled."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from kvgen.integrations.rotary import Rotation, plain, source
from kvgen.toolchain import build
from tests.unit.lower_cuda.emulate import library

EXPORTS = """
#include "kvgen/rotary.cuh"
using namespace kvgen;
extern "C" void call(void* const* t, const int64_t* n) {{
  RotaryArgs a{{{{t[0], t[5], n[0], n[1], n[2], n[3]}}, {{t[1], t[6], n[4], n[5], n[6], n[7]}}, (int)n[8], (int)n[9], n[10]}};
  a.positions = (const int64_t*)t[4], a.cos = (const float*)t[2], a.sin = (const float*)t[3], a.half = n[11], a.interleaved = n[12];
  launch_rotary<{element}, {rotation}, {dim}>(a, nullptr);
}}
"""


@pytest.mark.parametrize(
    ("dtype", "dim", "pairs", "rotation"),
    [(torch.float16, 96, 48, Rotation(32, True)), (torch.bfloat16, 128, 32, None), (torch.float16, 256, 128, Rotation(256, False))],
)
def test_the_emulated_kernel_is_what_torch_computes(
    dtype: torch.dtype, dim: int, pairs: int, rotation: Rotation | None, tmp_path: Path
) -> None:
    hadamard = "NoRotation" if rotation is None else f"Hadamard<{rotation.block}, {str(rotation.signs).lower()}>"
    element = {torch.float16: "Half", torch.bfloat16: "Bfloat"}[dtype]
    emulated = ctypes.CDLL(str(library(EXPORTS.format(element=element, rotation=hadamard, dim=dim), tmp_path)))
    torch.manual_seed(0)
    both = torch.randn(11, 5 + 3, dim).to(dtype)  # q and k side by side, as a projection gives them
    q, k = both[:, :5], both[:, 5:]
    positions = torch.randint(0, 300, (11,))
    cos, sin = torch.randn(300, pairs), torch.randn(300, pairs)
    for interleaved in (False, True):
        outs = [torch.full(x.shape, torch.nan, dtype=dtype) for x in (q, k)]
        numbers = [step for x, out in zip((q, k), outs, strict=True) for step in (*x.stride()[:2], *out.stride()[:2])]
        numbers += [5, 3, 11, pairs, int(interleaved)]
        pointers = [x.data_ptr() for x in (q, k, cos, sin, positions, *outs)]
        emulated.call((ctypes.c_void_p * 7)(*pointers), (ctypes.c_int64 * len(numbers))(*numbers))
        for x, out in zip((q, k), outs, strict=True):
            want = plain(x, cos, sin, positions, interleaved, rotation)
            assert (out.float() - want.float()).abs().max() <= want.float().abs().max() * (2**-10 if dtype == torch.float16 else 2**-7)
            assert (out == want).float().mean() > 0.99


@pytest.mark.nvcc
def test_it_compiles_without_spills() -> None:
    resources = build(source("sm90", torch.bfloat16, 128, 128, True)).resources
    assert resources.spill_bytes == 0
    assert all(kernel.registers <= 64 for kernel in resources.kernels.values())
