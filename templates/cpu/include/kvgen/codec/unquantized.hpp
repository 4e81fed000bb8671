// The codec of elements that are stored as they are (see codec/integers.hpp).
#pragma once

#include "kvgen/simd.hpp"

namespace kvgen {

template <class Element>
struct Unquantized {
  template <class Default>
  using Param = Default;
  static constexpr int per_word = sizeof(Element) == 4 ? 1 : 2;
  static constexpr bool quantized = false;

  KVGEN_INLINE static F32 code(const U32& word, int k) {
    if constexpr (sizeof(Element) == 4) return as<F32>(word);
    if constexpr (std::is_same_v<Element, Bfloat>) return as<F32>(k == 0 ? word << 16 : word & 0xffff0000u);
    return widen_low<Element>(word >> (16 * k));
  }

  // The bits of 16 values.
  static U32 encode(F32 x) {
    if constexpr (sizeof(Element) == 4) return as<U32>(x);
    uint16_t halves[kLanes];
    uint32_t bits[kLanes];
    store_floats<Element>(halves, x);
    for (int i = 0; i < kLanes; ++i) bits[i] = halves[i];
    return load<U32>(bits);
  }
};

// Floats in the order of packed words, to which tokens in `dtype` and odd formats are expanded.
using Expanded = Unquantized<float>;

}  // namespace kvgen
