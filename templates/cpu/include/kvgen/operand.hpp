// K or V of packed tokens: codes, scales and zeros of 16 rows at a time, and boosted channels of K.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "kvgen/codec/integers.hpp"
#include "kvgen/codec/unquantized.hpp"
#include "kvgen/format.hpp"

namespace kvgen {

// The operand Op (K or V, `Constants::Key` or `Constants::Value`) of a configuration C: the addresses of its codes and params in a block.
// Rows of K are tokens, and k runs over channels; of V, it is the other way round.
// Op::StaticScale: scales are given with the cache, one per channel of a head. In place of a block its functions take these. Where groups
// have scales too (NVFP4), the channels of a head have one static scale, which multiplies them.
template <class Op, class = void>
constexpr bool kStatic = false;
template <class Op>
constexpr bool kStatic<Op, std::void_t<typename Op::StaticScale>> = true;
template <class Op>
constexpr bool kTwoLevels = kStatic<Op> && Op::kParams > 0;

template <class C, class Op>
struct Operand {
  using Code = typename Op::Codec;
  using Param = std::conditional_t<kStatic<Op> && !kTwoLevels<Op>, float, typename Code::template Param<typename C::Param>>;
  static constexpr bool per_channel = Op::kPerChannel || (kStatic<Op> && !kTwoLevels<Op>);
  static constexpr int k_extent = Op::kRowsAreTokens ? C::kHeadDim : C::kSubtile;
  static constexpr int row_extent = Op::kRowsAreTokens ? C::kSubtile : C::kHeadDim;
  static constexpr int param_extent = per_channel ? C::kHeadDim : C::kSubtile;
  static constexpr int tile_bytes = k_extent / Code::per_word * 64;  // 16 rows

  static const uint8_t* codes(const uint8_t* subtile, int tile) { return subtile + Op::kCodes + tile * tile_bytes; }

  // Where channel params lie: in the block, or the static scales of its head.
  static const uint8_t* source(const uint8_t* block, const float* scales) {
    return kStatic<Op> ? reinterpret_cast<const uint8_t*>(scales) : block;
  }

  static const Param* param(const uint8_t* block, const uint8_t* subtile, int group, int index) {
    if constexpr (kStatic<Op> && !kTwoLevels<Op>) return reinterpret_cast<const float*>(block) + index;
    const uint8_t* section = Op::kPerChannel ? block + Op::kChannelParams : subtile + Op::kTokenParams;
    return reinterpret_cast<const Param*>(section) + static_cast<int64_t>(group) * Op::kParams * param_extent + index;
  }

  // What multiplies the scales of all groups.
  static float second(const uint8_t* block) {
    if constexpr (kTwoLevels<Op>) return *reinterpret_cast<const float*>(block);
    return 1;
  }

  // x = centered code * scale + zero, from the stored params (x = code * scale + zero, or no zero for symmetric codes).
  static Affine centered(Affine a) {
    if constexpr (Op::kZero) return {a.scale, a.scale * Code::middle + a.zero};
    return a;
  }

  // Of 16 neighbours along the axis that params lie on: channels of a token group, or tokens of a channel group.
  static Affine affine(const uint8_t* block, const uint8_t* subtile, int group, int index) {
    const Param* at = param(block, subtile, group, index);
    F32 scale = load_floats<Param>(at);
    if constexpr (kTwoLevels<Op>) scale = scale * second(block);
    if constexpr (Op::kZero) return {scale, load_floats<Param>(at + param_extent)};
    return {scale, F32{}};
  }

  // Of one element, in every lane.
  static Affine affine_of_one(const uint8_t* block, const uint8_t* subtile, int group, int index) {
    const Param* at = param(block, subtile, group, index);
    float scale = to_float(at[0]);
    if constexpr (kTwoLevels<Op>) scale *= second(block);
    if constexpr (Op::kZero) return {splat<F32>(scale), splat<F32>(to_float(at[param_extent]))};
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
    if constexpr (Op::kRowsAreTokens && per_channel) return affine_of_one(block, subtile, (token + row) / Op::kGroup, k);
    if constexpr (Op::kRowsAreTokens) return affine(block, subtile, k / Op::kGroup, row);
    if constexpr (per_channel) return affine(block, subtile, (token + k) / Op::kGroup, row);
    return affine_of_token(block, subtile, k, row);
  }

  // Of 16 channels from `channel` on of a sub-tile's token, where groups lie within one token, or scales are static.
  static Affine affine_of_token(const uint8_t* block, const uint8_t* subtile, int token, int channel) {
    if constexpr (per_channel) return affine(block, subtile, 0, channel);
    if constexpr (Op::kGroup % kLanes == 0) return affine_of_one(block, subtile, channel / Op::kGroup, token);
    float scale[kLanes], zero[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const Affine one = affine_of_one(block, subtile, (channel + i) / Op::kGroup, token);
      scale[i] = one.scale[0];
      zero[i] = one.zero[0];
    }
    return {load<F32>(scale), load<F32>(zero)};
  }
};

// Boosted channels of K (Kitty): x = scale * (low + 4 * high) + zero, where `high` is in a second stream of 2-bit codes.

// Where the boosted channels of a configuration lie. Without boost it is not used.
template <class C>
struct Boost {
  using Code = typename C::Key::Codec;
  using Keys = Operand<C, typename C::Key>;
  static constexpr int channels = C::kBoosted, slots = C::kBoostSlots;
  static constexpr int words = slots / Code::per_word;

