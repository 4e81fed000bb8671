// MMA products of one sub-tile of 32 packed tokens. Scales and zeros are applied outside the MMA.
#pragma once
#include "kvgen/format/fragments.cuh"
#include "kvgen/mainloop/boost.cuh"
#include "kvgen/mainloop/query.cuh"
#include "kvgen/mainloop/softmax.cuh"
#include "kvgen/mainloop/traits.cuh"

namespace kvgen {

// Loads scales and zeros of the tokens g, g + 8, g + 16 and g + 24 of a lane that holds scores of them all: they are contiguous.
template <class Traits, int kGroups>
__device__ __forceinline__ void load_row_params_of_all(uint32_t address, int lane, float (&scale)[2][kGroups][2],
                                                       float (&zero)[2][kGroups][2]) {
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const uint4 v = ptx::load_shared16(address + (q * 8 + lane / 4) * 16);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(ptx::as_half2(words[i]));
      scale[i / 2][q][i % 2] = pair.x, zero[i / 2][q][i % 2] = pair.y;
    }
  }
}

// Loads the per-token params of the tokens whose scores a lane holds.
template <class Traits, class Quant, int kGroups>
__device__ __forceinline__ void load_row_params(uint32_t address, int lane, float (&scale)[Traits::kMTiles][kGroups][2],
                                                float (&zero)[Traits::kMTiles][kGroups][2]) {
  constexpr int kRowBytes = Quant::kZero ? 4 : 2;  // params of a token
  if constexpr (Quant::kZero && Traits::kMTiles == 2 && !Traits::kHalfStride)
    return load_row_params_of_all<Traits>(address, lane, scale, zero);
#pragma unroll
  for (int q = 0; q < kGroups; ++q)
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile) {
      const int half = Traits::kQueryTwice ? lane % 4 / 2 : m_tile;  // a lane's params are contiguous in a block
      const int at =
          Traits::kHalfStride ? (q * 8 + lane / 4) * 2 + half * (Traits::kHalfStride / kRowBytes) : (q * 8 + lane / 4) * 4 + 2 * half;
      if constexpr (Quant::kZero) {
        const uint2 v = ptx::load_shared8(address + at * kRowBytes);
        const float2 first = __half22float2(ptx::as_half2(v.x)), second = __half22float2(ptx::as_half2(v.y));
        scale[m_tile][q][0] = first.x, zero[m_tile][q][0] = first.y, scale[m_tile][q][1] = second.x, zero[m_tile][q][1] = second.y;
      } else {
        const float2 v = __half22float2(ptx::as_half2(ptx::load_shared4(address + at * kRowBytes)));
        scale[m_tile][q][0] = v.x, zero[m_tile][q][0] = -v.x * Quant::kOffset;
        scale[m_tile][q][1] = v.y, zero[m_tile][q][1] = -v.y * Quant::kOffset;
      }
    }
}

// In every 16 tokens the codes of the first eight are complemented: p * s * code = p * s * -(top - code) + p * s * top. The sums of codes
// then stay near zero over a long cache; otherwise the result, after the zeros are added, would be lost in the rounding of the tensor
// cores. The instruction that masks the codes also sets their sign.
template <class Traits>
__device__ __forceinline__ void load_value_params(uint32_t address, int lane, ValueParams<Traits>& params) {
  if constexpr (Traits::kValuePerToken) {
    load_row_params<Traits, typename Traits::Value, Traits::kValueGroups>(address, lane, params.scale, params.zero);
    constexpr float kTop = (1 << Traits::Value::kBits) - 1;
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) {
        float(&scale)[2] = params.scale[m_tile][q], (&zero)[2] = params.zero[m_tile][q];
        if constexpr (kZerosInScales<Traits>) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (scale[half] == 0.f) scale[half] = kScaleOfConstants;
            zero[half] = fmaf(zero[half], ptx::reciprocal(scale[half]), half == 0 ? kTop : 0.f);
          }
        } else {
          scale[0] += kSmallestScale, scale[1] += kSmallestScale;
          zero[0] = fmaf(scale[0], kTop, zero[0]);
        }
      }
  } else {
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
      params.scale[m_tile][0][0] = params.scale[m_tile][0][1] = 1.f, params.zero[m_tile][0][0] = params.zero[m_tile][0][1] = 0.f;
  }
}

