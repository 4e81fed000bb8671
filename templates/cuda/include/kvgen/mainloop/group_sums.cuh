// V with scales per channel (as in the preset int8-per-channel): P * V of a group of tokens is summed as p * code; at the end of the group,
// or of the KV tile, the sums are multiplied by the channels' scales and added to the output. Weights are p alone.
#pragma once
#include "kvgen/format/places.cuh"

namespace kvgen {

// Empty for other formats of V.
template <class Traits, bool kUsed = Traits::kValuePerChannel>
struct GroupSums {
  __device__ __forceinline__ void rescale(const float (&)[2]) {}
  __device__ __forceinline__ void begin(int) {}
  __device__ __forceinline__ void end(int, const uint32_t (&)[2], uint32_t, int, float (&)[Traits::kRowTiles][4]) {}
};

template <class Traits>
struct GroupSums<Traits, true> {
  using Value = typename Traits::Value;
  using Params = typename Traits::ValueChannelParams;
  float codes[Traits::kRowTiles][4];  // of p * code, laid out as State::out, in mixed form
  float weights[4];                   // of p: for the two rows over all tokens, then over those whose codes are complemented

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      weights[c] *= factor[c], weights[2 + c] *= factor[c];
#pragma unroll
      for (int u = 0; u < Traits::kRowTiles; ++u) codes[u][c] *= factor[c], codes[u][2 + c] *= factor[c];
    }
  }

  // Before the 16 tokens from `token` of a KV tile on.
  __device__ __forceinline__ void begin(int token) {
    if (token % Params::kTokens) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = 0.f;
#pragma unroll
      for (int u = 0; u < Traits::kRowTiles; ++u) codes[u][i] = 0.f;
    }
  }

  // After those 16 tokens, whose weights are `b`. `params`: the tile's channel params of V.
  __device__ __forceinline__ void end(int token, const uint32_t (&b)[2], uint32_t params, int lane, float (&out)[Traits::kRowTiles][4]) {
    constexpr uint32_t kOnes = 0x3c003c00;  // rows 0..7 sum all k-slots, rows 8..15 the first eight, whose codes are complemented
    ptx::mma(weights, kOnes, kOnes, kOnes, 0u, b[0], b[1]);
    if ((token + 16) % Params::kTokens == 0) fold(params + token / Params::kTokens * Params::kSetBytes, lane, out);
  }

 private:
  // Adds scale * (sum of p * code) + zero * (sum of p) to the output.
  __device__ __forceinline__ void fold(uint32_t params, int lane, float (&out)[Traits::kRowTiles][4]) {
    using Codec = typename Value::Codec;
    constexpr int kParams = Value::kParams;
    constexpr float kTop = Codec::kTop;
    const uint32_t mine = params + lane / 4 * (Traits::kRowTiles * kParams * 4);  // of rows g, g + 8, ...
    float shift[2];  // undoes the complements, and the offset of symmetric codes
#pragma unroll
    for (int c = 0; c < 2; ++c) shift[c] = kTop * weights[2 + c] - static_cast<float>(Codec::kOffset) * weights[c];
    constexpr int kPair = Traits::kRowTiles % 2 ? 1 : 2;  // row tiles per load: with an odd number of them params are aligned for one
    constexpr int kMixed = Codec::kMix == Mix::pair ? 2 : kPair;  // row tiles that are unmixed together; 2-bit codes of two share bytes
    float none[4] = {};                                           // stands in for the second tile
#pragma unroll
    for (int u = 0; u < Traits::kRowTiles; u += kPair) {
      uint32_t words[kPair * kParams];
      load_words(words, mine + u * kParams * 4);
      if (u % kMixed == 0) Codec::unmix(codes[u], kMixed == 2 && u + 1 < Traits::kRowTiles ? codes[u + 1] : none);
#pragma unroll
      for (int row = 0; row < 2 * kPair; ++row) {
        const float2 pair = __half22float2(ptx::as_half2(words[Value::kZero ? row : row / 2]));
        const float scale = Value::kZero || row % 2 == 0 ? pair.x : pair.y;
        const float factor = Codec::row_factor((u + row / 2) % 2, row % 2) / Codec::kUnit;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& sum = out[u + row / 2][row % 2 * 2 + c];
          sum = fmaf(scale, fmaf(codes[u + row / 2][row % 2 * 2 + c], factor, shift[c]), sum);
          if constexpr (Value::kZero) sum = fmaf(pair.y, weights[c], sum);
        }
      }
    }
  }
};

}  // namespace kvgen
