// MMA products of q and K's codes, for one sub-tile of 32 packed tokens.
#pragma once
#include "kvgen/format/places.cuh"
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
                float(&sum)[4] = products[tile][step / kStepsPerGroup][Traits::kQueryApart ? 0 : rows];
                const QueryFragments<Traits>& q = query[rows % Traits::kSubtileKeyGroups][tile];
                const uint32_t(&operands)[2] = q.of(rows, step);
                ptx::mma(sum, a0, a1, a2, a3, operands[0], operands[1]);
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
// 2 keep tokens 0..15, the others tokens 16..31. With kQueryApart `low` has these already.
template <class Traits>
__device__ __forceinline__ void own_products(const float (&low)[4], const float (&high)[4], int lane, LaneValues<Traits>& own) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    own[0][i] = Traits::kQueryTwice && !Traits::kQueryApart && lane % 4 >= 2 ? high[i] : low[i];
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

// Products of K's codes with q * scale as integers, where a schedule does without exact q. q * scale is rounded to 16 bits: columns 0..3 of
// the MMA have the upper byte, columns 4..7 the lower one. Codes are bytes of A as they lie in memory: a word of 4-bit codes takes one
// mask, where fp16 operands take four instructions, and an MMA multiplies 32 channels instead of 16.

// Rounds q * scale to digits by additions in fp16. A unit is the value of 1 in the upper byte. fp16 numbers from 1024 to 2047 units are one
// unit apart, so adding 1536 units rounds to whole units, and the low byte of the sum is the upper digit; numbers near 6 units are 1 / 256
// apart, which gives the lower digit likewise. All numbers are powers of two times small integers, so differences are exact.
struct Digits {
  __half2 upper;   // 1536 units
  __half2 factor;  // 0 in the lanes of upper bytes, -1 in those of lower ones
  __half2 sum;     // 1536 units, or 1536 + 6
  __half2 most;    // no limit, or 6 + 127 / 256: a remainder of half a unit would be 128
  float unit;      // of the 16-bit integer

  // `largest`: of |q * scale| in a row, per half. 2^-7 of it is added, so that no upper byte is rounded up to 128.
  __device__ __forceinline__ Digits(__half2 largest, int lane) {
    const uint32_t pair = ptx::as_u32(largest);
    const uint32_t exponent = max((max(pair & 0xffff, pair >> 16) + 8) & 0x7c00, 5u << 10);  // as bits of a half; 5: `most` is normal
    const bool lower = lane >= 16;
    upper = both(exponent + (4 << 10) + 0x200);
    factor = both(lower ? 0xbc00 : 0);
    sum = lower ? both(exponent + (4 << 10) + 0x206) : upper;
    most = both(lower ? exponent - (4 << 10) + 0x27f : 0x7bff);
    // 1536 units are more than fp16 holds: a NaN shows that, where products of wrong digits would not.
    unit = __uint_as_float(exponent > 26u << 10 ? 0x7fffffff : (exponent << 13) + ((127 - 15 - 6 - 8) << 23));
  }
  // The digits of two elements, in bytes 0 and 2.
  __device__ __forceinline__ uint32_t operator()(uint32_t q, uint32_t scale) const {
    const __half2 q2 = ptx::as_half2(q), scale2 = ptx::as_half2(scale);
    const __half2 before = __hfma2(__hfma2(q2, scale2, upper), factor, sum);
    return ptx::as_u32(__hmin2(__hfma2(q2, scale2, before), most));
  }

 private:
  __device__ static __half2 both(uint32_t half) { return ptx::as_half2(half * 0x10001); }
};

// B fragments of q times the scales of a K group.
template <class Traits>
struct IntegerQuery {
  using Runs = typename Traits::KeyRuns;
  uint32_t digits[Traits::kSteps];
  float unit[2];  // of the products of a lane's rows