// Multiplies K's codes with q of all tiles of query rows, so that each code is expanded once.
template <class Traits>
__device__ __forceinline__ void multiply_keys(uint32_t subtile, int lane,
                                              const QueryFragments<Traits> (&query)[Traits::kSubtileKeyGroups][Traits::kQTiles],
                                              const BoostQuery<Traits> (&boost)[Traits::kQTiles],
                                              Products<Traits> (&products)[Traits::kQTiles]) {
  constexpr int kBits = Traits::Key::kBits;
  constexpr int kStepsPerGroup = Traits::kSteps / Traits::kKeyGroups;
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
    for (int q = 0; q < Traits::kKeyGroups; ++q)
#pragma unroll
      for (int i = 0; i < 8; ++i) products[tile][q][i / 4][i % 4] = 0.f;
  visit_subtile<kBits, 32 / Fragment<kBits>::kRows * Traits::kSteps, Traits::kHalfStride>(
      subtile + Traits::Format::kKeyCodes, lane, [&](int pair, const uint32_t* words) {
        const int step = pair % Traits::kSteps;
        expand<kBits, typename Traits::Format::Element, false, Traits::kMixedKeys>(
            words, pair / Traits::kSteps, [&](int rows, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
              for (int tile = 0; tile < Traits::kQTiles; ++tile) {
                float(&sum)[4] = products[tile][step / kStepsPerGroup][rows];
                const QueryFragments<Traits>& q = query[rows % Traits::kSubtileKeyGroups][tile];
                ptx::mma(sum, a0, a1, a2, a3, q.high[step][0], q.high[step][1]);
                if constexpr (QueryFragments<Traits>::kLow) ptx::mma(sum, a0, a1, a2, a3, q.low[step][0], q.low[step][1]);
              }
            });
      });
  if constexpr (Traits::Format::kBoosted > 0) multiply_boost<Traits>(subtile + Traits::Format::kBoostCodes, lane, boost, products);
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
    for (int q = 0; q < Traits::kKeyGroups; ++q)
      if constexpr (Traits::kMixedKeys && !Traits::kUnmixedSums) unmix<kBits>(products[tile][q][0], products[tile][q][1]);
}

// The products of the tokens whose scores a lane holds. With kQueryTwice both halves of the columns have the same products: lanes with t <
// 2 keep tokens 0..15, the others tokens 16..31.
template <class Traits>
__device__ __forceinline__ void own_products(const float (&low)[4], const float (&high)[4], int lane, LaneValues<Traits>& own) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    own[0][i] = Traits::kQueryTwice && lane % 4 >= 2 ? high[i] : low[i];
    if constexpr (!Traits::kQueryTwice) own[1][i] = high[i];
  }
}

// The same where columns 4..7 hold the products with q's rounding error, which are added. Lanes exchange products through the shared memory
// of the sub-tiles' K codes if it is large enough, since shuffles take twice the instructions.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ void own_sums(uint32_t codes, const Products<Traits> (&products)[kStepSubtiles][Traits::kQTiles], int lane,
                                         Scores<Traits> (&x)[kStepSubtiles]) {
  const bool first = lane % 4 < 2;
  if constexpr (Traits::kExchangeShared) {
    const uint32_t mine = codes + lane * 16, at = (lane / 4 * 4 + lane % 2) * 16 + (first ? 0 : 512 + 32);  // + 32 avoids bank conflicts
    constexpr int kStride = Traits::Format::kSubtileBytes;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s)
      ptx::store_shared16(mine + s * kStride, products[s][0][0][0]), ptx::store_shared16(mine + s * kStride + 512, products[s][0][0][1]);
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s) {
      const uint4 a = ptx::load_shared16(codes + at + s * kStride), b = ptx::load_shared16(codes + (at ^ 32) + s * kStride);
      float(&own)[4] = x[s].product[0];
      own[0] = __uint_as_float(a.x) + __uint_as_float(b.x), own[1] = __uint_as_float(a.y) + __uint_as_float(b.y);
      own[2] = __uint_as_float(a.z) + __uint_as_float(b.z), own[3] = __uint_as_float(a.w) + __uint_as_float(b.w);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s) {
      const float(&low)[4] = products[s][0][0][0], (&high)[4] = products[s][0][0][1];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[s].product[0][i] = (first ? low[i] : high[i]) + __shfl_xor_sync(~0u, first ? high[i] : low[i], 2);
    }
  }
  if constexpr (Traits::kUnmixedSums) {
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s)
#pragma unroll
      for (int c = 0; c < 2; ++c) x[s].product[0][2 + c] -= x[s].product[0][c];
  }
}

