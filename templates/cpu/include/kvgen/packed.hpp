// Attention over a chunk of packed tokens, for C::rows query rows at a time: q . K and p . V.
#pragma once
#include "kvgen/products.hpp"

namespace kvgen {

// q . K over a chunk of packed tokens, for C::rows query rows at a time.

// Scores of K as it is packed. `q` has rows of head_dim floats, `score` rows of C::chunk.
template <class C>
struct PackedKeys {
  using Op = Operand<C, typename C::Key>;
  using Code = typename Op::Code;
  static constexpr int dim = C::kHeadDim;
  static constexpr int M = C::rows;
  static constexpr int prefetched = C::prefetch > 0 ? kAllWords : 0;
  static constexpr bool direct = !Code::quantized || Op::per_channel || C::Key::kGroup % Code::per_word == 0;

  static constexpr float no_bias[M] = {};

  const Chunk<C>& chunk;

  void scores(const float* q, const float* q_sum, float* score) const {
    if constexpr (!Code::quantized)
      plain(q, score);
    else if constexpr (Op::per_channel)
      per_channel(q, score);
    else
      per_token(q, q_sum, score);
  }

  // Prefetches the part of a later tile that the products did not prefetch: the m-th of M parts. The softmax calls this, so that the read
  // goes on meanwhile.
  KVGEN_INLINE void prefetch_rest(int m, int tile) const {
    if constexpr (early > 0 && late > 0) {
      constexpr int part = (late + M - 1) / M;
      const uint8_t* from = codes(tile) + prefetch_offset(tile);
#pragma GCC unroll 8
      for (int w = early + m * part; w < early + (m + 1) * part; ++w)
        if (late % M == 0 || w < early + late) __builtin_prefetch(from + w * 64, 0, kSecondLevel);
    }
  }

 private:
  // With K per channel the products prefetch the first words of a later tile, and leave the last half of them to the softmax. Otherwise
  // they prefetch all.
  static constexpr int late = Code::quantized && Op::per_channel ? dim / Code::per_word / 2 : 0;
  static constexpr int early = C::prefetch > 0 ? dim / Code::per_word - late : 0;

  using Whole = Weights<C, Code, dim>;
  using Group = Weights<C, Code, dim, C::Key::kGroup>;
  using Upper = Weights<C, typename Boost<C>::Code, Boost<C>::slots>;

  void plain(const float* q, float* score) const {
    FloatWeights<Code, M, dim> weights;
    weights.set(q, dim, no_bias);
    tiles(weights, 0, chunk.tokens, score);
  }

  // Scales go into the query, zeros into one number per row.
  void per_channel(const float* q, float* score) const {
    alignas(64) float folded[M * dim];
    alignas(64) float boosted[M * (Boost<C>::slots + 1)];
    Whole weights;
    for (int begin = 0; begin < chunk.tokens;) {
      const uint8_t* block = Op::source(chunk.block[begin / C::kSubtile], chunk.key_scales);
      const int group = chunk.in_block(begin) / C::Key::kGroup, end = group_end(chunk, begin, C::Key::kGroup);
      F32 zeros[M] = {};
      for (int c = 0; c < dim; c += kLanes) {
        const Affine a = Op::centered(Op::affine(block, nullptr, group, c));
        for (int m = 0; m < M; ++m) {
          const F32 x = load<F32>(q + m * dim + c);
          store(folded + m * dim + c, x * a.scale);
          if constexpr (C::Key::kZero) zeros[m] += x * a.zero;
        }
      }
      float bias[M];
      for (int m = 0; m < M; ++m) bias[m] = sum(zeros[m]);
      weights.set(folded, dim, bias);
      tiles(weights, begin, end, score);
      if constexpr (C::kBoosted > 0) {
        Upper upper;
        Boost<C>::weights(folded, block, group, boosted, bias);
        upper.set(boosted, Boost<C>::slots, bias);
        for_tiles<shared_tiles<Upper>(C::key_tiles)>(begin / kLanes, end / kLanes,
                                                     [&](auto width, int first) { add_upper(width, first, upper, score); });
      }
      begin = end;
    }
  }

