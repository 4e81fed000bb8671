// The codec of integers of 8, 4 or 2 bits. A word holds neighbours along k, the lanes are rows.
//
// A codec's file has
//   its unit         per_word: elements of a word
//   decoding         code: a word to floats; integers_of: to operands of products of integers
//   its correction   middle: what code subtracts from stored codes; scales and zeros are applied outside the products (`Operand`)
//   its params       Param: the type of a stored scale or zero, where the cache has another by default
//   encoding         put_params: a group's range to its stored params; encode: values to codes
// Its sizes and offsets are rendered (kvgen/format/codecs.py).
#pragma once

#include "kvgen/simd.hpp"

namespace kvgen {

// Scale and zero of 16 neighbours.
struct Affine {
  F32 scale, zero;
};

// A scale or a zero as it is stored.
template <class Param>
inline Param saturated(float x) {
  constexpr float limit = sizeof(Param) == 4 ? std::numeric_limits<float>::max() : 65504.0f;
  return from_float<Param>(x > limit ? limit : x < -limit ? -limit : x);
}

// Codes are decoded with 2^(Bits-1) subtracted: symmetric ones are stored with it added, and of the others the sums are smaller, so that
// less is lost where the zero cancels them.
template <int Bits, bool Zero>
struct Integers {
  template <class Default>
  using Param = Default;
  static constexpr int bits = Bits, per_word = 32 / Bits;
  static constexpr bool quantized = true;
  static constexpr float middle = 1 << (Bits - 1);
  static constexpr int most = (1 << Bits) - 1, boosted_most = 15;  // largest codes

  // Element `k` of the words: the centered code as a float.
  KVGEN_INLINE static F32 code(const U32& word, int k) {
#ifdef __AVX512F__
    // A permutation looks at the low 4 bits alone: shift and look up, no mask, no conversion.
    if constexpr (Bits <= 4) return __builtin_shuffle(table(), (I32)(word >> (Bits * k)));
#endif
    return convert<float>(as<I32>((word ^ signs()) << (32 - Bits * (k + 1))) >> (32 - Bits));
  }

  // Codes j, j + per_word / 4, ... of a word, each in one of its four bytes. One shift and one mask for all of them.
  KVGEN_INLINE static U32 integers_of(const U32& word, int j) { return (word >> (Bits * j)) & (((1u << Bits) - 1) * 0x01010101u); }

  // Stores scale and zero (at `zero_at`) of a group with this range. `largest`: its largest code.
  template <class Param>
  static void put_params(Param* at, Param* zero_at, float low, float high, int largest = most) {
    if constexpr (Zero) {
      *at = saturated<Param>((high - low) / static_cast<float>(largest));
      *zero_at = saturated<Param>(low);
    } else {
      const float magnitude = high > -low ? high : std::fabs(low);  // of zeros it is 0 and not -0
      *at = saturated<Param>(magnitude / (middle - 1));
    }
  }

  // The unsigned codes of 16 values.
  static U32 encode(F32 x, const Affine& a, int largest = most) {
    F32 q;
    if constexpr (Zero)
      q = clamped(round_even((x - a.zero) / a.scale), 0.0f, static_cast<float>(largest));
    else
      q = clamped(round_even(x / a.scale), 1 - middle, middle - 1) + middle;
    q = select(a.scale == 0.0f, splat<F32>(Zero ? 0.0f : middle), q);
    return as<U32>(convert<int32_t>(q));
  }

 private:
  static constexpr float entry(int i) { return static_cast<float>(i & ((1 << Bits) - 1)) - middle; }
  static F32 table() {
    return F32{entry(0), entry(1), entry(2),  entry(3),  entry(4),  entry(5),  entry(6),  entry(7),
               entry(8), entry(9), entry(10), entry(11), entry(12), entry(13), entry(14), entry(15)};
  }
  static constexpr uint32_t signs() { return ~0u / ((1u << Bits) - 1) << (Bits - 1); }  // the top bit of every field

  // NaN gives `low`.
  static F32 clamped(F32 x, float low, float high) {
    x = select(x > low, x, splat<F32>(low));
    return select(x < high, x, splat<F32>(high));
  }
};

}  // namespace kvgen
