// The flush of `decode` for kernels that TileLang generated: packing as `pack` does it.
#pragma once
#include "kvgen/pack/quantize.cuh"
#include "kvgen/tilelang.cuh"

namespace kvgen {

// Packs the first Format::kTokens of a head's unquantized tokens into `block`, and stores those of this step that are left over in their
// rows. Tokens are counted from the end of the packed blocks, up to `count`. Those before `rest` are in the residual, and `length` is the
// length of the sequence with them (it is not used without sink, local and rollback tokens). The step's own tokens are at `fresh` + (token
// - rest) * `stride` from row 0, in units of 16 bytes. All threads call it.
template <class Format, int kThreads>
__device__ __noinline__ void flush_residual(uint* k_rows, uint* v_rows, const uint* block, int64_t fresh_k, int64_t k_stride,
                                            int64_t fresh_v, int64_t v_stride, int rest, int count, void* shared, int length = 0) {
  using Element = typename Format::Element;
  using ResidualRows = typename Format::ResidualRows;
  const auto row = [=](uint* rows, int64_t fresh, int64_t stride, int token) {
    uint4* base = reinterpret_cast<uint4*>(rows);
    return reinterpret_cast<Element*>(token < rest ? base + ResidualRows::row_of(length, token) * (Format::kHeadDim / 8)
                                                   : base + fresh + (token - rest) * stride);
  };
  const auto k_row = [=](int token) -> const Element* { return row(k_rows, fresh_k, k_stride, token); };
  const auto v_row = [=](int token) -> const Element* { return row(v_rows, fresh_v, v_stride, token); };
  uint8_t* bytes = reinterpret_cast<uint8_t*>(const_cast<uint*>(block));
  pack_block<Format, kThreads>(k_row, v_row, bytes, static_cast<uint8_t*>(shared));
  if constexpr (ResidualRows::kRollback > 0) return;  // the warps that attended to the step's tokens have stored them
  constexpr int kVectors = Format::kHeadDim / 8;
  const int first = ResidualRows::kLocal > 0 ? max(rest, Format::kTokens) : Format::kTokens;
  for (int i = threadIdx.x; i < (count - first) * kVectors; i += kThreads) {
    const int token = first + i / kVectors, vector = i % kVectors;
    const int to = i + (ResidualRows::row_of(length + count - rest, token - Format::kTokens) - (token - first)) * kVectors;
    reinterpret_cast<uint4*>(k_rows)[to] = reinterpret_cast<const uint4*>(k_row(token))[vector];
    reinterpret_cast<uint4*>(v_rows)[to] = reinterpret_cast<const uint4*>(v_row(token))[vector];
  }
}

}  // namespace kvgen