  template <class W>
  void tiles(const W& weights, int begin, int end, float* score) const {
    for_tiles<shared_tiles<W>(C::key_tiles)>(begin / kLanes, end / kLanes,
                                             [&](auto width, int first) { tiles_of(width, first, weights, score); });
  }

  template <int T, class W>
  KVGEN_HOT void tiles_of(Width<T>, int first, const W& weights, float* score) const {
    const uint8_t* at[T];
    for (int t = 0; t < T; ++t) at[t] = codes(first + t);
    auto acc = weights.template start<T>();
    weights.template add<early>(at, prefetch_offset(first), 0, dim / Code::per_word, acc);
    for (int m = 0; m < M; ++m)
      for (int t = 0; t < T; ++t) store(score + m * C::chunk + (first + t) * kLanes, weights.sum(acc, m, t));
  }

  // Adds the products of the upper codes of boosted channels.
  template <int T>
  KVGEN_HOT void add_upper(Width<T>, int first, const Upper& weights, float* score) const {
    const uint8_t* at[T];
    for (int t = 0; t < T; ++t)
      at[t] = Boost<C>::codes(chunk.subtile[(first + t) / chunk.tiles_per_subtile], (first + t) % chunk.tiles_per_subtile);
    auto acc = weights.template start<T>();
    weights.template add<prefetched>(at, prefetch_offset(first), 0, Boost<C>::words, acc);
    for (int m = 0; m < M; ++m)
      for (int t = 0; t < T; ++t) {
        float* to = score + m * C::chunk + (first + t) * kLanes;
        store(to, load<F32>(to) + weights.sum(acc, m, t));
      }
  }

  // A scale multiplies the sum of products over a group of channels, a zero the sum of the query over it.
  void per_token(const float* q, const float* q_sum, float* score) const {
    constexpr int groups = dim / C::Key::kGroup;
    Group weights[groups];
    for (int g = 0; g < groups; ++g) weights[g].set(q + g * C::Key::kGroup, C::Key::kGroup, no_bias);
    for_tiles<shared_tiles<Group>(C::key_tiles)>(0, chunk.tokens / kLanes, [&](auto width, int first) {
      for (int g = 0; g < groups; ++g) group_of(width, first, g, weights[g], q_sum, score);
    });
  }

  template <int T>
  KVGEN_HOT void group_of(Width<T>, int first, int g, const Group& weights, const float* q_sum, float* score) const {
    constexpr int groups = dim / C::Key::kGroup, words = C::Key::kGroup / Code::per_word;
    const uint8_t* at[T];
    for (int t = 0; t < T; ++t) at[t] = codes(first + t) + g * words * 64;
    auto acc = weights.template start<T>();
    weights.template add<prefetched>(at, prefetch_offset(first), 0, words, acc);
    for (int t = 0; t < T; ++t) {
      const int tile = first + t;
      const uint8_t* subtile = chunk.subtile[tile / chunk.tiles_per_subtile];
      const Affine a = Op::centered(Op::affine(Op::source(nullptr, chunk.key_scales), subtile, g, tile % chunk.tiles_per_subtile * kLanes));
      for (int m = 0; m < M; ++m) {
        float* to = score + m * C::chunk + tile * kLanes;
        F32 sum_of_group = weights.sum(acc, m, t) * a.scale;
        if constexpr (C::Key::kZero) sum_of_group += q_sum[m * groups + g] * a.zero;
        store(to, g == 0 ? sum_of_group : load<F32>(to) + sum_of_group);
      }
    }
  }

  int64_t prefetch_offset(int tile) const { return chunk.prefetch_offset[tile / chunk.tiles_per_subtile]; }
  const uint8_t* codes(int tile) const { return Op::codes(chunk.subtile[tile / chunk.tiles_per_subtile], tile % chunk.tiles_per_subtile); }
};

// p . V over a chunk of packed tokens, for C::rows query rows at a time.

// Adds the weighted V as it is packed. `p` has rows of C::chunk floats, `acc` rows of head_dim.
template <class C>
struct PackedValues {
  using Op = Operand<C, typename C::Value>;
  using Code = typename Op::Code;
  static constexpr int dim = C::kHeadDim;
  static constexpr int M = C::rows;
  static constexpr int prefetched = C::prefetch > 0 ? kAllWords : 0;
  static constexpr bool direct = !Code::quantized || Op::per_channel || C::Value::kGroup % kLanes == 0;

