// The rows of x as the products take them: floats, integers of 16 bits as two signed bytes, or parts of bfloat16.
#pragma once

#include <cmath>
#include <vector>

#include "kvgen/linear/layout.hpp"

namespace kvgen::linear {

// Rows of x in blocks of `height` rows, zero rows behind the last one. A run of 64 channels of a block lies together.
template <class C>
class Floats {
  using L = Layout<C>;

 public:
  static constexpr int64_t run_bytes(int height) { return int64_t{height} * kRun * 4; }
  // Beside the numbers: the sum of every unit of a row.
  static constexpr int notes = 1;

  // Row `m` of a block: its units `first` to `last`. `x` is null for a row of zeros.
  static void put(const typename C::Element* x, int height, int m, int first, int last, char* numbers, float* note) {
    for (int u = first; u < last; ++u) {
      F32 total{};
      for (int i = 0; i < L::unit; i += kLanes) {
        const F32 v = x ? load_floats<typename C::Element>(x + u * L::unit + i) : F32{};
        total += v;
        store(numbers + (u * L::runs + i / kRun) * run_bytes(height) + (m * kRun + i % kRun) * 4, v);
      }
      note[u * height + m] = sum(total);
    }
  }
};

// A unit of a row is rounded to multiples of its largest absolute value over `most`, as the attention's weights are (docs/numerics.md). Of
// the integer's two bytes, those of 64 channels lie together: the lower ones of all rows of a block, then the upper ones, in the order of
// `Integers::integers_of`.
template <class C>
class Bytes {
  using L = Layout<C>;
  static constexpr float most = 32639.0f;  // the largest integer whose two bytes are signed numbers
  static constexpr int offset = 128;       // makes the second byte the upper part, since the lower one is a signed number

 public:
  static constexpr int64_t run_bytes(int height) { return int64_t{height} * kRun * 2; }
  // Beside the numbers: the step of every unit of a row, and the sum of its integers.
  static constexpr int notes = 2;

  static void put(const typename C::Element* x, int height, int m, int first, int last, char* numbers, float* note) {
    int32_t* totals = reinterpret_cast<int32_t*>(note + int64_t{L::units} * height);
    for (int u = first; u < last; ++u) {
      F32 v[L::unit / kLanes];
      I32 largest{};
#pragma GCC unroll 8
      for (int i = 0; i < L::unit / kLanes; ++i) {
        v[i] = x ? load_floats<typename C::Element>(x + u * L::unit + i * kLanes) : F32{};
        largest = max(as<I32>(v[i]) & 0x7fffffff, largest);  // as bits, NaN is larger than infinity and infinity than every number
      }
      const int32_t bits = largest_lane(largest);
      const float top = load_scalar(bits);
      // A number that is not finite makes every sum of its unit NaN: its integer is arbitrary. A unit below 1e-30 counts as 0.
      const bool finite = top < kInfinity;
      note[u * height + m] = finite ? top / most : std::numeric_limits<float>::quiet_NaN();
      const float inverse = finite && top > 1e-30f ? most / top : 0.0f;
      const F32 magic = splat<F32>(12582912.0f + offset);  // 1.5 * 2^23: the sum's lowest bits are the nearest integer
      U32 total{};
#pragma GCC unroll 8
      for (int i = 0; i < L::unit / kLanes; ++i) {
        const U32 rounded = as<U32>(v[i] * inverse + magic);
        total += rounded;
        char* run = numbers + (u * L::runs + i * kLanes / kRun) * run_bytes(height);
        store_bytes(rounded, run + m * kRun + i * kLanes % kRun, run + (height + m) * kRun + i * kLanes % kRun);
      }
      totals[u * height + m] = finite ? static_cast<int32_t>(sum(total) - static_cast<uint32_t>(L::unit) * (0x4b400000u + offset)) : 0;
    }
  }

 private:
  static float load_scalar(int32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }

  // The lower and the upper bytes of 16 integers plus `offset`, which are the low bits of `v`.
  static void store_bytes(U32 v, char* lower, char* upper) {
    typedef int8_t All __attribute__((vector_size(64)));
    constexpr int P = L::Code::per_word;
    All from{}, flip{};
    for (int i = 0; i < 32; ++i) {
      const int word = i % 16 / P, code = i % P, part = i / 16;
      from[i] = static_cast<int8_t>((word * P + code % 4 * (P / 4) + code / 4) * 4 + part);
      flip[i] = part == 0 ? -128 : 0;
    }
    const All bytes = __builtin_shuffle((All)v, from) ^ flip;
    std::memcpy(lower, &bytes, 16);
    std::memcpy(upper, reinterpret_cast<const char*>(&bytes) + 16, 16);
  }
};

// Numbers of bfloat16: one where x is bfloat16, else two whose sum holds a float16 exactly, and 16 bits of a float. Of each 32 channels
// the first parts of all rows of a block lie together, then the second, in the order of the pairs of codes that `AmxProducts` expands.
template <class C>
class Parts {
  using L = Layout<C>;
  using Element = typename C::Element;
  typedef uint16_t Sixteen __attribute__((vector_size(32)));

 public:
  static constexpr int parts = std::is_same_v<Element, Bfloat> ? 1 : 2;
  static constexpr int64_t run_bytes(int height) { return int64_t{height} * kRun * 2 * parts; }
  // Beside the numbers: the sum of every unit of a row.
  static constexpr int notes = 1;

  static void put(const Element* x, int height, int m, int first, int last, char* numbers, float* note) {
    for (int u = first; u < last; ++u) {
      F32 total{};
      for (int i = 0; i < L::unit; i += kLanes) {
        const F32 v = x ? load_floats<Element>(x + u * L::unit + i) : F32{};
        if (C::zero) total += v;
        char* to = numbers + (u * L::runs + i / kRun) * run_bytes(height) + (i % kRun / 32 * parts * height + m) * 64 + i % 32 * 2;
        const U32 upper = as<U32>(v) & 0xffff0000u;
        store(to, paired(upper));
        if (parts == 2) store(to + height * 64, paired(as<U32>(v - as<F32>(upper)) + 0x8000u));
      }
      note[u * height + m] = C::zero ? sum(total) : 0.0f;
    }
  }

 private:
  // The upper halves of 16 lanes: channels i and i + P / 2 of each P, which a word of codes holds, side by side.
  static Sixteen paired(U32 v) {
    typedef uint16_t Words __attribute__((vector_size(64)));
    constexpr int P = L::Code::per_word;
    Words from{};
    for (int i = 0; i < kLanes; ++i) from[i] = static_cast<uint16_t>(2 * (i / P * P + i % P / 2 + i % 2 * (P / 2)) + 1);
    const Words all = __builtin_shuffle((Words)v, from);
    Sixteen low;
    std::memcpy(&low, &all, sizeof(low));
    return low;
  }
};

}  // namespace kvgen::linear
