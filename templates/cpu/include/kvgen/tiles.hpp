// The inner loop of both products: 16-row tiles of codes times the weights of a few query rows.
#pragma once

#include "kvgen/boost.hpp"

namespace kvgen {

// A function of its own, so that nothing around it competes for vector registers.
#define KVGEN_HOT __attribute__((noinline))

// Words are taken apart in steps of this many codes: longer straight lines of code outgrow the decoded-instruction cache.
constexpr int kStep = 8;

// All words of a tile.
constexpr int kAllWords = 1 << 30;

// Sums of M query rows and T tiles, in registers: V is F32 or I32.
template <int M, int T, class V = F32>
struct Sums {
  static constexpr bool floats = std::is_same_v<V, F32>;
  using Number = std::conditional_t<floats, float, int32_t>;

  V reg[M][T];

  // `start` has a number for every row.
  explicit Sums(const Number (&start)[M]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) reg[m][t] = splat<V>(start[m]);
  }

  V operator()(int m, int t) const { return reg[m][t]; }
};

// One word of each of the 16 rows of T tiles, in registers.
template <int T>
struct TileWords {
  U32 word[T];

  // The memory `prefetch_offset` bytes later is prefetched, too, of the words before the Prefetched-th.
  template <int Prefetched>
  KVGEN_INLINE void load(const uint8_t* const (&tile)[T], int w, int64_t prefetch_offset) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      word[t] = kvgen::load<U32>(tile[t] + w * 64);
      if constexpr (Prefetched > 0)
        if (w < Prefetched) __builtin_prefetch(tile[t] + w * 64 + prefetch_offset, 0, kSecondLevel);
    }
  }

  KVGEN_INLINE void shift_right(int bits) {
    for (int t = 0; t < T; ++t) word[t] >>= bits;
  }
};

// sums(m, t) += sum over k of weight[m][k] * code(tile t, k), over `words` words of 16 rows each.
// M query rows share every decoded code, T tiles share every broadcast weight. The memory `prefetch_offset` bytes later is prefetched, too,
// of the first Prefetched words of each tile.
template <class Code, int Prefetched, int M, int T>
KVGEN_INLINE void multiply(const uint8_t* const (&tile)[T], int64_t prefetch_offset, const float* weight, int weight_stride, int words,
                           Sums<M, T>& sums) {
  for (int w = 0; w < words; ++w) {
    TileWords<T> packed;
    packed.template load<Prefetched>(tile, w, prefetch_offset);
    constexpr int step = Code::per_word < kStep ? Code::per_word : kStep;
#pragma GCC unroll 1
    for (int first = 0; first < Code::per_word; first += step) {
#pragma GCC unroll 16
      for (int k = 0; k < step; ++k) {
        F32 code[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) code[t] = Code::code(packed.word[t], k);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const F32 b = splat<F32>(weight[m * weight_stride + w * Code::per_word + first + k]);
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) sums.reg[m][t] += code[t] * b;
        }
      }
      if constexpr (step < Code::per_word) packed.shift_right(step * (32 / Code::per_word));
    }
  }
}

// A number of tiles, as a type.
template <int T>
struct Width {
  static constexpr int value = T;
};

// Calls f(Width<T>{}, first) for steps of T tiles from `begin`, then f(Width<T / 2>{}, first), and so on until `end`.
template <int T, class F>
KVGEN_INLINE void for_tiles(int begin, int end, F f) {
  for (; begin + T <= end; begin += T) f(Width<T>{}, begin);
  if constexpr (T > 1)
    if (begin < end) for_tiles<T / 2>(begin, end, f);
}

}  // namespace kvgen
