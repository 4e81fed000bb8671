// MMA products of the softmax weights and V's codes, for one sub-tile of 32 packed tokens.
#pragma once
#include "kvgen/format/places.cuh"
#include "kvgen/mainloop/softmax.cuh"

namespace kvgen {

// What a weight of 1 times a code of 1 is in the accumulators.
template <class Traits>
constexpr float value_unit() {
  using Codec = typename Traits::Value::Codec;
  if constexpr (Traits::kHalfScales)
    return Codec::kUnit * Codec::kScaleUnit;
  else
    return Codec::kUnit;
}

// The accumulators of weights * V's codes.
template <class Traits>
__device__ __forceinline__ float (&code_sums(State<Traits>& state))[Traits::kRowTiles][4] {
  if constexpr (Traits::kValuePerChannel)
    return state.group.codes;
  else
    return state.out;
}

// Codes of which every pattern of bits is a finite number.
template <class Codec, class = void>
constexpr bool kFiniteCodes = false;
template <class Codec>
constexpr bool kFiniteCodes<Codec, std::enable_if_t<(Codec::kBits <= 4 || Codec::kTop > 0)>> = true;

// The tokens of a sub-tile whose V takes part: the first `count`. Of a block that is partly filled the others' codes or scales may be NaN,
// which a weight of 0 does not make 0.
template <class Traits, bool kMasked>
struct ValueTokens {
  static constexpr bool kActive = kMasked && Traits::kArrival && (Traits::kHalfScales || !kFiniteCodes<typename Traits::Value::Codec>);
  int count;

