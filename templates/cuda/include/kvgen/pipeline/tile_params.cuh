// Where a KV tile lies in global memory, and which of its channel params are copied with which stage.
#pragma once
#include <algorithm>

#include "kvgen/mainloop/traits.cuh"

namespace kvgen {

// The address of a KV tile in global memory. Addresses include the lane's offset: each lane copies every 32nd vector of 16 bytes; bulk
// copies are issued by lane 0. Of a gathered tile, lane i has block i's address.
struct TileAddress {
  const uint8_t* key_params = nullptr;
  const uint8_t* value_params = nullptr;
  const uint8_t* subtiles = nullptr;
  bool exists = false;
  const uint8_t* index = nullptr;  // of the boosted channels
};

// The channel params that are copied with a stage of kTokens tokens: K's of the groups that begin in it, V's (kAtEnd) of those that end in
// it. K's are read before the first product of a group, V's after the last one, and a stage is refilled when it is no longer read. A tile
// that repeats sets of params has a copy for each.
template <class Params, bool kAtEnd, int kTokens>
struct StageParams {
  static constexpr int kStages = std::max(1, Params::kTokens / kTokens);  // of a set
  static constexpr int kSets = std::max(1, kTokens / Params::kTokens);
  static constexpr int kBytes = kSets * Params::kSetBytes;
  static constexpr int kSetBytes = Params::kSetBytes;
  static constexpr bool kRepeats = Params::kRepeats;
  __device__ __forceinline__ static bool any(int stage) { return kBytes > 0 && stage % kStages == (kAtEnd ? kStages - 1 : 0); }
  __device__ __forceinline__ static int offset(int stage) { return stage / kStages * kBytes; }
  // For a tile that repeats sets, the block's `within`-th: byte offset, from the operand's first params, of the stage's `nth` set.
  __device__ __forceinline__ static int repeated(int stage, int nth, int within) {
    return Params::repeated(within, stage / kStages * kSets + nth);
  }
};
template <class Traits, int kTokens>
using KeyStageParams = StageParams<typename Traits::KeyChannelParams, false, kTokens>;
template <class Traits, int kTokens>
using ValueStageParams = StageParams<typename Traits::ValueChannelParams, true, kTokens>;

// The addresses of a tile's channel params and boost index, from as few registers as the format allows. If a block is one tile, they
// precede the sub-tiles; if it is one K group, the index lies at a fixed distance from K's params.
template <class Traits>
__device__ __forceinline__ const uint8_t* key_params(const TileAddress& tile) {
  using Format = typename Traits::Format;
  return Traits::kTilesPerBlock == 1 ? tile.subtiles - Format::kHeaderBytes + Format::kKeyChannelParams : tile.key_params;
}
template <class Traits>
__device__ __forceinline__ const uint8_t* value_params(const TileAddress& tile) {
  using Format = typename Traits::Format;
  return Traits::kTilesPerBlock == 1 ? tile.subtiles - Format::kHeaderBytes + Format::kValueChannelParams : tile.value_params;
}
// Which tile of its block a tile is, where it repeats sets of K's or V's params. Their address is then that of the block's first set, so
// its distance from the sub-tiles tells.
template <class Traits>
__device__ __forceinline__ int key_place(const TileAddress& tile) {
  constexpr int kDistance = Traits::Format::kHeaderBytes - Traits::Format::kKeyChannelParams;
  return (static_cast<int>(tile.subtiles - tile.key_params) - kDistance) / Traits::kTileBytes;
}
template <class Traits>
__device__ __forceinline__ int value_place(const TileAddress& tile) {
  constexpr int kDistance = Traits::Format::kHeaderBytes - Traits::Format::kValueChannelParams;
  return (static_cast<int>(tile.subtiles - tile.value_params) - kDistance) / Traits::kTileBytes;
}
template <class Traits>
__device__ __forceinline__ const uint8_t* boost_index(const TileAddress& tile) {
  using Format = typename Traits::Format;
  constexpr bool kOneGroup = Format::kTokens == Traits::Key::kGroup;
  return kOneGroup ? key_params<Traits>(tile) + (Format::kBoostIndex - Format::kKeyChannelParams) : tile.index;
}

}  // namespace kvgen