  static constexpr float no_bias[M] = {};

  const Chunk<C>& chunk;

  void add(const float* p, float* acc) const {
    if constexpr (!Code::quantized)
      columns<FloatWeights<Code, M, C::chunk>>(p, no_bias, 0, dim / kLanes, acc);
    else if constexpr (Op::per_channel)
      per_channel(p, acc);
    else
      per_token(p, acc);
  }

 private:
  // Scales go into the weights, zeros into one number per row.
  void per_token(const float* p, float* acc) const {
    constexpr int groups = dim / C::Value::kGroup, tiles = C::Value::kGroup / kLanes;
    alignas(64) float scaled[M * C::chunk];
    for (int g = 0; g < groups; ++g) {
      F32 zeros[M] = {};
      for (int token = 0; token < chunk.tokens; token += kLanes) {
        const uint8_t *subtile = chunk.subtile[token / C::kSubtile], *second = Op::source(nullptr, chunk.value_scales);
        const Affine a = Op::centered(Op::affine(second, subtile, g, token % C::kSubtile));
        for (int m = 0; m < M; ++m) {
          const F32 x = load<F32>(p + m * C::chunk + token);
          store(scaled + m * C::chunk + token, x * a.scale);
          if constexpr (C::Value::kZero) zeros[m] += x * a.zero;
        }
      }
      float bias[M];
      for (int m = 0; m < M; ++m) bias[m] = sum(zeros[m]);
      columns<Weights<C, Code, C::chunk>>(scaled, bias, g * tiles, (g + 1) * tiles, acc);
    }
  }

  template <class W>
  void columns(const float* p, const float (&bias)[M], int begin, int end, float* acc) const {
    W weights;
    weights.set(p, chunk.tokens, bias);
    for_tiles<shared_tiles<W>(C::value_tiles)>(begin, end, [&](auto width, int first) { column(width, first, weights, acc); });
  }

  // All tokens of the chunk, for a few tiles of channels.
  template <int T, class W>
  KVGEN_HOT void column(Width<T>, int first, const W& weights, float* out) const {
    auto acc = weights.template start<T>();
    for (int token = 0; token < chunk.tokens; token += C::kSubtile) run<T>(first, token, C::kSubtile, weights, acc);
    for (int m = 0; m < M; ++m)
      for (int t = 0; t < T; ++t) {
        float* at = out + m * dim + (first + t) * kLanes;
        store(at, load<F32>(at) + weights.sum(acc, m, t));
      }
  }

  // A scale multiplies the sum of products over a group of tokens, a zero the sum of the weights over it. The weights stay floats: they
  // have no scale that would keep a token of large weight and small values from taking the precision of the others.
  void per_channel(const float* p, float* out) const {
    FloatWeights<Code, M, C::chunk> weights;
    weights.set(p, chunk.tokens, no_bias);
    for (int begin = 0; begin < chunk.tokens;) {
      const uint8_t* block = Op::source(chunk.block[begin / C::kSubtile], chunk.value_scales);
      const int group = chunk.in_block(begin) / C::Value::kGroup, end = group_end(chunk, begin, C::Value::kGroup);
      float total[M];
      for (int m = 0; m < M; ++m) {
        F32 s = {};
        for (int token = begin; token < end; token += kLanes) s += load<F32>(p + m * C::chunk + token);
        total[m] = sum(s);
      }
      for_tiles<C::value_tiles>(0, dim / kLanes,
                                [&](auto width, int first) { stretch(width, first, begin, end, block, group, weights, total, out); });
      begin = end;
    }
  }

  // The tokens of one group, for a few tiles of channels.
  template <int T, class W>
  KVGEN_HOT void stretch(Width<T>, int first, int begin, int end, const uint8_t* block, int group, const W& weights, const float* total,
                         float* out) const {
    auto acc = weights.template start<T>();
    for (int token = begin, next; token < end; token = next) {
      next = (token / C::kSubtile + 1) * C::kSubtile;
      next = next < end ? next : end;
      run<T>(first, token, next - token, weights, acc);
    }
    for (int t = 0; t < T; ++t) {
      const Affine a = Op::centered(Op::affine(block, nullptr, group, (first + t) * kLanes));
      for (int m = 0; m < M; ++m) {
        float* at = out + m * dim + (first + t) * kLanes;
        F32 sum_of_group = weights.sum(acc, m, t) * a.scale;
        if constexpr (C::Value::kZero) sum_of_group += total[m] * a.zero;
        store(at, load<F32>(at) + sum_of_group);
      }
    }
  }

