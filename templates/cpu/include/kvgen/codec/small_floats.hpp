// What codecs of floats of 8 and 4 bits share: numbers to codes.
#pragma once

#include "kvgen/codec/integers.hpp"

namespace kvgen {

constexpr float power_of_two(int exponent) {
  float x = 1;
  for (int i = exponent; i > 0; --i) x *= 2;
  for (int i = exponent; i < 0; ++i) x /= 2;
  return x;
}

template <int ExponentBits, int MantissaBits>
struct SmallFloats {
  static constexpr bool quantized = true;
  static constexpr float middle = 0;
  static constexpr int bits = 1 + ExponentBits + MantissaBits, per_word = 32 / bits;
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1;
  static constexpr int most = ExponentBits == 2 ? 6 : ExponentBits == 4 ? 448 : 57344;  // the largest finite number

  // The codes nearest to numbers without a sign, of two the even one. Adding 1.5 * 2^23 times the distance of codes rounds to multiples of
  // it.
  static U32 nearest(F32 x) {
    const F32 size = select(x < static_cast<float>(most), x, splat<F32>(most));
    const I32 exponent = max(as<I32>(size) & 0x7f800000, splat<I32>((128 - bias) << 23));
    const F32 shift = as<F32>((exponent + ((23 - MantissaBits) << 23)) | 0x400000);
    const F32 rounded = (size + shift) - shift;
    return as<U32>(rounded * power_of_two(bias - 127)) >> (23 - MantissaBits);
  }

  static U32 encode(F32 x, const Affine& a) {
    const U32 size = nearest(as<F32>(as<U32>(x / a.scale) & 0x7fffffffu));
    return select(a.scale == 0.0f, U32{}, size | ((as<U32>(x) >> 31) << (bits - 1)));
  }

  static float largest(float low, float high) { return high > -low ? high : std::fabs(low); }
};

}  // namespace kvgen
