// The flush of `decode` for kernels that TileLang generated: packing as `pack` does it.
#pragma once
#include "kvgen/pack/quantize.cuh"
#include "kvgen/tilelang.cuh"

namespace kvgen {

// Packs the first Format::kTokens rows of a head's tail into `block`, and moves the rest to the front of the residual. Row i is in
// slot i below `rest`, else at `fresh` + (i - rest) * `stride`, both in 16 bytes from the first slot. All threads call it.
template <class Format, int kThreads>
__device__ __noinline__ void flush_tail(uint* k_slots, uint* v_slots, const uint* block, int64_t fresh_k, int64_t k_stride, int64_t fresh_v,
                                        int64_t v_stride, int rest, int tail, void* shared) {
  using Element = typename Format::Element;
  const auto row = [rest](uint* slots, int64_t fresh, int64_t stride, int token) {
    uint4* base = reinterpret_cast<uint4*>(slots);
    return reinterpret_cast<Element*>(token < rest ? base + token * (Format::kHeadDim / 8) : base + fresh + (token - rest) * stride);
  };
  const auto k_row = [=](int token) -> const Element* { return row(k_slots, fresh_k, k_stride, token); };
  const auto v_row = [=](int token) -> const Element* { return row(v_slots, fresh_v, v_stride, token); };
  uint8_t* bytes = reinterpret_cast<uint8_t*>(const_cast<uint*>(block));
  pack_block<Format, kThreads>(k_row, v_row, bytes, static_cast<uint8_t*>(shared));
  constexpr int kPieces = Format::kHeadDim / 8;
  for (int i = threadIdx.x; i < (tail - Format::kTokens) * kPieces; i += kThreads) {
    const int token = Format::kTokens + i / kPieces, piece = i % kPieces;
    reinterpret_cast<uint4*>(k_slots)[i] = reinterpret_cast<const uint4*>(k_row(token))[piece];
    reinterpret_cast<uint4*>(v_slots)[i] = reinterpret_cast<const uint4*>(v_row(token))[piece];
  }
}

}  // namespace kvgen
