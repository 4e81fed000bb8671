// Dot products of 16-bit integers: VNNI where the processor has it, else vpmaddwd, else plain arithmetic: the same numbers everywhere.
#pragma once

#include "kvgen/tiles.hpp"

namespace kvgen {

// sum + a.low * b.low + a.high * b.high in every lane, of the signed halves of a and b.
template <int N>
inline typename Vec<N>::I add_pairs(typename Vec<N>::I sum, typename Vec<N>::U a, typename Vec<N>::U b) {
  using I = typename Vec<N>::I;
#if defined(__AVX512VNNI__)
  if constexpr (N == 16) return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  if constexpr (N == 16) return sum + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
#if defined(__AVXVNNI__)
  if constexpr (N == 8) return (I)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  if constexpr (N == 8) return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
  return sum + ((I)(a << 16) >> 16) * ((I)(b << 16) >> 16) + ((I)a >> 16) * ((I)b >> 16);
}

// Pair j of a word with P codes: codes j and j + P / 2, in the low and the high half. One shift and one mask for both.
template <int Bits, class U>
inline U code_pair(U word, int j) {
  return (word >> (Bits * j)) & (((1u << Bits) - 1) * 0x10001u);
}

// The numbers for P codes in the order of `code_pair`, word by word.
template <int P>
inline I32 in_pairs(I32 v) {
  constexpr auto from = [](int i) { return i / P * P + i % 2 * (P / 2) + i % P / 2; };
  return __builtin_shuffle(v, I32{from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7), from(8), from(9), from(10),
                                  from(11), from(12), from(13), from(14), from(15)});
}

// sums(m, t) += sum over k of weight[m * N + k] * stored code(tile t, k), over `words` words of 16 rows each. The weights of a word stand
// in pairs. See `multiply`.
template <int Bits, bool Prefetch, int N, int M, int T>
inline __attribute__((always_inline)) void multiply_integers(const uint8_t* const (&tile)[T], int64_t prefetch_offset,
                                                             const int16_t* weight, int words, Sums<M, T, I32>& sums) {
  using U = typename Register::U;
  constexpr int pairs = 16 / Bits, step = pairs < kStep / 2 ? pairs : kStep / 2;
  for (int w = 0; w < words; ++w) {
    TileWords<T> packed;
    packed.template load<Prefetch>(tile, w, prefetch_offset);
#pragma GCC unroll 1
    for (int first = 0; first < pairs; first += step) {
#pragma GCC unroll 16
      for (int j = 0; j < step; ++j) {
        U code[T][kRegisters];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
          for (int p = 0; p < kRegisters; ++p) code[t][p] = code_pair<Bits>(packed.word[t][p], j);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const U b = load<uint32_t>(weight + m * N + (w * pairs + first + j) * 2) - U{};
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int p = 0; p < kRegisters; ++p) sums.reg[m][t][p] = add_pairs<kRegisterLanes>(sums.reg[m][t][p], code[t][p], b);
        }
      }
      if constexpr (step < pairs) packed.shift_right(step * Bits);
    }
  }
}

}  // namespace kvgen
