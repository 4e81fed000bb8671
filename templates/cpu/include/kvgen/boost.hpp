// Boosted channels of K (Kitty): x = scale * (low + 4 * high) + zero, where `high` is in a second stream of 2-bit codes.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kvgen/codec.hpp"

namespace kvgen {

enum class Select { mean_abs, range, fixed };

// Where the boosted channels of a configuration lie. Without boost it is not used.
template <class C>
struct Boost {
  using Code = Codec<2, typename C::Element>;
  using Keys = Operand<C, typename C::Key>;
  static constexpr int channels = C::Key::boosted;
  static constexpr int slots = (channels + Code::per_word - 1) / Code::per_word * Code::per_word;  // words are whole
  static constexpr int words = slots / Code::per_word;

  // The numbers of a group's boosted channels, ascending.
  static const uint8_t* index(const uint8_t* block, int group) { return block + C::boost_index + group * channels; }
  static const uint8_t* codes(const uint8_t* subtile, int tile) { return subtile + C::boost_codes + tile * words * 64; }

  // The weights of the upper codes, rows of `slots` floats, from those of the lower ones, and what centering the codes adds to the
  // scores of every row: the codes are decoded with their middle subtracted.
  static void weights(const float* folded, const uint8_t* block, int group, float* boosted, float (&bias)[C::rows]) {
    const uint8_t* channel = index(block, group);
    for (int m = 0; m < C::rows; ++m) {
      bias[m] = 0;
      for (int i = 0; i < slots; ++i) {
        const float x = i < channels ? 4 * folded[m * C::head_dim + channel[i]] : 0;
        boosted[m * slots + i] = x;
        bias[m] += x * Code::middle;
      }
    }
  }

  // Adds the upper codes to 16 dequantized rows of a sub-tile whose first token is `token` of the block: out[channel * 16 + row].
  static void add(const uint8_t* block, const uint8_t* subtile, int token, int tile, float* out) {
    const int group = (token + tile * kLanes) / C::Key::group;
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
inline void expand_keys(const uint8_t* block, const uint8_t* subtile, int token, int tile, float* out) {
  Operand<C, typename C::Key>::expand(block, subtile, token, tile, out);
  if constexpr (C::Key::boosted > 0) Boost<C>::add(block, subtile, token, tile, out);
}

// Chooses a group's boosted channels, whose extremes are `low` and `high`, and writes its index. `row(t)` is the group's t-th token.
template <class C, class Row>
inline void select_boosted(uint8_t* index, Row row, const float* low, const float* high) {
  using Element = typename C::Element;
  double key[C::head_dim] = {};
  if constexpr (C::select == Select::mean_abs)
    for (int t = 0; t < C::Key::group; ++t)
      for (int c = 0; c < C::head_dim; c += kLanes) {
        const F32 x = load_floats<Element>(row(t) + c);
        for (int i = 0; i < kLanes; ++i) key[c + i] += std::fabs(static_cast<double>(x[i]));
      }
  if constexpr (C::select == Select::range)
    for (int c = 0; c < C::head_dim; ++c) key[c] = high[c] - low[c];
  // Keys are not negative, so their bits have the same order; a NaN has a place in it too.
  uint64_t order[C::head_dim];
  std::memcpy(order, key, sizeof(order));
  int channels[C::head_dim];
  std::iota(channels, channels + C::head_dim, 0);
  std::stable_sort(channels, channels + C::head_dim, [&](int a, int b) { return order[a] > order[b]; });
  std::sort(channels, channels + C::Key::boosted);
  std::copy(channels, channels + C::Key::boosted, index);
}

}  // namespace kvgen
