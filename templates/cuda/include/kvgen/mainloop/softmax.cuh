// Online softmax with a lazy running maximum. Probabilities are 2^(x - row_max). row_max moves only when the sum of a lane's weights
// p * scale_v in one step would come near the maximum of fp16, and then to the value that makes the largest weight 2^10. So row_max may lie
// above or below the true maximum, and the scale of V does not matter.
#pragma once
#include "kvgen/mainloop/group_sums.cuh"
#include "kvgen/mainloop/traits.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

constexpr float kWeightLimit = 60000.f;  // below fp16's maximum, since the weights of a lane are summed in fp16
constexpr float kWeightTarget = 10.f;    // log2 of the largest weight after row_max moved
// With kHalfScales: log2 of what the largest scale leaves less of that range.
template <class Traits>
constexpr int scale_room() {
  if constexpr (Traits::kHalfScales)
    return Traits::Value::Codec::kScaleRoom;
  else
    return 0;
}
// A group of equal values of V has codes 0 and scale 0. Its weights p * scale would be 0 for every p, so row_max would not move, and p
// would be unbounded.
constexpr float kSmallestScale = 1.f / (1 << 23) / (1 << 23);  // without kZerosInScales: added to every scale
constexpr float kScaleOfConstants = 1.f / 1024;  // with kZerosInScales: replaces 0, so that the weight is a normal number of fp16

// Whether zeros of V are in units of the scale and meet the rounded weights, as the codes do: then the rounding error of a weight is
// multiplied by the value, and not by the code. The error of 2-bit codes themselves is hundreds of times as large, so kExactQ decides.
template <class Traits>
constexpr bool kZerosInScales =
    kStatic<typename Traits::Value> || (Traits::kValuePerToken && (!Traits::Value::Codec::kNarrow || Traits::kExactQ));

// Whether products of codes leave a sum to add: of zeros, of complements, or of what is added to symmetric codes.
template <class Quant>
constexpr bool is_shifted() {
  if constexpr (!Quant::Codec::kQuantized)
    return false;
  else
    return Quant::kZero || Quant::Codec::kTop != 0 || Quant::Codec::kOffset != 0;
}

// A warp's softmax state of one tile of query rows. Lane (g, t) = (lane / 4, lane % 4) holds rows 2t and 2t + 1; with kQueryTwice, of four
// rows, t % 2 in place of t.
template <class Traits>
struct State {
  float row_max[2];
  float row_sum[2];                       // of p
  float affine[Traits::kValueGroups][2];  // of p * zero_v, with kZerosInScales of weight * (zero_v / scale_v)
  float out[Traits::kRowTiles][4];        // sum of weight * code (V per channel: of p * v): channel g of the two rows, then channel g + 8
  GroupSums<Traits> group;                // V per channel: of the current group of tokens

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      row_max[c] = -1e30f, row_sum[c] = 0.f;
      for (int q = 0; q < Traits::kValueGroups; ++q) affine[q][c] = 0.f;
    }
#pragma unroll
    for (int u = 0; u < Traits::kRowTiles; ++u) out[u][0] = out[u][1] = out[u][2] = out[u][3] = 0.f;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      row_sum[c] *= factor[c];
      if constexpr (Traits::kValueAffine) {
#pragma unroll
        for (int q = 0; q < Traits::kValueGroups; ++q) affine[q][c] *= factor[c];
      }
#pragma unroll
      for (int u = 0; u < Traits::kRowTiles; ++u) out[u][c] *= factor[c], out[u][2 + c] *= factor[c];
    }
    group.rescale(factor);
  }
};

// The first token of a sub-tile whose scores a lane holds in MMA tile `m_tile`. The second is eight further.
template <class Traits>
__device__ __forceinline__ int first_row(int m_tile, int lane) {
  return 16 * (Traits::kQueryTwice ? lane % 4 / 2 : m_tile) + lane / 4;
}

// The packed-GQA row of a lane's i-th value. Rows are (query, head of the group) pairs, ordered by query.
template <class Traits>
__device__ __forceinline__ int q_row(int tile, int lane, int i) {
  return tile * 8 + 2 * (Traits::kQueryTwice ? lane % 2 : lane % 4) + i % 2;
}

