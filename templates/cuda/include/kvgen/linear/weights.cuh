// Packed weights (docs/linear.md): where tiles and units lie, and how codes become A fragments of the MMA.
#pragma once
#include "kvgen/linear/instructions.cuh"

namespace kvgen::linear {

// The packed bytes of a matrix of kN x kK codes. A tile is 16 rows, a unit the channels of a tile that share scales, a run 64 channels of a
// unit. Where all channels of a row share one, units hold codes alone, and the scales and zeros of all rows follow the last unit.
template <class Schedule>
struct Layout {
  static constexpr bool kGrouped = Schedule::kGroup > 0;
  static constexpr int kUnit = kGrouped ? Schedule::kGroup : 64;
  static constexpr int kRunBytes = 128 * Schedule::kBits;
  static constexpr int kScales = kUnit / 64 * kRunBytes, kZeros = kScales + 32;  // in a unit
  static constexpr int kUnitBytes = kGrouped ? kZeros + (Schedule::kZeros ? 16 : 0) : kScales;
  static constexpr int kTiles = Schedule::kN / 16;
  static constexpr int64_t kTileBytes = int64_t{Schedule::kK / kUnit} * kUnitBytes;
  static constexpr int64_t kRowScales = kTiles * kTileBytes, kRowZeros = kRowScales + 2 * Schedule::kN;
  static constexpr int64_t kBytes = kGrouped ? kRowScales : kRowZeros + (Schedule::kZeros ? Schedule::kN : 0);
};

__device__ __forceinline__ constexpr uint32_t twice(uint32_t x) { return x | x << 16; }

// Zeros of rows g and g + 8 of a tile as the decoder subtracts them, both halves of a word alike.
struct Zeros {
  uint32_t low, high;
};

// Codes to A fragments: code - zero, exactly, of rows g + 8 times kFold. A code is put into the lowest bits of the mantissa of a power of
// two, from which this power and the zero are subtracted.
template <class Element, int kBits>
struct Decoder;

template <>
struct Decoder<Half, 4> {
  static constexpr int kFold = 16, kWords = 1;  // words of a lane for 16 channels

  __device__ static Zeros zeros(uint32_t low, uint32_t high) { return {twice(0x6400u | low), twice(0x6400u | high << 4)}; }
  __device__ __forceinline__ static void expand(const uint32_t* w, const Zeros& zero, uint32_t (&a)[4]) {
    const uint32_t upper = w[0] >> 8;
    a[0] = subtract<Half>(and_or(w[0], 0x000f000fu, 0x64006400u), zero.low);
    a[1] = subtract<Half>(and_or(w[0], 0x00f000f0u, 0x64006400u), zero.high);
    a[2] = subtract<Half>(and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = subtract<Half>(and_or(upper, 0x00f000f0u, 0x64006400u), zero.high);
  }
};

template <>
struct Decoder<Bfloat, 4> {
  static constexpr int kFold = 1, kWords = 1;

  __device__ static Zeros zeros(uint32_t low, uint32_t high) { return {twice(0x4300u | low), twice(0x4300u | high)}; }
  __device__ __forceinline__ static void expand(const uint32_t* w, const Zeros& zero, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = subtract<Bfloat>(and_or(w[0] >> 4 * i, 0x000f000fu, 0x43004300u), i % 2 == 0 ? zero.low : zero.high);
  }
};

template <>
struct Decoder<Half, 8> {
  static constexpr int kFold = 1, kWords = 2;

  __device__ static Zeros zeros(uint32_t low, uint32_t high) { return {twice(0x6400u | low), twice(0x6400u | high)}; }
  __device__ __forceinline__ static void expand(const uint32_t* w, const Zeros& zero, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = subtract<Half>(__byte_perm(w[i], 0x64, 0x4240), zero.low);
      a[2 * i + 1] = subtract<Half>(__byte_perm(w[i], 0x64, 0x4341), zero.high);
    }
  }
};

// The mantissa of bf16 holds seven bits of a code. The eighth decides between the two powers of two that are subtracted, which gives
// code - 128; what a zero differs from 128 comes off then. Whole numbers up to 256 are exact.
template <>
struct Decoder<Bfloat, 8> {
  static constexpr int kFold = 1, kWords = 2;

  __device__ static Zeros zeros(uint32_t low, uint32_t high) {
    const auto word = [](uint32_t zero) { return as_word<Bfloat>(__float2bfloat162_rn(static_cast<float>(static_cast<int>(zero) - 128))); };
    return {word(low), word(high)};
  }
  __device__ __forceinline__ static uint32_t signed_codes(uint32_t x) {
    return subtract<Bfloat>(and_or(x, 0x007f007fu, 0x43004300u), (x & 0x00800080u) ^ 0x43804380u);
  }
  __device__ __forceinline__ static void expand(const uint32_t* w, const Zeros& zero, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = subtract<Bfloat>(signed_codes(w[i]), zero.low);
      a[2 * i + 1] = subtract<Bfloat>(signed_codes(w[i] >> 8), zero.high);
    }
  }
};

}  // namespace kvgen::linear
