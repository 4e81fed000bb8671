// Products of codes and weights (a query, softmax weights): the inner loop of both attention products, with floats or, on AVX-512 VNNI
// where a schedule asks for it, with integers of 16 bits.
#pragma once
#include "kvgen/operand.hpp"

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

enum class Dot { fp32, int16 };

// Weights as they are, rows of Stride floats.
template <class Code, int M, int Stride>
class FloatWeights {
 public:
  static constexpr int parts = 1;  // sums of a row of weights and a tile
  template <int T>
  using Acc = Sums<M, T>;

  // Rows of `count` weights, which stay where they are. The value of `bias` for a row is added to each of its sums.
  void set(const float* rows, int, const float (&bias)[M]) {
    rows_ = rows;
    for (int m = 0; m < M; ++m) bias_[m] = bias[m];
  }

  template <int T>
  Acc<T> start() const {
    return Acc<T>(bias_);
  }

  // Adds `words` words of the tiles, whose codes meet the weights from `first` on.
  template <int Prefetched, int T>
  KVGEN_INLINE void add(const uint8_t* const (&tile)[T], int64_t prefetch_offset, int first, int words, Acc<T>& acc) const {
    multiply<Code, Prefetched>(tile, prefetch_offset, rows_ + first, Stride, words, acc);
  }

  template <int T>
  F32 sum(const Acc<T>& acc, int m, int t) const {
    return acc(m, t);
  }

 private:
  const float* rows_;
  float bias_[M];
};

#ifdef __AVX512VNNI__
constexpr int kBytes = 4;  // codes that one instruction multiplies by as many bytes, in every lane

// sums(part * M + m, t) += sum over k of that part of weight[m][k] * stored code(tile t, k), over `words` words of 16 rows each. A row of
// weights takes 2 * N bytes: word by word, part by part, in the order of `integers_of`. See `multiply`.
template <class Code, int Prefetched, int N, int M, int T>
KVGEN_INLINE void multiply_integers(const uint8_t* const (&tile)[T], int64_t prefetch_offset, const uint8_t* weight, int words,
                                    Sums<2 * M, T, I32>& sums) {
  constexpr int per_word = Code::per_word, steps = per_word / kBytes, step = steps < kStep / kBytes ? steps : kStep / kBytes;
  for (int w = 0; w < words; ++w) {
    TileWords<T> packed;
    packed.template load<Prefetched>(tile, w, prefetch_offset);
#pragma GCC unroll 1
    for (int first = 0; first < steps; first += step) {
#pragma GCC unroll 16
      for (int j = 0; j < step; ++j) {
        U32 code[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) code[t] = Code::integers_of(packed.word[t], j);
#pragma GCC unroll 16
        for (int r = 0; r < 2 * M; ++r) {
          const U32 b = splat<U32>(load<uint32_t>(weight + r % M * 2 * N + w * 2 * per_word + r / M * per_word + (first + j) * 4));
#pragma GCC unroll 16
          for (int t = 0; t < T; ++t) sums.reg[r][t] = (I32)_mm512_dpbusd_epi32((__m512i)sums.reg[r][t], (__m512i)code[t], (__m512i)b);
        }
      }
      if constexpr (step < steps) packed.shift_right(step * (32 / per_word));
    }
  }
}

// Weights of rows of Stride floats, rounded to multiples of their largest absolute value over `most`. The upper and the lower byte of an
// integer have sums of their own, which meet at the end. Sums of integers are exact, so the rounding is the only error (docs/numerics.md).
template <class Code, int M, int Stride, int N>
class IntegerWeights {
 public:
  static constexpr int parts = 2;
  template <int T>
  using Acc = Sums<2 * M, T, I32>;