  // Also computes the rows' sums of q * zero (symmetric codes: q * scale).
  __device__ __forceinline__ void load_scaled(uint32_t fragments, uint32_t params, int tile, int lane, float (&affine)[2]) {
    float even[4] = {}, odd[4] = {};
    uint32_t q[Traits::kSteps][2], scale[Traits::kSteps][2];
    __half2 largest = __float2half2_rn(0.f);
#pragma unroll
    for (int x = 0; x < Runs::kCount; ++x) {
      const uint4 v = load_query<Traits>(fragments, tile, x, lane);
      const int step = Runs::tile(x);
      q[step][0] = v.x, q[step][1] = v.y;
      if (!Runs::is_half(x)) q[step + 1][0] = v.z, q[step + 1][1] = v.w;
    }
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step) {
      uint32_t zero[2];
      load_key_params<Traits>(params, step, lane, scale[step], zero);
      ptx::mma(step % 2 ? odd : even, zero[0], scale[step][0], zero[1], scale[step][1], q[step][0], q[step][1]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        largest = __hmax2(largest, __habs2(__hmul2(ptx::as_half2(q[step][half]), ptx::as_half2(scale[step][half]))));
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) largest = __hmax2(largest, ptx::as_half2(__shfl_xor_sync(~0u, ptx::as_u32(largest), lanes)));
    const Digits digits_of(largest, lane);
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step)
      digits[step] = __byte_perm(digits_of(q[step][0], scale[step][0]), digits_of(q[step][1], scale[step][1]), 0x6240);
    affine[0] = even[0] + odd[0], affine[1] = even[1] + odd[1];
#pragma unroll
    for (int c = 0; c < 2; ++c) unit[c] = __shfl_sync(~0u, digits_of.unit, (lane % 2 * 2 + c) * 4);
  }
};

// Products of K's codes, in mixed form where that is within a tile.
template <class Traits>
__device__ __forceinline__ void multiply_integer_keys(uint32_t subtile, int lane, const IntegerQuery<Traits>& query,
                                                      Products<Traits>& products) {
  using Codec = typename Traits::Key::Codec;
  // An MMA multiplies the k-steps `step - kApart` and `step`. With 2, half the words of a load are already in the registers that the MMA
  // reads.
  constexpr int kApart = Traits::kSteps % 4 ? 1 : 2;
  uint32_t first_step[kApart][2][2];  // A of the first of the two k-steps: [.][MMA tile][row half]
#pragma unroll
  for (int i = 0; i < 8; ++i) products[0][i / 4][i % 4] = 0;
  visit_subtile<Codec, 32 / Codec::kRows * Traits::kSteps, Traits::kHalfStride>(
      subtile + Traits::Key::kCodes, lane, [&](int pair, const uint32_t* words) {
        const int step = pair % Traits::kSteps;
        Codec::expand_bytes(words[0], pair / Traits::kSteps, [&](int rows, uint32_t a0, uint32_t a1) {
          uint32_t(&before)[2] = first_step[step % kApart][rows];
          if (step / kApart % 2)
            ptx::mma_bytes(products[0][rows], before[0], before[1], a0, a1, query.digits[step - kApart], query.digits[step]);
          else if (step == Traits::kSteps - 1)
            ptx::mma_bytes(products[0][rows], a0, a1, query.digits[step]);
          else
            before[0] = a0, before[1] = a1;
        });
      });
  if constexpr (Codec::kMix == Mix::pair) Codec::unmix(products[0][0], products[0][1]);
}

// A lane's products: 256 times those with the upper bytes plus those with the lower bytes. Lanes with t < 2 keep tokens 0..15, the others
// tokens 16..31. Lanes exchange them through the shared memory of the sub-tiles' K codes if it is large enough.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ void own_integer_sums(uint32_t codes, const Products<Traits> (&products)[kStepSubtiles][Traits::kQTiles],
                                                 int lane, Scores<Traits> (&x)[kStepSubtiles]) {
  const bool first = lane % 4 < 2;
  int sum[kStepSubtiles][4];
  if constexpr (Traits::kExchangeShared) {
    // The second tile's lanes are swapped in pairs, which avoids bank conflicts.
    const int from = (lane / 4 * 4 + lane % 2) * 16, at = first ? from : 512 + (from ^ 32);
    const uint32_t low = codes + lane * 16, high = codes + 512 + (lane * 16 ^ 32);
    constexpr int kStride = Traits::Format::kSubtileBytes;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s)
      ptx::store_shared16(low + s * kStride, products[s][0][0][0]), ptx::store_shared16(high + s * kStride, products[s][0][0][1]);
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s) {
      const uint4 a = ptx::load_shared16(codes + at + s * kStride), b = ptx::load_shared16(codes + (at ^ 32) + s * kStride);
      sum[s][0] = static_cast<int>(a.x * 256 + b.x), sum[s][1] = static_cast<int>(a.y * 256 + b.y);
      sum[s][2] = static_cast<int>(a.z * 256 + b.z), sum[s][3] = static_cast<int>(a.w * 256 + b.w);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int low = products[s][0][0][0][i], high = products[s][0][0][1][i];
        const int other = __shfl_xor_sync(~0u, first ? high : low, 2);
        sum[s][i] = first ? low * 256 + other : other * 256 + high;
      }
  }
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s) {
    if constexpr (Traits::Key::Codec::kMix == Mix::tile) sum[s][2] -= sum[s][0], sum[s][3] -= sum[s][1];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[s].product[0][i] = static_cast<float>(sum[s][i]);
  }
}

}  // namespace kvgen
