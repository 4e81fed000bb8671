// p . V over a chunk of packed tokens, for C::rows query rows at a time.
#pragma once

#include "kvgen/chunk.hpp"

namespace kvgen {

// Adds the weighted V as it is packed. `p` has rows of C::chunk floats, `acc` rows of head_dim.
template <class C>
struct PackedValues {
  using Op = Operand<C, typename C::Value>;
  using Code = typename Op::Code;
  static constexpr int dim = C::head_dim;
  static constexpr int M = C::rows;
  static constexpr int prefetched = C::prefetch > 0 ? kAllWords : 0;
  static constexpr bool direct = !Code::quantized || C::Value::per_channel || C::Value::group % kLanes == 0;

  static constexpr float no_bias[M] = {};

  const Chunk<C>& chunk;

  void add(const float* p, float* acc) const {
    if constexpr (!Code::quantized)
      columns<FloatWeights<Code, M, C::chunk>>(p, no_bias, 0, dim / kLanes, acc);
    else if constexpr (C::Value::per_channel)
      per_channel(p, acc);
    else
      per_token(p, acc);
  }

 private:
  // Scales go into the weights, zeros into one number per row.
  void per_token(const float* p, float* acc) const {
    constexpr int groups = dim / C::Value::group, tiles = C::Value::group / kLanes;
    alignas(64) float scaled[M * C::chunk];
    for (int g = 0; g < groups; ++g) {
      F32 zeros[M] = {};
      for (int token = 0; token < chunk.tokens; token += kLanes) {
        const Affine a = Op::centered(Op::affine(nullptr, chunk.subtile[token / C::subtile], g, token % C::subtile));
        for (int m = 0; m < M; ++m) {
          const F32 x = load<F32>(p + m * C::chunk + token);
          store(scaled + m * C::chunk + token, x * a.scale);
          if constexpr (C::Value::zero) zeros[m] += x * a.zero;
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
    for (int token = 0; token < chunk.tokens; token += C::subtile) run<T>(first, token, C::subtile, weights, acc);
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
      const uint8_t* block = chunk.block[begin / C::subtile];
      const int group = chunk.in_block(begin) / C::Value::group, end = group_end(chunk, begin, C::Value::group);
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
      next = (token / C::subtile + 1) * C::subtile;
      next = next < end ? next : end;
      run<T>(first, token, next - token, weights, acc);
    }
    for (int t = 0; t < T; ++t) {
      const Affine a = Op::centered(Op::affine(block, nullptr, group, (first + t) * kLanes));
      for (int m = 0; m < M; ++m) {
        float* at = out + m * dim + (first + t) * kLanes;
        F32 sum_of_group = weights.sum(acc, m, t) * a.scale;
        if constexpr (C::Value::zero) sum_of_group += total[m] * a.zero;
        store(at, load<F32>(at) + sum_of_group);
      }
    }
  }

  // Tokens of one sub-tile.
  template <int T, class W, class Acc>
  KVGEN_INLINE void run(int first, int token, int tokens, const W& weights, Acc& acc) const {
    const uint8_t* subtile = chunk.subtile[token / C::subtile];
    const uint8_t* at[T];
    for (int t = 0; t < T; ++t) at[t] = Op::codes(subtile, first + t) + token % C::subtile / Code::per_word * 64;
    weights.template add<prefetched>(at, chunk.prefetch_offset[token / C::subtile], token, tokens / Code::per_word, acc);
  }
};

}  // namespace kvgen
