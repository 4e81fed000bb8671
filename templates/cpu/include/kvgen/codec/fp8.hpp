// The codec of 8-bit floats, e4m3 and e5m2 (OCP): x = scale * code. What a codec's file has: integers.hpp.
#pragma once

#include "kvgen/codec/small_floats.hpp"

namespace kvgen {

template <int ExponentBits, int MantissaBits>
struct Fp8 : SmallFloats<ExponentBits, MantissaBits> {
  using Base = SmallFloats<ExponentBits, MantissaBits>;
  template <class Default>
  using Param = Default;

  // Exponent and mantissa at their places in a float are 2^-(127 - bias) of the number.
  KVGEN_INLINE static F32 code(const U32& word, int k) {
    const I32 top = as<I32>(word << (24 - 8 * k));
    return as<F32>((top >> (8 - ExponentBits)) & (int32_t)(0x80000000u | 0x7fu << (23 - MantissaBits))) * power_of_two(127 - Base::bias);
  }

  template <class Param>
  static void put_params(Param* at, Param*, float low, float high) {
    *at = saturated<Param>(Base::largest(low, high) / static_cast<float>(Base::most));
  }
};

}  // namespace kvgen
