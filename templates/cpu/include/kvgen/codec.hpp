// From packed words to floats: codes, scales and zeros of 16 rows at a time.
#pragma once

#include "kvgen/simd.hpp"

namespace kvgen {

// 16 rows of codes: a word holds neighbours along k, the lanes are rows. Codes are decoded with 2^(Bits-1) subtracted: symmetric
// ones are stored with it added, and of the others the sums are smaller, so that less is lost where the zero cancels them.
template <int Bits, class Element>
struct Codec {
  static constexpr int bits = Bits, per_word = 32 / Bits;
  static constexpr bool quantized = true;
  static constexpr float middle = 1 << (Bits - 1);

  // Element `k` of the words: the centered code as a float.
  KVGEN_INLINE static F32 code(const U32& word, int k) {
#ifdef __AVX512F__
    // A permutation looks at the low 4 bits alone: shift and look up, no mask, no conversion.
    if constexpr (Bits <= 4) return __builtin_shuffle(table(), (I32)(word >> (Bits * k)));
#endif
    return convert<float>(as<I32>((word ^ signs()) << (32 - Bits * (k + 1))) >> (32 - Bits));
  }

 private:
  static constexpr float entry(int i) { return static_cast<float>(i & ((1 << Bits) - 1)) - middle; }
  static F32 table() {
    return F32{entry(0), entry(1), entry(2),  entry(3),  entry(4),  entry(5),  entry(6),  entry(7),
               entry(8), entry(9), entry(10), entry(11), entry(12), entry(13), entry(14), entry(15)};
  }
  static constexpr uint32_t signs() { return ~0u / ((1u << Bits) - 1) << (Bits - 1); }  // the top bit of every field
};

template <class Element>
struct Codec<16, Element> {
  static constexpr int per_word = sizeof(Element) == 4 ? 1 : 2;
  static constexpr bool quantized = false;

  KVGEN_INLINE static F32 code(const U32& word, int k) {
    if constexpr (sizeof(Element) == 4) return as<F32>(word);
    if constexpr (std::is_same_v<Element, Bfloat>) return as<F32>(k == 0 ? word << 16 : word & 0xffff0000u);
    return widen_low<Element>(word >> (16 * k));
  }
};

// Floats in the order of packed words, to which tokens in `dtype` and odd formats are expanded.
using Expanded = Codec<16, float>;

// Scale and zero of 16 neighbours.
struct Affine {
  F32 scale, zero;
};

// The operand Op (K or V) of a configuration C: where its codes and params lie in a block. Op has
//   bits, per_channel (one scale per channel and `group` tokens, else per token and `group` channels), group, zero,
//   boosted (channels of a 2-bit K with 4 bits, see boost.hpp), rows_are_tokens (K: rows are tokens and k runs over channels; V: the other
//   way round), codes_offset (bytes from the sub-tile), params_offset (bytes from the block if per_channel, else from the sub-tile).
template <class C, class Op>
struct Operand {
  using Param = typename C::Param;
  using Code = Codec<Op::bits, typename C::Element>;
  static constexpr int params = Op::zero ? 2 : 1;
  static constexpr int k_extent = Op::rows_are_tokens ? C::head_dim : C::subtile;
  static constexpr int row_extent = Op::rows_are_tokens ? C::subtile : C::head_dim;
  static constexpr int param_extent = Op::per_channel ? C::head_dim : C::subtile;
  static constexpr int subtile_params_bytes =
      !Op::per_channel && Code::quantized ? C::subtile * (C::head_dim / Op::group) * params * static_cast<int>(sizeof(Param)) : 0;
  static constexpr int tile_bytes = k_extent / Code::per_word * 64;  // 16 rows

  static const uint8_t* codes(const uint8_t* subtile, int tile) { return subtile + Op::codes_offset + tile * tile_bytes; }

  static const Param* param(const uint8_t* block, const uint8_t* subtile, int group, int index) {
    const uint8_t* section = (Op::per_channel ? block : subtile) + Op::params_offset;
    return reinterpret_cast<const Param*>(section) + static_cast<int64_t>(group) * params * param_extent + index;
  }

  // x = centered code * scale + zero, from the stored params (x = code * scale + zero, or no zero for symmetric codes).
  static Affine centered(Affine a) {
    if constexpr (Op::zero) return {a.scale, a.scale * Code::middle + a.zero};
    return a;
  }

  // Of 16 neighbours along the axis that params lie on: channels of a token group, or tokens of a channel group.
  static Affine affine(const uint8_t* block, const uint8_t* subtile, int group, int index) {
    const Param* at = param(block, subtile, group, index);
    const F32 scale = load_floats<Param>(at);
    if constexpr (Op::zero) return {scale, load_floats<Param>(at + param_extent)};
    return {scale, F32{}};
  }

  // Of one element, in every lane.
  static Affine affine_of_one(const uint8_t* block, const uint8_t* subtile, int group, int index) {
    const Param* at = param(block, subtile, group, index);
    const float scale = to_float(at[0]);
    if constexpr (Op::zero) return {splat<F32>(scale), splat<F32>(to_float(at[param_extent]))};
    return {splat<F32>(scale), F32{}};
  }

  // Dequantizes 16 rows of a sub-tile whose first token is `token` of the block: out[k * 16 + row].
  static void expand(const uint8_t* block, const uint8_t* subtile, int token, int tile, float* out) {
    const uint8_t* words = codes(subtile, tile);
    for (int k = 0; k < k_extent; ++k) {
      F32 x = Code::code(load<U32>(words + k / Code::per_word * 64), k % Code::per_word);
      if constexpr (Code::quantized) {
        const Affine a = centered(affine_at(block, subtile, token, tile, k));
        x = x * a.scale + a.zero;
      }
      store(out + k * kLanes, x);
    }
  }

  // Of element k of 16 rows.
  static Affine affine_at(const uint8_t* block, const uint8_t* subtile, int token, int tile, int k) {
    const int row = tile * kLanes;
    if constexpr (Op::rows_are_tokens && Op::per_channel) return affine_of_one(block, subtile, (token + row) / Op::group, k);
    if constexpr (Op::rows_are_tokens) return affine(block, subtile, k / Op::group, row);
    if constexpr (Op::per_channel) return affine(block, subtile, (token + k) / Op::group, row);
    if constexpr (Op::group % kLanes == 0) return affine_of_one(block, subtile, row / Op::group, k);
    float scale[kLanes], zero[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const Affine one = affine_of_one(block, subtile, (row + i) / Op::group, k);
      scale[i] = one.scale[0];
      zero[i] = one.zero[0];
    }
    return {load<F32>(scale), load<F32>(zero)};
  }
};

}  // namespace kvgen
