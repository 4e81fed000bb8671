// Symmetric 8-bit codes: q = clamp(rne(x / scale), -127, 127), read back as q * scale; a scale of 0 makes every code 0.
#pragma once
#include <cstdint>

namespace kvgen::matrix {

constexpr float kLevels = 127.f;

enum class Quotient {
  divide,  // IEEE division for every element
  refine,  // a reciprocal per scale, and two Newton steps for every element: the same quotient
};

__device__ __forceinline__ int8_t clamp_code(float quotient) {
  const int code = __float2int_rn(quotient);
  return static_cast<int8_t>(max(-127, min(127, code)));
}

__device__ __forceinline__ int8_t divided(float x, float scale) { return clamp_code(scale == 0.f ? 0.f : __fdiv_rn(x, scale)); }

template <Quotient kHow>
class Divisor;

template <>
class Divisor<Quotient::divide> {
 public:
  __device__ __forceinline__ void set(float scale) { scale_ = scale; }
  __device__ __forceinline__ int8_t code(float x) const { return divided(x, scale_); }

 private:
  float scale_;
};

// With r = RN(1 / s), q' = q + r * (x - s * q) by fused multiply-adds is RN(x / s) once q is within one unit in the last place (Markstein,
// 1990). The first estimate may be off by two, so the step is taken twice. It needs remainders that do not underflow: scales outside
// 2^-100 .. 2^100 are divided by. A quotient beyond 256 keeps its estimate, because its remainder may overflow and its code is 127 anyway.
template <>
class Divisor<Quotient::refine> {
 public:
  __device__ __forceinline__ void set(float scale) {
    scale_ = scale, reciprocal_ = scale >= 0x1p-100f && scale <= 0x1p100f ? __frcp_rn(scale) : 0.f;
  }
  __device__ __forceinline__ int8_t code(float x) const {
    if (reciprocal_ == 0.f) return divided(x, scale_);
    const float estimate = x * reciprocal_;
    const float once = step(x, estimate);
    const float twice = step(x, once);
    return clamp_code(fabsf(estimate) < 256.f ? twice : estimate);
  }

 private:
  __device__ __forceinline__ float step(float x, float q) const { return __fmaf_rn(__fmaf_rn(-scale_, q, x), reciprocal_, q); }

  float scale_, reciprocal_;
};

}  // namespace kvgen::matrix