  // The numbers of a group's boosted channels, ascending.
  static const uint8_t* index(const uint8_t* block, int group) { return block + C::kBoostIndex + group * channels; }
  static const uint8_t* codes(const uint8_t* subtile, int tile) { return subtile + C::kBoostCodes + tile * words * 64; }

  // The weights of the upper codes, rows of `slots` floats, from those of the lower ones, and what centering the codes adds to the
  // scores of every row: the codes are decoded with their middle subtracted.
  static void weights(const float* folded, const uint8_t* block, int group, float* boosted, float (&bias)[C::rows]) {
    const uint8_t* channel = index(block, group);
    for (int m = 0; m < C::rows; ++m) {
      bias[m] = 0;
      for (int i = 0; i < slots; ++i) {
        const float x = i < channels ? 4 * folded[m * C::kHeadDim + channel[i]] : 0;
        boosted[m * slots + i] = x;
        bias[m] += x * Code::middle;
      }
    }
  }

  // Adds the upper codes to 16 dequantized rows of a sub-tile whose first token is `token` of the block: out[channel * 16 + row].
  static void add(const uint8_t* block, const uint8_t* subtile, int token, int tile, float* out) {
    const int group = (token + tile * kLanes) / C::Key::kGroup;
    const uint8_t *channel = index(block, group), *words_of = codes(subtile, tile);
    for (int i = 0; i < channels; ++i) {
      const F32 high = Code::code(load<U32>(words_of + i / Code::per_word * 64), i % Code::per_word) + Code::middle;
      float* at = out + channel[i] * kLanes;
      store(at, load<F32>(at) + high * 4.0f * Keys::affine_of_one(block, nullptr, group, channel[i]).scale);
    }
  }
};

// Dequantizes 16 tokens of K, as Operand::expand does.
template <class C>
inline void expand_keys(const uint8_t* block, const float* scales, const uint8_t* subtile, int token, int tile, float* out) {
  using Keys = Operand<C, typename C::Key>;
  Keys::expand(Keys::source(block, scales), subtile, token, tile, out);
  if constexpr (C::kBoosted > 0) Boost<C>::add(block, subtile, token, tile, out);
}

// Chooses a group's boosted channels, whose extremes are `low` and `high`, and writes its index. `row(t)` is the group's t-th token.
template <class C, class Row>
inline void select_boosted(uint8_t* index, Row row, const float* low, const float* high) {
  using Element = typename C::Element;
  double key[C::kHeadDim] = {};
  if constexpr (C::kSelect == Select::mean_abs)
    for (int t = 0; t < C::Key::kGroup; ++t)
      for (int c = 0; c < C::kHeadDim; c += kLanes) {
        const F32 x = load_floats<Element>(row(t) + c);
        for (int i = 0; i < kLanes; ++i) key[c + i] += std::fabs(static_cast<double>(x[i]));
      }
  if constexpr (C::kSelect == Select::range)
    for (int c = 0; c < C::kHeadDim; ++c) key[c] = high[c] - low[c];
  // Keys are not negative, so their bits have the same order; a NaN has a place in it too.
  uint64_t order[C::kHeadDim];
  std::memcpy(order, key, sizeof(order));
  int channels[C::kHeadDim];
  std::iota(channels, channels + C::kHeadDim, 0);
  std::stable_sort(channels, channels + C::kHeadDim, [&](int a, int b) { return order[a] > order[b]; });
  std::sort(channels, channels + C::kBoosted);
  std::copy(channels, channels + C::kBoosted, index);
}

// A run of packed tokens, which is one step of the online softmax.

// Where the sub-tiles of a run of packed tokens lie.
template <class C>
struct Chunk {
  static constexpr int most = C::chunk;
  static constexpr int subtiles = most / C::kSubtile;
  static constexpr int tiles_per_subtile = C::kSubtile / kLanes;

  int64_t position;  // of the first token
  int tokens;
  const uint8_t* block[subtiles];
  const uint8_t* subtile[subtiles];
  const float *key_scales, *value_scales;  // static ones of the head
  int64_t prefetch_offset[subtiles];       // bytes from a sub-tile to the one that comes C::prefetch later

  int in_block(int token) const { return static_cast<int>((position + token) % C::kTokens); }
};

// The end of the run of tokens from `token` on that shares a group of `group` tokens; blocks hold whole groups.
template <class C>
inline int group_end(const Chunk<C>& chunk, int token, int group) {
  const int end = token + group - chunk.in_block(token) % group;
  return end < chunk.tokens ? end : chunk.tokens;
}

}  // namespace kvgen