  // Clears operands of other tokens, of which a lane has tokens 2t and 2t + 1 in `low`, and those 8 further in `high`.
  __device__ __forceinline__ void clear(int k_step, int lane, uint32_t& low, uint32_t& high) const {
    if constexpr (kActive) {
      const int left = count - 16 * k_step - 2 * (lane % 4);
      low &= pair(left), high &= pair(left - 8);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t pair(int left) { return left >= 2 ? ~0u : left == 1 ? 0xffffu : 0; }
};

// The scales of V that multiply a lane's weights: of tokens 2t and 2t + 1 of a k-step, and of those 8 further.
template <class Traits>
struct WeightScales {
  uint32_t halves[2];

  // `params`: of the sub-tile's tokens. The scales of the tokens g, g + 8, … lie together.
  __device__ __forceinline__ void load(uint32_t params, int group, int k_step, int lane) {
    using Param = typename Traits::Value::Codec::Param;
    const int place = group * 8 + lane % 4 * 2;
    if constexpr (Traits::kHalfStride) {
      const uint32_t pair = ptx::load_shared4(params + k_step * Traits::kHalfStride + place * 2);
      halves[0] = to_halves(Param{}, pair, pair >> 16, 0), halves[1] = to_halves(Param{}, pair, pair >> 16, 1);
    } else {
      const uint2 pair = ptx::load_shared8(params + place * 4);
      halves[0] = to_halves(Param{}, pair.x, pair.y, 2 * k_step), halves[1] = to_halves(Param{}, pair.x, pair.y, 2 * k_step + 1);
    }
  }
  __device__ __forceinline__ uint32_t times(const uint32_t (&weights)[2], int half) const {
    return ptx::as_u32(__hmul2(ptx::as_half2(weights[half]), ptx::as_half2(halves[half])));
  }
};

// Adds weights * V's codes to the accumulators, for the sub-tile at `token` of its KV tile. `params`: the tile's channel params of V.
template <class Traits, int kStepSubtiles, class Tokens>
__device__ __forceinline__ void multiply_values(uint32_t codes, uint32_t params, int token, int lane,
                                                const Weights<Traits> (&weights)[Traits::kQTiles][kStepSubtiles], int s,
                                                State<Traits> (&state)[Traits::kQTiles], const Tokens& tokens) {
  using Codec = typename Traits::Value::Codec;
  constexpr int kTiles = Traits::Value::kCodeChannels / Codec::kRows;
  constexpr bool kWhole = Traits::Value::kCodeChannels == Traits::kHeadDim;  // else the last words hold one row tile, not two
  constexpr int kTilesPerGroup = Traits::kRowTiles / Traits::kValueGroups;
  constexpr int kParams = Traits::Value::kTokenParams - Traits::Value::kCodes;
  visit_subtile<Codec, 2 * kTiles, Traits::kHalfStride>(codes, lane, [&](int pair, const uint32_t* words) {
    const int k_step = pair / kTiles, at = token + 16 * k_step;
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
      if (pair % kTiles == 0) state[tile].group.begin(at);
    Codec::template expand<true, Traits::kMixedValues>(words, pair % kTiles,
                                                       [&](int rows, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
                                                         if (!kWhole && rows >= Traits::kRowTiles) return;
                                                         WeightScales<Traits> scales;
                                                         if constexpr (Traits::kHalfScales) {
                                                           scales.load(codes + kParams, rows, k_step, lane);
                                                           tokens.clear(k_step, lane, scales.halves[0], scales.halves[1]);
                                                         } else {
                                                           tokens.clear(k_step, lane, a0, a2), tokens.clear(k_step, lane, a1, a3);
                                                         }
#pragma unroll
                                                         for (int tile = 0; tile < Traits::kQTiles; ++tile) {
                                                           const uint32_t(&b)[2] = weights[tile][s][rows / kTilesPerGroup][k_step];
                                                           float(&sums)[4] = code_sums(state[tile])[rows];
                                                           if constexpr (Traits::kHalfScales)
                                                             ptx::mma(sums, a0, a1, a2, a3, scales.times(b, 0), scales.times(b, 1));
                                                           else
                                                             ptx::mma(sums, a0, a1, a2, a3, b[0], b[1]);
                                                         }
                                                       });
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
      if (pair % kTiles == kTiles - 1) state[tile].group.end(at, weights[tile][s][0][k_step], params, lane, state[tile].out);
  });
}

// Divides sums of the residual's values by V's static scales, so that codes can be added to them.
template <class Traits>
__device__ __forceinline__ void divide_values(State<Traits> (&state)[Traits::kQTiles], const float* scales, int lane) {
#pragma unroll
  for (int u = 0; u < Traits::kRowTiles; ++u)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = 1.f / scales[Traits::ValueRuns::tile_channel(u, lane / 8) + lane / 4 % 2 + 2 * half];
#pragma unroll
      for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
        for (int c = 0; c < 2; ++c) state[tile].out[u][2 * half + c] *= inverse;
    }
}

// Converts the accumulators to sums of weight * code. V per channel: they are sums of p * v.
template <class Traits>
__device__ __forceinline__ void unmix_values(State<Traits>& state) {
  if constexpr (Traits::kValuePerChannel) return;
  using Codec = typename Traits::Value::Codec;
  float none[4] = {};  // stands in for the second tile of a pair that has one tile only
#pragma unroll
  for (int u = 0; u < Traits::kRowTiles; u += 2) {
    if constexpr (Traits::kMixedValues) Codec::unmix(state.out[u], u + 1 < Traits::kRowTiles ? state.out[u + 1] : none);
#pragma unroll
    for (int i = 0; i < 8 && u + i / 4 < Traits::kRowTiles; ++i)
      state.out[u + i / 4][i % 4] *= Codec::row_factor(i / 4, i % 4 / 2) / value_unit<Traits>();
  }
}

// Inverse of `unmix_values`, so that the MMA can add to the accumulators.
template <class Traits>
__device__ __forceinline__ void mix_values(State<Traits>& state) {
  if constexpr (Traits::kValuePerChannel) return;
  using Codec = typename Traits::Value::Codec;
  float none[4] = {};
#pragma unroll
  for (int u = 0; u < Traits::kRowTiles; u += 2) {
#pragma unroll
    for (int i = 0; i < 8 && u + i / 4 < Traits::kRowTiles; ++i)
      state.out[u + i / 4][i % 4] *= value_unit<Traits>() / Codec::row_factor(i / 4, i % 4 / 2);
    if constexpr (Traits::kMixedValues) Codec::mix(state.out[u], u + 1 < Traits::kRowTiles ? state.out[u + 1] : none);
  }
}

}  // namespace kvgen
