// MMA products of q and K's codes, for one sub-tile of 32 packed tokens.
#pragma once
#include "kvgen/format/fragments.cuh"
#include "kvgen/mainloop/boost.cuh"
#include "kvgen/mainloop/query.cuh"
#include "kvgen/mainloop/softmax.cuh"

namespace kvgen {

// Multiplies K's codes with q of all tiles of query rows, so that each code is expanded once.
template <class Traits>
__device__ __forceinline__ void multiply_keys(uint32_t subtile, int lane,
                                              const QueryFragments<Traits> (&query)[Traits::kSubtileKeyGroups][Traits::kQTiles],
                                              const BoostQuery<Traits> (&boost)[Traits::kQTiles],
                                              Products<Traits> (&products)[Traits::kQTiles]) {
  using Codec = typename Traits::Key::Codec;
  constexpr int kStepsPerGroup = Traits::kSteps / Traits::kKeyGroups;
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
    for (int q = 0; q < Traits::kKeyGroups; ++q)
#pragma unroll
      for (int i = 0; i < 8; ++i) products[tile][q][i / 4][i % 4] = 0.f;
  visit_subtile<Codec, 32 / Codec::kRows * Traits::kSteps, Traits::kHalfStride>(
      subtile + Traits::Key::kCodes, lane, [&](int pair, const uint32_t* words) {
        const int step = pair % Traits::kSteps;
        Codec::template expand<false, Traits::kMixedKeys>(
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
      if constexpr (Traits::kMixedKeys && !Traits::kUnmixedSums) Codec::unmix(products[tile][q][0], products[tile][q][1]);
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
    const uint32_t mine = codes + lane * 16, at = (lane / 4 * 4 + lane % 2) * 16 + (first ? 0 : 512 + 32);  // see the loads
    constexpr int kStride = Traits::Format::kSubtileBytes;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s)
      ptx::store_shared16(mine + s * kStride, products[s][0][0][0]), ptx::store_shared16(mine + s * kStride + 512, products[s][0][0][1]);
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s) {
      // The second group of lanes reads its two addends in the other order, so that both groups use different banks.
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
  using Codec = typename Traits::Key::Codec;
#pragma unroll
  for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float row = Traits::kQueryTwice ? (lane % 4 < 2 ? Codec::row_factor(0, i / 2) : Codec::row_factor(1, i / 2))
                                            : Codec::row_factor(m_tile, i / 2);
      factors[m_tile][i] = row / (Traits::kIntegerKeys ? 1.f : Codec::kUnit) * q_factors[q_row<Traits>(tile, lane, i)];
    }
}

}  // namespace kvgen
