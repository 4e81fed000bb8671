// The codec of elements that are stored as they are, in 16 bits.
#pragma once
#include "kvgen/codec/integers.cuh"

namespace kvgen {

template <class Element>
struct Unquantized {
  using Param = Half;  // of none
  static constexpr bool kQuantized = false;
  static constexpr int kBits = 16, kPerByte = 1;
  static constexpr int kWords = 4, kRows = 16;  // of a lane per row tile and k-step; rows of a tile
  static constexpr bool kNarrow = false, kByteOperands = false, kHalfScales = false;
  static constexpr Mix kMix = Mix::none;
  static constexpr int kOffset = 0, kPackThreads = 512;
  static constexpr float kUnit = 1.f;

  template <class Other>
  static constexpr bool kByThresholds = false;

  // Converts two elements to two of fp16.
  __device__ __forceinline__ static uint32_t half2(uint32_t x) {
    if constexpr (std::is_same_v<Element, Half>)
      return x;
    else
      return ptx::pack_half2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }

  // See `Integers`. Operands are fp16.
  template <bool kComplemented, bool kMixed = true, class Use>
  __device__ __forceinline__ static void expand(const uint32_t* w, int tile, Use&& use) {
    use(tile, half2(w[0]), half2(w[1]), half2(w[2]), half2(w[3]));
  }
  template <class Sum>
  __device__ __forceinline__ static void unmix(Sum (&)[4], Sum (&)[4]) {}
  __device__ __forceinline__ static void mix(float (&)[4], float (&)[4]) {}
  __host__ __device__ static constexpr float row_factor(int, int) { return 1.f; }
};

}  // namespace kvgen
