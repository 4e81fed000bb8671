// The weights of both products (a query, softmax weights) as the inner loop takes them: floats, or integers of 16 bits.
#pragma once

#include "kvgen/integers.hpp"

namespace kvgen {

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

// Weights of rows of Stride floats, rounded to multiples of their largest absolute value over `most`. Sums of integers are exact, so this
// rounding is the only error (docs/numerics.md).
template <class Code, int M, int Stride, int N>
class IntegerWeights {
 public:
  static constexpr int parts = kParts;
  template <int T>
  using Acc = Sums<kParts * M, T, I32>;

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
    multiply_integers<Code::bits, Prefetched, N, M>(tile, prefetch_offset, at_ + 2 * first, words, acc);
  }

  template <int T>
  F32 sum(const Acc<T>& acc, int m, int t) const {
    U32 total = as<U32>(acc(m, t));  // parts may exceed 32 bits where their sum does not
    if constexpr (kParts == 2) total += as<U32>(acc(M + m, t)) << 8;
    return convert<float>(as<I32>(total)) * step_[m] + bias_[m];
  }

 private:
  // The largest integer whose two bytes are signed numbers.
  static constexpr float most = 32639.0f;

  // As bits, NaN is larger than infinity and infinity than every number.
  static float largest_of(const float* x, int count) {
    I32 largest{};
    for (int i = 0; i < count; i += kLanes) largest = max(load<I32>(x + i) & 0x7fffffff, largest);
    const int32_t bits = largest_lane(largest);
    return load<float>(&bits);
  }

  // Returns the sum of the integers.
  static int32_t round(const float* x, int count, float inverse, uint8_t* to) {
    const F32 magic = splat<F32>(12582912.0f + kRoundedOffset);  // 1.5 * 2^23: the sum's lowest bits are the nearest integer
    U32 total{};
    for (int i = 0; i < count; i += kLanes) {
      const U32 rounded = as<U32>(load<F32>(x + i) * inverse + magic);
      total += rounded;
      store_weights<Code::per_word>(as<I32>(rounded), to + 2 * i);
    }
    return static_cast<int32_t>(kvgen::sum(total) - static_cast<uint32_t>(count) * (0x4b400000u + kRoundedOffset));
  }

  alignas(64) uint8_t at_[2 * M * N];
  int32_t start_[kParts * M] = {};  // of the lower parts; upper ones start at 0
  float step_[M], bias_[M];
};

// Of `tiles` tiles that should share a broadcast weight, those whose sums fit the registers that floats would take.
template <class W>
constexpr int shared_tiles(int tiles) {
  return tiles > W::parts ? tiles / W::parts : 1;
}

// Weights over N elements of rows of Stride floats, as configuration C asks.
template <class C, class Code, int Stride, int N = Stride>
using Weights = std::conditional_t<C::dot == Dot::int16, IntegerWeights<Code, C::rows, Stride, N>, FloatWeights<Code, C::rows, Stride>>;

}  // namespace kvgen
