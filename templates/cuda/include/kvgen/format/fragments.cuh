// The words of a lane, as its codec takes them: by MMA tile and k-step.
#pragma once
#include "kvgen/codec/integers.cuh"
#include "kvgen/codec/unquantized.cuh"

namespace kvgen {

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], uint32_t address) {
  if constexpr (kWords == 4) {
    const uint4 v = ptx::load_shared16(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = ptx::load_shared8(address);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = ptx::load_shared4(address);
  }
}

// Visits every (tile, step) pair of an operand in the order of a lane's words: `visit(pair, words)`.
template <class Codec, int kPairs, class Visit>
__device__ __forceinline__ void visit_words(uint32_t codes, int lane, Visit&& visit) {
  constexpr int kWords = Codec::kWords;
  constexpr int kVector = vector_words(kPairs * kWords);
  constexpr int kChunk = kVector > kWords ? kVector : kWords;  // words per iteration: whole pairs, and whole loads
#pragma unroll
  for (int at = 0; at < kPairs * kWords; at += kChunk) {
    uint32_t words[kChunk / kVector][kVector];
#pragma unroll
    for (int load = 0; load < kChunk / kVector; ++load)
      load_words<kVector>(words[load], codes + ((at / kVector + load) * 32 + lane) * kVector * 4);
#pragma unroll
    for (int i = 0; i < kChunk / kWords; ++i) visit(at / kWords + i, &words[0][0] + i * kWords);
  }
}

// The same for a sub-tile, or for two of 16 tokens that lie kHalfStride bytes apart.
template <class Codec, int kPairs, int kHalfStride, class Visit>
__device__ __forceinline__ void visit_subtile(uint32_t codes, int lane, Visit&& visit) {
  if constexpr (kHalfStride == 0) {
    visit_words<Codec, kPairs>(codes, lane, visit);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visit_words<Codec, kPairs / 2>(codes + half * kHalfStride, lane,
                                     [&](int pair, const uint32_t* words) { visit(half * (kPairs / 2) + pair, words); });
  }
}

}  // namespace kvgen
