// q . K and p . V over tokens that were expanded to floats, for C::rows query rows at a time.
#pragma once

#include "kvgen/chunk.hpp"

namespace kvgen {

// Tokens as floats: K as [tile of 16 tokens][channel][token], V as [tile of 16 channels][token][channel].
template <class C>
struct Floats {
  static constexpr int dim = C::kHeadDim;
  static constexpr int M = C::rows;
  static constexpr int most = C::chunk < C::expanded ? C::chunk : C::expanded;  // tokens

  static constexpr float no_bias[M] = {};

  alignas(64) float k[most * dim];
  alignas(64) float v[most * dim];
  int tokens;  // a multiple of 16

  void scores(const float* q, const float*, float* score) const {
    for_tiles<C::key_tiles>(0, tokens / kLanes, [&](auto width, int first) {
      constexpr int T = decltype(width)::value;
      const uint8_t* at[T];
      for (int t = 0; t < T; ++t) at[t] = reinterpret_cast<const uint8_t*>(k + (first + t) * dim * kLanes);
      Sums<M, T> acc(no_bias);
      multiply<Expanded, 0>(at, 0, q, dim, dim, acc);
      for (int m = 0; m < M; ++m)
        for (int t = 0; t < T; ++t) store(score + m * C::chunk + (first + t) * kLanes, acc(m, t));
    });
  }

  void prefetch_rest(int, int) const {}

  void add(const float* p, float* out) const {
    for_tiles<C::value_tiles>(0, dim / kLanes, [&](auto width, int first) {
      constexpr int T = decltype(width)::value;
      const uint8_t* at[T];
      for (int t = 0; t < T; ++t) at[t] = reinterpret_cast<const uint8_t*>(v + (first + t) * most * kLanes);
      Sums<M, T> acc(no_bias);
      multiply<Expanded, 0>(at, 0, p, C::chunk, tokens, acc);
      for (int m = 0; m < M; ++m)
        for (int t = 0; t < T; ++t) {
          float* to = out + m * dim + (first + t) * kLanes;
          store(to, load<F32>(to) + acc(m, t));
        }
    });
  }

  // Sets the 16 tokens of a tile from their rows in `dtype`; null stands for an absent token, which becomes zeros.
  void set_tile(int tile, const typename C::Element* const (&k_row)[kLanes], const typename C::Element* const (&v_row)[kLanes]) {
    for (int c = 0; c < dim; c += kLanes) {
      F32 square[kLanes];
      for (int t = 0; t < kLanes; ++t) square[t] = k_row[t] ? load_floats<typename C::Element>(k_row[t] + c) : F32{};
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(k + (tile * dim + c + i) * kLanes, square[i]);
      for (int t = 0; t < kLanes; ++t)
        store(v + (c / kLanes * most + tile * kLanes + t) * kLanes, v_row[t] ? load_floats<typename C::Element>(v_row[t] + c) : F32{});
    }
  }

  // Dequantizes packed tokens.
  void set_packed(const Chunk<C>& chunk) {
    tokens = chunk.tokens;
    for (int token = 0; token < tokens; token += C::kSubtile) {
      const uint8_t *block = chunk.block[token / C::kSubtile], *subtile = chunk.subtile[token / C::kSubtile];
      const int at = chunk.in_block(token);
      for (int tile = 0; tile < C::kSubtile / kLanes; ++tile) expand_keys<C>(block, subtile, at, tile, k + (token + tile * kLanes) * dim);
      for (int tile = 0; tile < dim / kLanes; ++tile)
        Operand<C, typename C::Value>::expand(block, subtile, at, tile, v + (tile * most + token) * kLanes);
    }
  }
};

}  // namespace kvgen
