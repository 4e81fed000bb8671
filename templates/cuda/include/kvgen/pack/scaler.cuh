// Quantizes numbers to codes, bit for bit as kvgen/reference/quantize.py does: fp32 statistics, params rounded to fp16 first, exact
// division.
#pragma once
#include "kvgen/format/packed_format.cuh"

namespace kvgen {

constexpr float kLargestHalf = 65504.f;
constexpr float kSmallestNormalHalf = 1.f / 16384;

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ __half saturated_half(float x) { return __float2half_rn(fminf(fmaxf(x, -kLargestHalf), kLargestHalf)); }

// The params of one group as the encoder uses them. `inverse` is 1 / scale if the rounded product value * inverse is the code unless it is
// close to a tie; 0 if all codes are 0; NaN if only a division gives the code: for scales that were denormal or saturated before rounding,
// and for zeros that fp16 does not represent exactly.
struct Scaler {
  float zero = 0.f;
  float scale = 0.f;
  float inverse = 0.f;
};

// Computes a scaler from the extremes of a group; params[0] is the scale to store, params[1] the zero (asymmetric formats). `levels` is the
// largest code.
template <class Quant>
__device__ __forceinline__ Scaler make_scaler(float low, float high, __half (&params)[2], float levels = Quant::kMaxCode) {
  Scaler s;
  const float range = Quant::kZero ? __fsub_rn(high, low) : fmaxf(-low, high);
  const float scale = __fdiv_rn(range, levels);
  params[0] = saturated_half(scale);
  params[1] = saturated_half(low);
  s.scale = __half2float(params[0]);
  bool plain = s.scale >= kSmallestNormalHalf && scale <= kLargestHalf;
  if constexpr (Quant::kZero) {
    s.zero = __half2float(params[1]);
    plain = plain && s.zero == low;
  }
  s.inverse = s.scale == 0.f ? 0.f : plain ? __frcp_rn(s.scale) : __int_as_float(0x7fffffff);
  return s;
}

template <class Quant, int kMaxCode = Quant::kMaxCode>
__device__ __forceinline__ uint32_t exact_code(float distance, float scale) {
  if (scale == 0.f) return Quant::kOffset;
  const float code = rintf(__fdiv_rn(distance, scale));
  constexpr float kMost = kMaxCode;
  return static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(code, Quant::kZero ? 0.f : -kMost), kMost)) + Quant::kOffset);
}

// Returns a code in the low byte; the higher bytes are undefined. Sets `close` if the value is so close to a tie that the code may be
// wrong.
//
// value * inverse differs from the correctly rounded quotient by at most 2^bits * 2^-23, so both round to the same code unless the product
// is that close to a tie. Adding 1.5 * 2^23 rounds to the nearest even integer.
template <class Quant>
__device__ __forceinline__ uint32_t quick_code(float value, float zero, float inverse, bool& close) {
  constexpr float kRound = 12582912.f + Quant::kOffset;
  constexpr float kClear = 0.5f - ((1 << Quant::kBits) + 1) * 2.384185791015625e-7f;
  const float distance = Quant::kZero ? __fsub_rn(value, zero) : value;
  const float rounded = __fmaf_rn(distance, inverse, kRound);
  const float rest = __fmaf_rn(distance, inverse, -__fsub_rn(rounded, kRound));
  close |= !(fabsf(rest) <= kClear);
  return __float_as_uint(rounded);
}

// Encodes eight values. Returns whether one of them is close to a tie. `scalers` gives zero(i) and inverse(i).
template <class Quant, class Scalers>
__device__ __forceinline__ bool encode(const float (&values)[8], const Scalers& scalers, uint32_t (&codes)[8]) {
  bool close = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = quick_code<Quant>(values[i], scalers.zero(i), scalers.inverse(i), close);
  return close;
}

// The difference between the exact code and the quick code.
template <class Quant, class Scalers>
__device__ __forceinline__ uint32_t correction(float value, const Scalers& scalers, int i) {
  const Scaler s = scalers.scaler(i);
  bool close;
  return exact_code<Quant>(Quant::kZero ? __fsub_rn(value, s.zero) : value, s.scale) - quick_code<Quant>(value, s.zero, s.inverse, close);
}

}  // namespace kvgen
