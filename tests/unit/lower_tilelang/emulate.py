"""Lowered variants on the CPU: the text of their modules over the emulation of CUDA, called as the CUDA kernels are."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

from kvgen._resources import templates
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.lower.tilelang.backend import TileLangBackend
from kvgen.lower.tilelang.sizes import Q_ROWS, sizes_of
from kvgen.spec import KernelSpec
from tests.support.plan import PlanShape
from tests.unit.lower_cuda.emulate import library
from tests.unit.lower_cuda.emulate_attend import CALLS
from tests.unit.lower_cuda.emulate_attend import Emulated as EmulatedAttend

EMULATION = """
struct uint1 { unsigned x; };
inline uint1 make_uint1(unsigned x) { return {x}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
using half2 = __half2;
namespace kvgen::ptx {
inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  const int lane = emulator::current % 32;
  const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(warp.words[lane], words, sizeof words);
  emulator::meet(warp, [&] {
    const auto value = [&](int of, int word, int half) { return __uint_as_float(warp.words[of][word] >> 16 * half << 16); };
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        double sum = 0;
        for (int k = 0; k < 16; ++k)
          sum += static_cast<double>(value(l / 4 * 4 + k % 8 / 2, k / 8 * 2 + i / 2, k % 2)) *
                 value((l % 4 * 2 + i % 2) * 4 + k % 8 / 2, 4 + k / 8, k % 2);
        warp.sums[l][i] = static_cast<float>(sum);
      }
  });
  for (int i = 0; i < 4; ++i) d[i] += warp.sums[lane][i];
  emulator::meet(warp, [] {});
}
}  // namespace kvgen::ptx
"""
"""What generated text needs beyond kvgen's own kernels, in place of `tilelang_mma.cuh`."""


class Emulated(EmulatedAttend):
    """`attend` and `decode` of one variant."""

    def __init__(self, spec: KernelSpec, schedule: Schedule, folder: Path) -> None:
        self.spec, self.sizes, self.exact = spec, sizes_of(spec, schedule), True
        self.layout = self.sizes.layout
        text = TileLangBackend().lower(spec, schedule, "sm90").text
        text = text.replace(
            "extern __shared__ __align__(1024) half_t ring[];", "half_t* ring = reinterpret_cast<half_t*>(emulator::shared);"
        )
        text = text.replace("kvgen/host/exports.cuh", "kvgen/pack/write.cuh")
        text = (
            text[: text.index("using Module")]
            + "}\n"
            + "#define COUNTERS 4 * Attend_::kMaxBatch\n"
            + CALLS.replace("kvgen::Attend<Constants, Schedule>", "Attend")
        )
        for header in (templates() / "tilelang" / "include").rglob("*.cuh"):
            place = folder / header.relative_to(templates() / "tilelang" / "include")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(EMULATION if header.name == "tilelang_mma.cuh" else header.read_text())
        (folder / "math_constants.h").write_text("#define CUDART_INF_F INFINITY\n")
        self.library = ctypes.CDLL(str(library(text, folder)))
        for called in (self.library.workspace_bytes, self.library.counter_bytes, self.library.prefetched, self.library.launched_bytes):
            called.restype = ctypes.c_int64
        self.library.show.argtypes = [ctypes.c_bool]

    def plan_shape(self, batch: int, q_len: int, append: bool) -> PlanShape:
        """Runs of query rows are heads of their own."""
        runs = -(-self.spec.attention.group * q_len // Q_ROWS)
        return replace(super().plan_shape(batch, q_len, append), heads=self.spec.attention.kv_heads * runs)


def schedule(block: int = 128, **launch: Value) -> Schedule:
    """A schedule of one CTA per multiprocessor, so that few threads are emulated."""
    return Schedule("tilelang", Params(block=block, order="mma"), Params({"kv_tile": 64, "stages": 2, "ctas_per_sm": 2, **launch}))