  void set(const float* rows, int count, const float (&bias)[M]) {
    for (int m = 0; m < M; ++m) {
      const float largest = largest_of(rows + m * Stride, count);
      bias_[m] = bias[m];
      // A weight that is not finite makes every sum NaN: its integer is arbitrary. Weights that are all below 1e-30 count as 0.
      step_[m] = largest < kInfinity ? largest / most : std::numeric_limits<float>::quiet_NaN();
      const float inverse = largest > 1e-30f && largest < kInfinity ? most / largest : 0.0f;
      const int32_t total = round(rows + m * Stride, count, inverse, at_ + m * 2 * N);
      start_[m] = static_cast<int32_t>(0u - static_cast<uint32_t>(Code::middle) * static_cast<uint32_t>(total));  // wraps where arbitrary
    }
  }

  // Codes are stored as unsigned numbers: the start subtracts their middle from all of them.
  template <int T>
  Acc<T> start() const {
    return Acc<T>(start_);
  }

  template <int Prefetched, int T>
  KVGEN_INLINE void add(const uint8_t* const (&tile)[T], int64_t prefetch_offset, int first, int words, Acc<T>& acc) const {
    multiply_integers<Code, Prefetched, N, M>(tile, prefetch_offset, at_ + 2 * first, words, acc);
  }

  template <int T>
  F32 sum(const Acc<T>& acc, int m, int t) const {
    const U32 total = as<U32>(acc(m, t)) + (as<U32>(acc(M + m, t)) << 8);  // parts may exceed 32 bits where their sum does not
    return convert<float>(as<I32>(total)) * step_[m] + bias_[m];
  }

 private:
  static constexpr float most = 32639.0f;  // the largest integer whose two bytes are signed numbers
  static constexpr int32_t offset = 128;   // makes the second byte the upper part, since the lower one is a signed number

  // As bits, NaN is larger than infinity and infinity than every number.
  static float largest_of(const float* x, int count) {
    I32 largest{};
    for (int i = 0; i < count; i += kLanes) largest = max(load<I32>(x + i) & 0x7fffffff, largest);
    const int32_t bits = largest_lane(largest);
    return load<float>(&bits);
  }

  // Returns the sum of the integers.
  static int32_t round(const float* x, int count, float inverse, uint8_t* to) {
    const F32 magic = splat<F32>(12582912.0f + offset);  // 1.5 * 2^23: the sum's lowest bits are the nearest integer
    U32 total{};
    for (int i = 0; i < count; i += kLanes) {
      const U32 rounded = as<U32>(load<F32>(x + i) * inverse + magic);
      total += rounded;
      store_weights(rounded, to + 2 * i);
    }
    return static_cast<int32_t>(kvgen::sum(total) - static_cast<uint32_t>(count) * (0x4b400000u + offset));
  }

  // Stores 16 weights, whose integers plus `offset` are the low bits of `v`, in the order of words.
  static void store_weights(U32 v, uint8_t* to) {
    typedef int8_t Bytes __attribute__((vector_size(64)));
    constexpr int P = Code::per_word;
    Bytes from{}, flip{};
    for (int i = 0; i < 32; ++i) {
      const int word = i / (2 * P), part = i / P % 2, code = i % P;
      from[i] = static_cast<int8_t>((word * P + code % 4 * (P / 4) + code / 4) * 4 + part);
      flip[i] = part == 0 ? -128 : 0;
    }
    const Bytes all = __builtin_shuffle((Bytes)v, from) ^ flip;
    std::memcpy(to, &all, 32);
  }

  alignas(64) uint8_t at_[2 * M * N];
  int32_t start_[2 * M] = {};  // of the lower parts; upper ones start at 0
  float step_[M], bias_[M];
};
#endif

// Of `tiles` tiles that should share a broadcast weight, those whose sums fit the registers that floats would take.
template <class W>
constexpr int shared_tiles(int tiles) {
  return tiles > W::parts ? tiles / W::parts : 1;
}

// Weights over N elements of rows of Stride floats, as configuration C asks.
template <class C, class Code, int Stride, int N = Stride>
#ifdef __AVX512VNNI__
using Weights = std::conditional_t<C::dot == Dot::int16, IntegerWeights<Code, C::rows, Stride, N>, FloatWeights<Code, C::rows, Stride>>;
#else
using Weights = FloatWeights<Code, C::rows, Stride>;
#endif

}  // namespace kvgen
