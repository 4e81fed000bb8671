// The inner loop of both products: 16-row tiles of codes times the weights of a few query rows.
#pragma once

#include "kvgen/codec.hpp"

namespace kvgen {

// A function of its own, so that nothing around it competes for vector registers.
#define KVGEN_HOT __attribute__((noinline))

// Words are taken apart in steps of this many codes: longer straight lines of code outgrow the decoded-instruction cache.
constexpr int kStep = 8;

// acc[m][t] += sum over k of weight[m][k] * code(tile t, k), over `words` words of 16 rows each.
// M query rows share every decoded code, T tiles share every broadcast weight. With Prefetch, memory `ahead` bytes on is asked for.
template <class Code, int M, int T, bool Prefetch>
inline __attribute__((always_inline)) void multiply(const uint8_t* const (&tile)[T], int64_t ahead, const float* weight, int weight_stride, int words, F32 (&acc)[M][T]) {
  for (int w = 0; w < words; ++w) {
    U32 word[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      word[t] = load<U32>(tile[t] + w * 64);
      if constexpr (Prefetch) __builtin_prefetch(tile[t] + w * 64 + ahead);
    }
    constexpr int step = Code::per_word < kStep ? Code::per_word : kStep;
#pragma GCC unroll 1
    for (int first = 0; first < Code::per_word; first += step) {
#pragma GCC unroll 16
      for (int k = 0; k < step; ++k) {
        F32 code[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) code[t] = Code::code(word[t], k);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const F32 b = splat(weight[m * weight_stride + w * Code::per_word + first + k]);
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) acc[m][t] += code[t] * b;
        }
      }
      if constexpr (step < Code::per_word)
        for (int t = 0; t < T; ++t) word[t] >>= step * (32 / Code::per_word);
    }
  }
}

// Calls f(integral T', first) for steps of T tiles from `begin`, then of T / 2, ... until `end`.
template <int T>
struct Width {
  static constexpr int value = T;
};

template <int T, class F>
inline __attribute__((always_inline)) void for_tiles(int begin, int end, F f) {
  for (; begin + T <= end; begin += T) f(Width<T>{}, begin);
  if constexpr (T > 1)
    if (begin < end) for_tiles<T / 2>(begin, end, f);
}

}  // namespace kvgen
