// Elements of a cache, and how the lanes of a warp hold them: a lane has runs of neighbouring channels of a row.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kvgen/format.hpp"

namespace kvgen {

using Half = __half;
using Bfloat = __nv_bfloat16;

constexpr float kLargestHalf = 65504.f;
constexpr float kSmallestNormalHalf = 1.f / 16384;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(Bfloat x) { return __bfloat162float(x); }
template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, Half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<Element, Bfloat>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// Two elements of 16 bits, in a word.
template <class Element>
using Pair = std::conditional_t<std::is_same_v<Element, Half>, __half2, __nv_bfloat162>;
template <class Element>
__device__ __forceinline__ Pair<Element> as_pair(uint32_t x) {
  return reinterpret_cast<Pair<Element>&>(x);
}
template <class Element>
__device__ __forceinline__ float2 to_floats(uint32_t x) {
  if constexpr (std::is_same_v<Element, Half>)
    return __half22float2(as_pair<Half>(x));
  else
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

// kWords neighbouring words, aligned to their size at both ends: one access.
template <int kWords>
__device__ __forceinline__ void copy_words(void* to, const void* from) {
  struct alignas(4 * kWords) Words {
    uint32_t words[kWords];
  };
  *static_cast<Words*>(to) = *static_cast<const Words*>(from);
}
__device__ __forceinline__ Half saturated_half(float x) { return __float2half_rn(fminf(fmaxf(x, -kLargestHalf), kLargestHalf)); }

constexpr int align_up(int size, int to) { return (size + to - 1) / to * to; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// Words per load of a lane that has `words` words of a sub-tile.
constexpr int vector_words(int words) { return words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1; }

// Channel of k-slot `slot` in k-step `step`, of `channels` channels. A lane's four slots of two consecutive steps are eight consecutive
// channels, so q and K are loaded 16 bytes at a time. A last step without a second one has four consecutive channels in a lane.
__host__ __device__ constexpr int k_slot_channel(int step, int slot, int channels) {
  if (step == channels / 32 * 2) return 16 * step + 4 * (slot % 8 / 2) + 2 * (slot / 8) + slot % 2;
  return 32 * (step / 2) + 8 * (slot % 8 / 2) + 4 * (step % 2) + 2 * (slot / 8) + slot % 2;
}
// The runs of channels of an operand. In a run of 32 channels, lane (g, t) = (lane / 4, lane % 4) has the eight from 8t on: 16 bytes of
// dtype, two k-steps of K, two row tiles of V. In a half run of 16 channels it has the four from 4t on: 8 bytes, one k-step, one row tile.
// The last 16 channels of an odd multiple of 16 are a half run. If groups of channels are no multiple of 32, all runs are halves, so that
// a k-step or a row tile has channels of one group. Words of a 2-bit V hold two row tiles: of a run, or of two half runs; a last half run
// without a second one leaves half of its words empty.
template <class Quant, int kHeadDim>
struct ChannelRuns {
  static constexpr int kFull = Quant::kRuns;
  static constexpr bool kSplit = kFull == 0 && kHeadDim >= 32;
  static constexpr int kHalf = (kHeadDim - 32 * kFull) / 16;
  static constexpr int kCount = kFull + kHalf;

  __host__ __device__ static constexpr bool is_half(int x) { return kHalf > 0 && (kFull == 0 || x >= kFull); }
  // First 16-channel tile (k-step of K, row tile of V) of a run, and its first channel.
  __host__ __device__ static constexpr int tile(int x) { return kFull == 0 ? x : is_half(x) ? kFull + x : 2 * x; }
  __host__ __device__ static constexpr int channel(int x) { return 16 * tile(x); }
  // The first of the channels that lane t of a quad has, and their number.
  __host__ __device__ static constexpr int lane_channels(int x) { return is_half(x) ? 4 : 8; }
  __host__ __device__ static constexpr int lane_channel(int x, int t) { return channel(x) + lane_channels(x) * t; }
  // A lane's vector of a run, in a row. The lane's part of the offset comes first, because runs of a size share it.
  template <class Element>
  __host__ __device__ static constexpr Element* at(Element* row, int x, int t) {
    return row + lane_channels(x) * t + channel(x);
  }
  // The same of a 16-channel tile: channel 2i + b of a lane (b = 0, 1) is in row or k-slot 8i + 2t + b.
  __host__ __device__ static constexpr int run_of(int tile) { return tile < 2 * kFull ? tile / 2 : tile - kFull; }
  __host__ __device__ static constexpr int tile_channel(int tile, int t) {
    return lane_channel(run_of(tile), t) + (tile < 2 * kFull ? tile % 2 * 4 : 0);
  }
};

// A lane's vector of a run: 16 bytes, or 8 of a half run, which are repeated so that the extremes of a vector are those of its channels.
template <class Element>
__device__ __forceinline__ uint4 load_run(const Element* from, bool half) {
  if (!half) return *reinterpret_cast<const uint4*>(from);
  const uint2 v = *reinterpret_cast<const uint2*>(from);
  return make_uint4(v.x, v.y, v.x, v.y);
}
template <class Element>
__device__ __forceinline__ void store_run(Element* to, const uint4& v, bool half) {
  if (half)
    *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
  else
    *reinterpret_cast<uint4*>(to) = v;
}

}  // namespace kvgen