// A lane's values of one sub-tile: [m_tile][2 * half + c] of tokens g and g + 8 of the 16 tokens of an MMA tile.
template <class Traits>
using LaneValues = float[Traits::kMTiles][4];

// Scores in log2 units, as product * factor + offset. The sum is not formed yet: row_max is subtracted from the offset first, which saves
// an instruction.
template <class Traits>
struct Scores {
  LaneValues<Traits> product;
  LaneValues<Traits> factor;
  LaneValues<Traits> offset;

  __device__ __forceinline__ float relative_to(float row_max, int m_tile, int i) const {
    return fmaf(product[m_tile][i], factor[m_tile][i], offset[m_tile][i] - row_max);
  }
};

// Scale and zero of V (with kZerosInScales over the scale) for the tokens whose scores a lane holds: [m_tile][group][half]. Scales are
// positive; they are 1 if V has none per token.
template <class Traits>
struct ValueParams {
  float scale[Traits::kMTiles][Traits::kValueGroups][2];
  float zero[Traits::kMTiles][Traits::kValueGroups][2];
};

// B fragments of the weights p * scale_v (with kHalfScales of p): [group][k-step of 16 tokens][k half].
template <class Traits>
using Weights = uint32_t[Traits::kValueGroups][2][2];

namespace detail {

// Computes probabilities, and weights as pairs of halves. True if the weights come near the limit of fp16 or one of them is NaN. A lane
// sums the weights of both its rows, and the comparison is false for NaN, so a NaN in one row does not hide an overflow in the other.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ bool compute_weights(const Scores<Traits> (&x)[kStepSubtiles], const ValueParams<Traits> (&v)[kStepSubtiles],
                                                const State<Traits>& state, LaneValues<Traits> (&p)[kStepSubtiles],
                                                uint32_t (&y)[kStepSubtiles][Traits::kValueGroups][Traits::kMTiles][2]) {
  __half2 total = __float2half2_rn(0.f);
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s)
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * half;
        p[s][m_tile][i] = ptx::exp2(x[s].relative_to(state.row_max[0], m_tile, i));
        p[s][m_tile][i + 1] = ptx::exp2(x[s].relative_to(state.row_max[1], m_tile, i + 1));
#pragma unroll
        for (int q = 0; q < Traits::kValueGroups; ++q) {
          const float scale = v[s].scale[m_tile][q][half];
          y[s][q][m_tile][half] = ptx::pack_half2(p[s][m_tile][i] * scale, p[s][m_tile][i + 1] * scale);
          total = s + m_tile + half + q == 0 ? ptx::as_half2(y[s][q][m_tile][half]) : __hadd2(total, ptx::as_half2(y[s][q][m_tile][half]));
        }
      }
  return !__hle(__hadd(__low2half(total), __high2half(total)), __float2half_rn(kWeightLimit / (1 << scale_room<Traits>())));
}

// Moves row_max so that the largest of these weights is near 2^kWeightTarget. This is rare.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ void raise_row_max(const Scores<Traits> (&x)[kStepSubtiles], const ValueParams<Traits> (&v)[kStepSubtiles],
                                              State<Traits>& state) {
  float factor[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float best = -INFINITY;
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s)
#pragma unroll
      for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float score = x[s].relative_to(0.f, m_tile, 2 * half + c);
          if constexpr (Traits::kValuePerToken && !Traits::kHalfScales) {
            float scale = v[s].scale[m_tile][0][half];
#pragma unroll
            for (int q = 1; q < Traits::kValueGroups; ++q) scale = fmaxf(scale, v[s].scale[m_tile][q][half]);
            score += __log2f(scale);
          }
          best = fmaxf(best, score);
        }
#pragma unroll
    for (int lanes = Traits::kQueryTwice ? 2 : 4; lanes < 32; lanes *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, lanes));
    const float new_max = fmaxf(state.row_max[c], best - (kWeightTarget - scale_room<Traits>()));
    factor[c] = ptx::exp2(state.row_max[c] - new_max);
    state.row_max[c] = new_max;
  }
  state.rescale(factor);
}

}  // namespace detail

