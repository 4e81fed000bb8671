// Scales and zeros per token, of the tokens whose scores a lane holds. They are applied outside the MMA.
#pragma once
#include "kvgen/mainloop/softmax.cuh"

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
  if constexpr (Traits::kValuePerToken) {
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
  }
}

}  // namespace kvgen
