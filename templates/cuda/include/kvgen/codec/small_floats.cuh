// What codecs of floats of 8 and 4 bits share: numbers to codes, and codes to numbers.
#pragma once
#include "kvgen/codec/integers.cuh"

// Whether instructions convert e4m3.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KVGEN_FP8 1
#else
#define KVGEN_FP8 0
#endif

namespace kvgen {

// The scaler of a stored scale.
__device__ __forceinline__ Scaler scaler_of(float scale) { return {0.f, scale, scale == 0.f ? 0.f : __frcp_rn(scale)}; }

__host__ __device__ constexpr float power_of_two(int exponent) {
  float x = 1.f;
  for (int i = exponent; i > 0; --i) x *= 2;
  for (int i = exponent; i < 0; ++i) x /= 2;
  return x;
}

template <int kExponentBits, int kMantissaBits>
struct SmallFloats {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr Mix kMix = Mix::none;
  static constexpr bool kNarrow = false, kByteOperands = false, kHalfScales = false;
  static constexpr int kTop = 0, kOffset = 0;  // codes have a sign, so none is complemented
  static constexpr int kPackThreads = 512;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr float kLargest = kExponentBits == 2 ? 6 : kExponentBits == 4 ? 448 : 57344;

  template <class Element>
  static constexpr bool kByThresholds = false;

  template <class Sum>
  __device__ __forceinline__ static void unmix(Sum (&)[4], Sum (&)[4]) {}
  __device__ __forceinline__ static void mix(float (&)[4], float (&)[4]) {}
  __host__ __device__ static constexpr float row_factor(int, int) { return 1.f; }

  __device__ __forceinline__ static uint32_t exact_code(float value, float, float scale) {
    float rest, unit;
    return scale == 0.f ? 0 : nearest(__fdiv_rn(value, scale), rest, unit);
  }

  // See `Integers`: the product differs from the quotient by less than 2^-22 of itself, and that is below 2^-18 of the distance of codes.
  __device__ __forceinline__ static uint32_t quick_code(float value, float, float inverse, bool& close) {
    float rest, unit;
    const uint32_t code = nearest(value * inverse, rest, unit);
    close |= !(fabsf(rest) <= unit * (0.5f - 1.f / (1 << 17)));
    return inverse == 0.f ? 0 : code;
  }

  __device__ __forceinline__ static float decode(uint32_t code) {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    const uint32_t bits = (code & kSign) << (32 - kBits) | (code & (kSign - 1)) << (23 - kMantissaBits);
    return __uint_as_float(bits) * power_of_two(127 - kBias);
  }

  // The code nearest to x, of two the even one, at most the largest finite; a NaN gives that, too. `rest` is the size of x less that of the
  // code's number, or 0 beyond all of them; `unit` is the distance of codes near x. Adding 1.5 * 2^23 units rounds to units.
  __device__ __forceinline__ static uint32_t nearest(float x, float& rest, float& unit) {
    const float size = fminf(fabsf(x), kLargest);
    const uint32_t exponent = max(__float_as_uint(size) & 0x7f800000u, static_cast<uint32_t>(128 - kBias) << 23);
    unit = __uint_as_float(exponent - (kMantissaBits << 23));
    const float shift = __uint_as_float(exponent + ((23 - kMantissaBits) << 23) | 0x400000u);
    const float rounded = (size + shift) - shift;
    rest = size - rounded;
    const uint32_t code = __float_as_uint(rounded * power_of_two(kBias - 127)) >> (23 - kMantissaBits);
    return code | (__float_as_uint(x) >> 31 << (kBits - 1));
  }
};

}  // namespace kvgen
