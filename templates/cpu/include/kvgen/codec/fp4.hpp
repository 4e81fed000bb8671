// The codec of 4-bit floats (e2m1) with scales of one byte: x = scale * code. What a codec's file has: integers.hpp.
#pragma once

#include "kvgen/codec/small_floats.hpp"

namespace kvgen {

// A scale in e4m3, without a sign (NVFP4): a sixth of the largest magnitude goes with the largest code.
struct E4m3Scale {
  uint8_t bits;

  static E4m3Scale of(float top) { return {static_cast<uint8_t>(SmallFloats<4, 3>::nearest(splat<F32>(top / 6))[0])}; }
  // Exponent and mantissa at their places in fp16 are 2^-8 of the number, and a conversion takes denormals at no cost.
  static F32 floats(const U32& scales) { return widen_low<Half>(scales << 7) * 256.0f; }
};

// A power of two (OCP MX): the largest one that is no more than the largest magnitude, less the exponent of the largest code, but no less
// than the least number of fp16.
struct E8m0Scale {
  uint8_t bits;

  static E8m0Scale of(float top) {
    uint32_t all;
    std::memcpy(&all, &top, sizeof(all));
    const int exponent = static_cast<int>(all >> 23) - 2;
    return {static_cast<uint8_t>(exponent < 127 - 24 ? 127 - 24 : exponent)};
  }
  static F32 floats(const U32& scales) { return as<F32>(scales << 23); }
};

template <class Scale, class = decltype(Scale::bits)>
inline float to_float(Scale x) {
  return Scale::floats(splat<U32>(x.bits))[0];
}

template <class Scale>
struct Fp4 : SmallFloats<2, 1> {
  template <class Default>
  using Param = Scale;

  KVGEN_INLINE static F32 code(const U32& word, int k) {
    const U32 code = word >> (4 * k);
#ifdef __AVX512F__
    return __builtin_shuffle(table(), (I32)code);  // it looks at the low 4 bits alone
#endif
    return widen_low<Half>((code & 8) << 12 | (code & 7) << 9) * 16384.0f;  // the places of fp16
  }

  static void put_params(Scale* at, Scale*, float low, float high) { *at = Scale::of(largest(low, high)); }

 private:
  static F32 table() { return F32{0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6}; }
};

}  // namespace kvgen
