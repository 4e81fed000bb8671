// Dot products with 16-bit integers: VNNI where the processor has it, else vpmaddwd, else plain arithmetic: the same numbers everywhere.
#pragma once

#include "kvgen/tiles.hpp"

namespace kvgen {

// How a product of codes and weights of 16 bits is made. AVX-512 VNNI multiplies four codes by four bytes in every lane; the upper and the
// lower byte of a weight have sums of their own, which meet at the end. Others multiply two codes by two weights.
#ifdef __AVX512VNNI__
constexpr int kParts = 2;
#else
constexpr int kParts = 1;
#endif
constexpr int kCodes = 2 * kParts;  // in a lane

// sum + the products of the codes in a lane of `a` and the parts of weights in that of `b`.
template <class I, class U>
KVGEN_INLINE I add_products(const I& sum, const U& a, const U& b) {
  constexpr int N = lanes_of<I>;
  if constexpr (halved<I>) return {add_products(sum.low, a.low, b.low), add_products(sum.high, a.high, b.high)};
#if defined(__AVX512VNNI__)
  static_assert(N == 16);
  return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
#if defined(__AVX512BW__)
  if constexpr (N == 16) return sum + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
#if defined(__AVXVNNI__)
  if constexpr (N == 8) return (I)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  if constexpr (N == 8) return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
  return sum + (as<I>(a << 16) >> 16) * (as<I>(b << 16) >> 16) + (as<I>(a) >> 16) * (as<I>(b) >> 16);
#endif
}

// Codes j, j + P / kCodes, ... of a word with P codes, each in a part of the lane. One shift and one mask for all of them.
template <int Bits, class U>
KVGEN_INLINE U codes_of(U word, int j) {
  constexpr uint32_t ones = kParts == 2 ? 0x01010101u : 0x10001u;
  return (word >> (Bits * j)) & (((1u << Bits) - 1) * ones);
}

// sums(part * M + m, t) += sum over k of that part of weight[m][k] * stored code(tile t, k), over `words` words of 16 rows each. A row of
// weights takes 2 * N bytes: word by word, part by part, in the order of `codes_of`. See `multiply`.
template <int Bits, int Prefetched, int N, int M, int T>
KVGEN_INLINE void multiply_integers(const uint8_t* const (&tile)[T], int64_t prefetch_offset, const uint8_t* weight, int words,
                                    Sums<kParts * M, T, I32>& sums) {
  constexpr int per_word = 32 / Bits, steps = per_word / kCodes, step = steps < kStep / kCodes ? steps : kStep / kCodes;
  for (int w = 0; w < words; ++w) {
    TileWords<T> packed;
    packed.template load<Prefetched>(tile, w, prefetch_offset);
#pragma GCC unroll 1
    for (int first = 0; first < steps; first += step) {
#pragma GCC unroll 16
      for (int j = 0; j < step; ++j) {
        U32 code[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) code[t] = codes_of<Bits>(packed.word[t], j);
#pragma GCC unroll 16
        for (int r = 0; r < kParts * M; ++r) {
          const U32 b = splat<U32>(load<uint32_t>(weight + r % M * 2 * N + w * 2 * per_word + r / M * per_word + (first + j) * 4));
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) sums.reg[r][t] = add_products(sums.reg[r][t], code[t], b);
        }
      }
      if constexpr (step < steps) packed.shift_right(step * Bits);
    }
  }
}

// Stores 16 weights, whose integers plus kRoundedOffset are the low bits of `v`, in the order of words with P codes.
#ifdef __AVX512VNNI__
constexpr int32_t kRoundedOffset = 128;  // makes the second byte the upper part, since the lower one is a signed number

template <int P>
inline void store_weights(I32 v, uint8_t* to) {
  typedef int8_t Bytes __attribute__((vector_size(64)));
  Bytes from{}, flip{};
  for (int i = 0; i < 32; ++i) {
    const int word = i / (2 * P), part = i / P % 2, code = i % P;
    from[i] = static_cast<int8_t>((word * P + code % 4 * (P / 4) + code / 4) * 4 + part);
    flip[i] = part == 0 ? -128 : 0;
  }
  const Bytes all = __builtin_shuffle((Bytes)v, from) ^ flip;
  std::memcpy(to, &all, 32);
}
#else
constexpr int32_t kRoundedOffset = 0;

template <int P, class V>
KVGEN_INLINE void store_weights(const V& v, uint8_t* to) {
  constexpr int N = lanes_of<V>;
  if constexpr (halved<V> && N > P) {
    store_weights<P>(v.low, to);
    store_weights<P>(v.high, to + N);
  } else if constexpr (halved<V>) {
    store(to, (v.low & 0xffff) | v.high << 16);
  } else {
    store(to, convert<int16_t>(__builtin_shuffle(v, lanes_from<V>([](int i) { return i / P * P + i % 2 * (P / 2) + i % P / 2; }))));
  }
}
#endif

}  // namespace kvgen
