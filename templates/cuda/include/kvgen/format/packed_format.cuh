// The packed format of one spec as compile-time constants. kvgen/reference/layout.py declares the same format as order `mma`; rendered
// sources assert that both agree.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kvgen/residual_rows.hpp"

namespace kvgen {

enum class Axis { channel, token };
enum class Select { mean_abs, range, fixed };  // channels with the largest mean of |x|, with the largest range, or the first ones

// How K or V is stored. kGroup counts tokens (axis channel) or channels (axis token) that share a scale. In each group of tokens of a
// 2-bit K, kBoosted channels have codes of 4 bits (Kitty); their upper two bits are a stream of their own.
template <int kBits_, Axis kAxis_, int kGroup_, bool kZero_, int kBoosted_ = 0, Select kSelect_ = Select::fixed>
struct Quant {
  static constexpr int kBits = kBits_;
  static constexpr Axis kAxis = kAxis_;
  static constexpr int kGroup = kGroup_;
  static constexpr bool kZero = kZero_;
  static constexpr int kBoosted = kBoosted_;
  static constexpr Select kSelect = kSelect_;
  static constexpr bool kQuantized = kBits != 16;
  static constexpr bool kPerChannel = kQuantized && kAxis == Axis::channel;
  static constexpr bool kPerToken = kQuantized && kAxis == Axis::token;
  static constexpr int kParams = kQuantized ? (kZero ? 2 : 1) : 0;  // scale and zero, scale, or none
  static constexpr int kOffset = kZero ? 0 : 1 << (kBits - 1);      // added to symmetric codes before they are stored
  static constexpr int kMaxCode = kZero ? (1 << kBits) - 1 : (1 << (kBits - 1)) - 1;
  static constexpr int kMaxBoosted = 15;
  static_assert(kBoosted == 0 || (kBits == 2 && kAxis == Axis::channel && kZero && kBoosted % 16 == 0), "boosted channels");
};

constexpr int align_up(int size, int to) { return (size + to - 1) / to * to; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// Fragment order of codes. An operand is a matrix [rows, k]: the rows of K are tokens, the rows of V are channels.
template <int kBits>
struct Fragment {
  static constexpr int kPerByte = kBits == 16 ? 1 : 8 / kBits;         // rows in one byte of a word, eight apart
  static constexpr int kWords = kBits == 16 ? 4 : kBits == 8 ? 2 : 1;  // words of a lane per row tile and k-step
  static constexpr int kRows = kBits == 2 ? 32 : 16;                   // rows of a tile
};

// Sizes and offsets in bytes. kTokens is N_r, the tokens of a block. Rows_ says which tokens are not packed.
template <class Element_, class Key_, class Value_, int kHeadDim_, int kTokens_, class Rows_ = ResidualRows<kTokens_>>
struct Format {
  using Element = Element_;  // __half or __nv_bfloat16: q, new and residual K and V, output
  using Key = Key_;
  using Value = Value_;
  using ResidualRows = Rows_;
  using Param = __half;  // scales and zeros
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kSubtile = kTokens < 32 ? kTokens : 32;
  static constexpr int kSubtiles = kTokens / kSubtile;
  // Channels of V's codes: rows of whole tiles. At an odd multiple of 16, the last words of a 2-bit V are half empty.
  static constexpr int kValueRows = align_up(kHeadDim, Fragment<Value::kBits>::kRows);

  template <class Quant>
  static constexpr int codes_bytes(int channels = kHeadDim) {
    return kSubtile * channels * Quant::kBits / 8;
  }
  template <class Quant>
  static constexpr int channel_params_bytes() {
    return Quant::kPerChannel ? align_up(kTokens / Quant::kGroup * kHeadDim * Quant::kParams * 2, 16) : 0;
  }
  template <class Quant>
  static constexpr int token_params_bytes() {
    return Quant::kAxis == Axis::token ? align_up(kSubtile * (kHeadDim / Quant::kGroup) * Quant::kParams * 2, 16) : 0;
  }

  // Block: [K channel params][V channel params][boost index][padding to a multiple of 128] sub-tiles. A warp's copies of 512 bytes begin at
  // a line of 128 bytes; at half a line they touch five.
  static constexpr int kBoosted = Key::kBoosted;
  static constexpr int kKeyChannelParams = 0;
  static constexpr int kValueChannelParams = channel_params_bytes<Key>();
  static constexpr int kBoostIndex = kValueChannelParams + channel_params_bytes<Value>();
  static constexpr int kHeaderBytes = align_up(kBoostIndex + kTokens / Key::kGroup * kBoosted, 128);
  // Sub-tile: [K codes][K token params][boost codes][V codes][V token params].
  static constexpr int kKeyCodes = 0;
  static constexpr int kKeyTokenParams = codes_bytes<Key>();
  static constexpr int kBoostCodes = kKeyTokenParams + token_params_bytes<Key>();
  static constexpr int kValueCodes = kBoostCodes + kSubtile * kBoosted * 2 / 8;
  static constexpr int kValueTokenParams = kValueCodes + codes_bytes<Value>(kValueRows);
  static constexpr int kSubtileBytes = kValueTokenParams + token_params_bytes<Value>();
  static constexpr int kBlockBytes = align_up(kHeaderBytes + kSubtiles * kSubtileBytes, 128);

  static_assert(kHeadDim % 16 == 0, "fragments have 16 channels");
  static_assert(kTokens % kSubtile == 0 && kSubtile % 16 == 0);
  static_assert(ResidualRows::kBlock == kTokens);
};

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
  static constexpr bool kSplit = Quant::kQuantized && Quant::kAxis == Axis::token && Quant::kGroup % 32 != 0 && Quant::kGroup < kHeadDim;
  static constexpr int kFull = kSplit ? 0 : kHeadDim / 32;
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
