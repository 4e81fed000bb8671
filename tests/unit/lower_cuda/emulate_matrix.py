"""The CUDA kernels that quantize a matrix, run on the CPU by the emulator."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kvgen.lower.schedule import Params
from tests.unit.lower_cuda.emulate import library

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
EXPORTS = """
#include "kvgen/matrix/kernels.cuh"
using namespace kvgen::matrix;
struct Schedule {{
  using Element = {element};
  static constexpr int kThreadsX = {launch[channel_threads]}, kThreadsY = {launch[row_threads]}, kThreads = kThreadsX * kThreadsY;
  static constexpr int kVector = {launch[vector]}, kRows = {launch[rows]};
  static constexpr bool kSharedScales = {shared}, kStreaming = {streaming};
  static constexpr Quotient kQuotient = Quotient::{launch[quotient]};
}};
template <int kVector>
void run(int function, void* x, float* scales, int8_t* codes, const int64_t* n) {{
  using Element = Schedule::Element;
  const Matrix<Element> matrix{{static_cast<Element*>(x), n[2]}};
  const Matrix<const Element> given{{matrix.data, n[2]}};
  const Matrix<int8_t> coded{{codes, n[3]}};
  if (function == 0) launch_scales<Schedule, kVector>(given, scales, n[0], n[1], n[4], nullptr);
  if (function == 1) launch_map<ToCode, Schedule, kVector, Element, int8_t>(given, coded, scales, n[0], n[1], nullptr);
  if (function == 2) launch_map<FromCode, Schedule, kVector, int8_t, Element>({{codes, n[3]}}, matrix, scales, n[0], n[1], nullptr);
}}
extern "C" void call(int function, bool backwards, bool wide, void* x, float* scales, int8_t* codes, const int64_t* n) {{
  emulator::backwards = backwards;
  wide ? run<Schedule::kVector>(function, x, scales, codes, n) : run<1>(function, x, scales, codes, n);
}}
"""


class EmulatedMatrix:
    """scales, quantize and dequantize of one schedule, by vectors where the host would call the kernels that take them."""

    def __init__(self, dtype: torch.dtype, launch: Params, folder: Path) -> None:
        shared, streaming = (str(launch[name] == value).lower() for name, value in (("scales", "shared"), ("cache", "streaming")))
        text = EXPORTS.format(element=ELEMENTS[dtype], launch=launch, shared=shared, streaming=streaming)
        self.library = ctypes.CDLL(str(library(text, folder)))
        self.vector = launch.integer("vector")

    def run(
        self, function: int, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, backwards: bool = False, processors: int = 3
    ) -> None:
        """0: x to scales, 1: x and scales to codes, 2: codes and scales to x. CTAs run in the order of their numbers or `backwards`."""
        wide = self._fits(x) and (function == 0 or (self._fits(codes) and self._starts(scales)))
        numbers = (ctypes.c_int64 * 5)(*x.shape, x.stride(0), codes.stride(0), processors)
        pointers = (ctypes.c_void_p(one.data_ptr()) for one in (x, scales, codes))
        self.library.call(function, ctypes.c_bool(backwards), ctypes.c_bool(wide), *pointers, numbers)

    def _fits(self, x: torch.Tensor) -> bool:
        """As `Arguments::fits` of matrix/arguments.hpp."""
        return x.shape[1] % self.vector == 0 and (len(x) < 2 or x.stride(0) % self.vector == 0) and self._starts(x)

    def _starts(self, x: torch.Tensor) -> bool:
        return x.data_ptr() % min(16, self.vector * x.element_size()) == 0
