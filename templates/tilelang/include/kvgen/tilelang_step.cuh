// The flush of `decode` for kernels that TileLang generated: packing as `pack` does it.
#pragma once
#include "kvgen/pack/quantize.cuh"
#include "kvgen/tilelang.cuh"

namespace kvgen {

// Packs the first Format::kTokens of a head's `count` unquantized tokens into `block`, and moves the others to the first rows of the
// residual. Token i is in row i of the residual if i < `rest`, else `fresh` + (i - rest) * `stride` from row 0, in units of 16 bytes. All
// threads call it.
template <class Format, int kThreads>
__device__ __noinline__ void flush_tail(uint* k_rows, uint* v_rows, const uint* block, int64_t fresh_k, int64_t k_stride, int64_t fresh_v,
                                        int64_t v_stride, int rest, int count, void* shared) {
  using Element = typename Format::Element;
  const auto row = [rest](uint* rows, int64_t fresh, int64_t stride, int token) {
    uint4* base = reinterpret_cast<uint4*>(rows);
    return reinterpret_cast<Element*>(token < rest ? base + token * (Format::kHeadDim / 8) : base + fresh + (token - rest) * stride);
  };
  const auto k_row = [=](int token) -> const Element* { return row(k_rows, fresh_k, k_stride, token); };
  const auto v_row = [=](int token) -> const Element* { return row(v_rows, fresh_v, v_stride, token); };
  uint8_t* bytes = reinterpret_cast<uint8_t*>(const_cast<uint*>(block));
  pack_block<Format, kThreads>(k_row, v_row, bytes, static_cast<uint8_t*>(shared));
  constexpr int kVectors = Format::kHeadDim / 8;
  for (int i = threadIdx.x; i < (count - Format::kTokens) * kVectors; i += kThreads) {
    const int token = Format::kTokens + i / kVectors, vector = i % kVectors;
    reinterpret_cast<uint4*>(k_rows)[i] = reinterpret_cast<const uint4*>(k_row(token))[vector];
    reinterpret_cast<uint4*>(v_rows)[i] = reinterpret_cast<const uint4*>(v_row(token))[vector];
  }
}

}  // namespace kvgen
