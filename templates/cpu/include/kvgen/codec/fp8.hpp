// The codec of 8-bit floats, e4m3 and e5m2 (OCP): x = scale * code. What a codec's file has: integers.hpp.
#pragma once

#include "kvgen/codec/integers.hpp"

namespace kvgen {

template <int ExponentBits, int MantissaBits>
struct Fp8 {
  static constexpr int bits = 8, per_word = 4;
  static constexpr bool quantized = true;
  static constexpr float middle = 0;
  static constexpr int most = ExponentBits == 4 ? 448 : 57344;  // the largest finite number

  // Exponent and mantissa at their places in a float are 2^-(127 - bias) of the number.
  KVGEN_INLINE static F32 code(const U32& word, int k) {
    const I32 top = as<I32>(word << (24 - 8 * k));
    return as<F32>((top >> (8 - ExponentBits)) & (int32_t)(0x80000000u | 0x7fu << (23 - MantissaBits))) * power_of_two(127 - bias);
  }

  template <class Param>
  static void put_params(Param* at, Param*, float low, float high) {
    *at = saturated<Param>((high > -low ? high : std::fabs(low)) / static_cast<float>(most));
  }

  // The codes nearest to x / scale, of two the even one. Adding 1.5 * 2^23 times the distance of codes rounds to its multiples.
  static U32 encode(F32 x, const Affine& a) {
    const F32 quotient = x / a.scale;
    F32 size = as<F32>(as<U32>(quotient) & 0x7fffffffu);
    size = select(size < static_cast<float>(most), size, splat<F32>(most));
    const I32 exponent = max(as<I32>(size) & 0x7f800000, splat<I32>((128 - bias) << 23));
    const F32 shift = as<F32>((exponent + ((23 - MantissaBits) << 23)) | 0x400000);
    const F32 rounded = (size + shift) - shift;
    const U32 found = as<U32>(rounded * power_of_two(bias - 127)) >> (23 - MantissaBits);
    return select(a.scale == 0.0f, U32{}, found | ((as<U32>(x) >> 24) & 0x80u));
  }

 private:
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1;

  static constexpr float power_of_two(int exponent) {
    float x = 1;
    for (int i = exponent; i > 0; --i) x *= 2;
    for (int i = exponent; i < 0; ++i) x /= 2;
    return x;
  }
};

}  // namespace kvgen