// Adds the probabilities of kStepSubtiles sub-tiles to the sums, and gives their weights as B fragments.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ void softmax_step(const Scores<Traits> (&x)[kStepSubtiles], const ValueParams<Traits> (&v)[kStepSubtiles],
                                             State<Traits>& state, Weights<Traits> (&weights)[kStepSubtiles]) {
  LaneValues<Traits> p[kStepSubtiles];
  uint32_t y[kStepSubtiles][Traits::kValueGroups][Traits::kMTiles][2];
  if (__any_sync(~0u, detail::compute_weights<Traits>(x, v, state, p, y))) {
    detail::raise_row_max<Traits>(x, v, state);
    detail::compute_weights<Traits>(x, v, state, p, y);
  }
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s)
#pragma unroll
    for (int q = 0; q < Traits::kValueGroups; ++q)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile) weights[s][q][m_tile][half] = ptx::transpose(y[s][q][m_tile][half]);
        // With kQueryTwice a lane's fragment of columns 4..7 belongs to the other MMA tile: the MMA with tile 0 ignores them, tile 1 takes
        // them from lane ^ 16.
        if constexpr (Traits::kQueryTwice) weights[s][q][1][half] = __shfl_xor_sync(~0u, weights[s][q][0][half], 16);
      }
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s)
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state.row_sum[i % 2] += p[s][m_tile][i];
#pragma unroll
        for (int q = 0; q < Traits::kValueGroups; ++q)
          if constexpr (Traits::kValueAffine && is_shifted<typename Traits::Value>()) {
            const float2 rounded = __half22float2(ptx::as_half2(y[s][q][m_tile][i / 2]));
            const float weight = !kZerosInScales<Traits> ? p[s][m_tile][i] : i % 2 == 0 ? rounded.x : rounded.y;
            state.affine[q][i % 2] = fmaf(weight, v[s].zero[m_tile][q][i / 2], state.affine[q][i % 2]);
          }
      }
}

// Scales and zeros per token, of the tokens whose scores a lane holds. They are applied outside the MMA.

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
  using Param = typename Quant::Codec::Param;
  constexpr int kRowBytes = Quant::kParams * sizeof(Param);  // of a token
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
        float2 v;
        if constexpr (sizeof(Param) == 1)
          v = to_floats(Param{}, ptx::load_shared2(address + at));
        else
          v = __half22float2(ptx::as_half2(ptx::load_shared4(address + at * kRowBytes)));
        scale[m_tile][q][0] = v.x, zero[m_tile][q][0] = -v.x * Quant::Codec::kOffset;
        scale[m_tile][q][1] = v.y, zero[m_tile][q][1] = -v.y * Quant::Codec::kOffset;
      }
    }
}

// In every 16 tokens the codes of the first eight are complemented: p * s * code = p * s * -(top - code) + p * s * top. The sums of codes
// then stay near zero over a long cache; otherwise the result, after the zeros are added, would be lost in the rounding of the tensor
// cores. The instruction that masks the codes also sets their sign.
template <class Traits>
__device__ __forceinline__ void load_value_params(uint32_t address, int lane, ValueParams<Traits>& params) {
  if constexpr (Traits::kValuePerToken && !Traits::kHalfScales) {
    load_row_params<Traits, typename Traits::Value, Traits::kValueGroups>(address, lane, params.scale, params.zero);
    constexpr float kTop = Traits::Value::Codec::kTop;
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) {
        float(&scale)[2] = params.scale[m_tile][q], (&zero)[2] = params.zero[m_tile][q];
        if constexpr (kZerosInScales<Traits>) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (scale[half] == 0.f) scale[half] = kScaleOfConstants;
            if constexpr (Traits::Value::kZero)
              zero[half] = fmaf(zero[half], ptx::reciprocal(scale[half]), half == 0 ? kTop : 0.f);
            else
              zero[half] = (half == 0 ? kTop : 0.f) - Traits::Value::Codec::kOffset;
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
    if constexpr (kStatic<typename Traits::Value>) {  // whose scales the sums of a head meet
      using Codec = typename Traits::Value::Codec;
#pragma unroll
      for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
        params.zero[m_tile][0][0] = 1.f * (Codec::kTop - Codec::kOffset), params.zero[m_tile][0][1] = -1.f * Codec::kOffset;
    }
  }
}

}  // namespace kvgen