// The factors that turn a lane's products into scores in log2 units: they undo the position of a token's code fields and the unit of the
// codes, and apply the factor of the query row. [m_tile][2 * half + c].
template <class Traits>
__device__ __forceinline__ void row_factors(const float* q_factors, int tile, int lane, LaneValues<Traits>& factors) {
  constexpr int kBits = Traits::Key::kBits;
#pragma unroll
  for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float row = Traits::kQueryTwice ? (lane % 4 < 2 ? row_factor<kBits>(0, i / 2) : row_factor<kBits>(1, i / 2))
                                            : row_factor<kBits>(m_tile, i / 2);
      factors[m_tile][i] = row / (Traits::kIntegerKeys ? 1.f : kCodeUnit<typename Traits::Key>)*q_factors[q_row<Traits>(tile, lane, i)];
    }
}

// The accumulators of weights * V's codes.
template <class Traits>
__device__ __forceinline__ float (&code_sums(State<Traits>& state))[Traits::kRowTiles][4] {
  if constexpr (Traits::kValuePerChannel)
    return state.group.codes;
  else
    return state.out;
}

// Adds weights * V's codes to the accumulators, for the sub-tile at `token` of its KV tile. `params`: the tile's channel params of V.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ void multiply_values(uint32_t codes, uint32_t params, int token, int lane,
                                                const Weights<Traits> (&weights)[Traits::kQTiles][kStepSubtiles], int s,
                                                State<Traits> (&state)[Traits::kQTiles]) {
  constexpr int kBits = Traits::Value::kBits;
  constexpr int kTiles = Traits::kHeadDim / Fragment<kBits>::kRows;
  constexpr int kTilesPerGroup = Traits::kRowTiles / Traits::kValueGroups;
  visit_subtile<kBits, 2 * kTiles, Traits::kHalfStride>(codes, lane, [&](int pair, const uint32_t* words) {
    const int k_step = pair / kTiles, at = token + 16 * k_step;
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
      if (pair % kTiles == 0) state[tile].group.begin(at);
    expand<kBits, typename Traits::Format::Element, true>(words, pair % kTiles,
                                                          [&](int rows, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
                                                            for (int tile = 0; tile < Traits::kQTiles; ++tile) {
                                                              const uint32_t(&b)[2] = weights[tile][s][rows / kTilesPerGroup][k_step];
                                                              ptx::mma(code_sums(state[tile])[rows], a0, a1, a2, a3, b[0], b[1]);
                                                            }
                                                          });
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
      if (pair % kTiles == kTiles - 1) state[tile].group.end(at, weights[tile][s][0][k_step], params, lane, state[tile].out);
  });
}

// Converts the accumulators to sums of p * code. V per channel: they are sums of p * v.
template <class Traits>
__device__ __forceinline__ void unmix_values(State<Traits>& state) {
  if constexpr (Traits::kValuePerChannel) return;
  constexpr int kBits = Traits::Value::kBits;
  float none[4] = {};  // in place of the second tile of a pair that has one
#pragma unroll
  for (int u = 0; u < Traits::kRowTiles; u += 2) {
    unmix<kBits>(state.out[u], u + 1 < Traits::kRowTiles ? state.out[u + 1] : none);
#pragma unroll
    for (int i = 0; i < 8 && u + i / 4 < Traits::kRowTiles; ++i)
      state.out[u + i / 4][i % 4] *= row_factor<kBits>(i / 4, i % 4 / 2) / kCodeUnit<typename Traits::Value>;
  }
}

// Inverse of `unmix_values`, so that the MMA can add to the accumulators.
template <class Traits>
__device__ __forceinline__ void mix_values(State<Traits>& state) {
  if constexpr (Traits::kValuePerChannel) return;
  constexpr int kBits = Traits::Value::kBits;
  float none[4] = {};
#pragma unroll
  for (int u = 0; u < Traits::kRowTiles; u += 2) {
#pragma unroll
    for (int i = 0; i < 8 && u + i / 4 < Traits::kRowTiles; ++i)
      state.out[u + i / 4][i % 4] *= kCodeUnit<typename Traits::Value> / row_factor<kBits>(i / 4, i % 4 / 2);
    mix<kBits>(state.out[u], u + 1 < Traits::kRowTiles ? state.out[u + 1] : none);
  }
}

}  // namespace kvgen