  // Tokens of one sub-tile.
  template <int T, class W, class Acc>
  KVGEN_INLINE void run(int first, int token, int tokens, const W& weights, Acc& acc) const {
    const uint8_t* subtile = chunk.subtile[token / C::kSubtile];
    const uint8_t* at[T];
    for (int t = 0; t < T; ++t) at[t] = Op::codes(subtile, first + t) + token % C::kSubtile / Code::per_word * 64;
    weights.template add<prefetched>(at, chunk.prefetch_offset[token / C::kSubtile], token, tokens / Code::per_word, acc);
  }
};

// The sub-tile that a sequence ends in, where tokens are quantized as they arrive. It is attended to as if it were full, so that a query
// gets the same bits from it whether or not later tokens are there.
template <class C>
struct LastSubtile {
  using Op = Operand<C, typename C::Value>;
  static constexpr int per_word = Op::Code::per_word;

  alignas(64) uint8_t bytes[C::kSubtileBytes];

  // Completes a chunk to whole sub-tiles. What is not there has V of zero, so that a weight of 0 makes nothing of it; its K is arbitrary.
  void complete(Chunk<C>& chunk) {
    const int there = chunk.tokens % C::kSubtile, at = chunk.tokens / C::kSubtile;
    if (there == 0) return;
    std::memcpy(bytes, chunk.subtile[at], C::kSubtileBytes);
    chunk.subtile[at] = bytes;
    chunk.tokens += C::kSubtile - there;
    for (int tile = 0; tile < C::kHeadDim / kLanes; ++tile) {
      uint8_t* words = const_cast<uint8_t*>(Op::codes(bytes, tile));
      const int shared = there % per_word, first = there / per_word;
      if (shared > 0) store(words + first * 64, load<U32>(words + first * 64) & ((1u << 32 / per_word * shared) - 1));
      std::memset(words + (first + (shared > 0)) * 64, 0, (C::kSubtile / per_word - first - (shared > 0)) * 64);
    }
    if constexpr (Op::Code::quantized && !Op::per_channel)
      for (int group = 0; group < C::kHeadDim / C::Value::kGroup; ++group)
        for (int param = 0; param < C::Value::kParams; ++param) {
          const auto* params = Op::param(nullptr, bytes, group, param * Op::param_extent + there);
          std::memset(const_cast<typename Op::Param*>(params), 0, sizeof(typename Op::Param) * (C::kSubtile - there));
        }
  }
};

// q . K and p . V over tokens that were expanded to floats, for C::rows query rows at a time.

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

  // Dequantizes packed tokens. In a sub-tile that is partly filled, K of the others is arbitrary, and V zero, so that a weight of 0 makes
  // nothing of them.
  void set_packed(const Chunk<C>& chunk) {
    using Values = Operand<C, typename C::Value>;
    tokens = (chunk.tokens + kLanes - 1) / kLanes * kLanes;
    for (int token = 0; token < tokens; token += C::kSubtile) {
      const uint8_t *block = chunk.block[token / C::kSubtile], *subtile = chunk.subtile[token / C::kSubtile];
      const int at = chunk.in_block(token);
      for (int tile = 0; tile < C::kSubtile / kLanes; ++tile)
        expand_keys<C>(block, chunk.key_scales, subtile, at, tile, k + (token + tile * kLanes) * dim);
      for (int tile = 0; tile < dim / kLanes; ++tile)
        Values::expand(Values::source(block, chunk.value_scales), subtile, at, tile, v + (tile * most + token) * kLanes);
    }
    if constexpr (C::ResidualRows::kArrival)
      for (int tile = 0; tile < dim / kLanes; ++tile)
        for (int token = chunk.tokens; token < tokens; ++token) store(v + (tile * most + token) * kLanes, F32{});
  }
};

}  // namespace kvgen
