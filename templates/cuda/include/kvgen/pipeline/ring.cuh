// A ring of stages, and what of a KV tile is copied with each.
#pragma once
#include <algorithm>

#include "kvgen/mainloop/traits.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

// Where a KV tile lies in global memory, and which of its channel params are copied with which stage.

// The address of a KV tile in global memory. Addresses include the lane's offset: each lane copies every 32nd vector of 16 bytes; bulk
// copies are issued by lane 0. Of a gathered tile, lane i has block i's address.
struct TileAddress {
  const uint8_t* key_params = nullptr;
  const uint8_t* value_params = nullptr;
  const uint8_t* subtiles = nullptr;
  bool exists = false;
  const uint8_t* index = nullptr;  // of the boosted channels
};

template <int kBytes>
using Size = std::integral_constant<int, kBytes>;

// The channel params of K, or V, that are copied with a stage of kTokens tokens: K's of the groups that begin in it, V's of those that end
// in it. K's are read before the first product of a group, V's after the last one, and a stage is refilled when it is no longer read.
template <class Traits, Which kWhich, int kTokens>
struct StageParams {
  static constexpr bool kKey = kWhich == Which::key;
  using Params = std::conditional_t<kKey, typename Traits::KeyChannelParams, typename Traits::ValueChannelParams>;
  static constexpr int kStages = std::max(1, Params::kTokens / kTokens);  // of a set
  static constexpr int kSets = std::max(1, kTokens / Params::kTokens);
  static constexpr int kBytes = kSets * Params::kSetBytes;
  static constexpr int kBegin = kKey ? 0 : Traits::KeyChannelParams::kBytes;  // in a slot
  // From a block's first params to its sub-tiles.
  static constexpr int kDistance = Traits::Format::kHeaderBytes - (kKey ? Traits::Key::kChannelParams : Traits::Value::kChannelParams);

  // If a block is one tile, its params precede the sub-tiles, which saves registers.
  __device__ __forceinline__ static const uint8_t* address(const TileAddress& tile) {
    return Traits::kTilesPerBlock == 1 ? tile.subtiles - kDistance : kKey ? tile.key_params : tile.value_params;
  }
  __device__ __forceinline__ static bool any(int stage) { return kBytes > 0 && stage % kStages == (kKey ? 0 : kStages - 1); }
  // Calls `copy(Size, offset in the slot, address)` for each run of bytes. A tile that repeats sets has a copy of each. Their address is
  // that of the block's first set, so its distance from the sub-tiles tells which tile of the block this is.
  template <class CopyRun>
  __device__ __forceinline__ static void each(const TileAddress& tile, int stage, CopyRun&& copy) {
    if (!any(stage)) return;
    const int at = stage / kStages * kBytes;
    if constexpr (Params::kRepeats) {
      const uint8_t* from = kKey ? tile.key_params : tile.value_params;
      const int within = (static_cast<int>(tile.subtiles - from) - kDistance) / Traits::kTileBytes;
#pragma unroll
      for (int nth = 0; nth < kSets; ++nth)
        copy(Size<Params::kSetBytes>(), kBegin + at + nth * Params::kSetBytes,
             from + Params::repeated(within, stage / kStages * kSets + nth));
    } else {
      copy(Size<kBytes>(), kBegin + at, address(tile) + at);
    }
  }
};

// If a block is one K group, the boost index lies at a fixed distance from K's params.
template <class Traits, class KeyParams>
__device__ __forceinline__ const uint8_t* boost_index(const TileAddress& tile) {
  using Format = typename Traits::Format;
  if constexpr (Format::kTokens == Traits::Key::kGroup)
    return KeyParams::address(tile) + (Format::kBoostIndex - Traits::Key::kChannelParams);
  else
    return tile.index;
}

// Copies kBytes in rows of 512 bytes, of which each lane copies 16 bytes at `shared` and `global`. The remainder is copied with 8 or 4
// bytes per lane where it divides evenly, since predicating lanes off costs a branch.
template <int kBytes>
__device__ __forceinline__ void warp_copy_async(uint32_t shared, const uint8_t* global, int lane) {
  constexpr int kRows = kBytes / 512 * 512, kRest = kBytes % 512;
  static_assert(kBytes % 16 == 0);
#pragma unroll
  for (int at = 0; at < kRows; at += 512) ptx::copy_async16(shared + at, global + at);
  if constexpr (kRest % 128 == 0) {
    if constexpr (kRest >= 256) ptx::copy_async<8>(shared + kRows - lane * 8, global + kRows - lane * 8);
    if constexpr (kRest % 256 != 0) ptx::copy_async<4>(shared + kBytes - 128 - lane * 12, global + kBytes - 128 - lane * 12);
  } else {
    ptx::copy_async16_if<kRest / 16>(shared + kRows, global + kRows, lane);
  }
}

// The runs of a gathered tile's stage: consecutive tokens of one block.
template <class Traits>
struct StageRuns {
  using Format = typename Traits::Format;
  static constexpr int kTokens = std::min(Traits::kStageSubtiles * 32, Format::kTokens);
  static constexpr int kCount = Traits::kStageSubtiles * 32 / kTokens;
  static constexpr int kBytes = kTokens / Format::kSubtile * Format::kSubtileBytes;

  // The offset of a token in the tile's slot, and its address in its block. Warp-collective.
  __device__ static int offset(int token) { return token / Format::kSubtile * Format::kSubtileBytes; }
  __device__ static const uint8_t* address(const uint8_t* block, int token) {
    const unsigned long long mine = reinterpret_cast<unsigned long long>(block);
    return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, mine, token / Format::kTokens)) + offset(token % Format::kTokens);
  }
};

// `fill` copies stage `stage` of a tile to slot `slot_idx`.
template <class Traits, Copy kCopy = Traits::kCopy>
struct Ring;

// cp.async by all lanes. Every stage commits one group, even an empty one, so the number of pending groups is the number of pending stages.
template <class Traits>
struct Ring<Traits, Copy::cp_async> {
  using Key = StageParams<Traits, Which::key, Traits::kStageSubtiles * 32>;
  using Value = StageParams<Traits, Which::value, Traits::kStageSubtiles * 32>;
  uint32_t base;
  int lane;

  __device__ Ring(uint32_t shared, int warp, int lane_)
      : base(ptx::pinned(shared + warp * Traits::kTilesInFlight * Traits::kSlotBytes)), lane(lane_) {}
  __device__ __forceinline__ uint32_t slot(int slot_idx) const { return base + slot_idx * Traits::kSlotBytes; }

  __device__ __forceinline__ void fill(int slot_idx, int stage, const TileAddress& tile) {
    const uint32_t mine = slot(slot_idx) + lane * 16, to = mine + Traits::kTileHeaderBytes;
    if (tile.exists) {
      const auto copy = [&](auto size, int at, const uint8_t* from) { warp_copy_async<size>(mine + at, from, lane); };
      Key::each(tile, stage, copy);
      Value::each(tile, stage, copy);
      if constexpr (Traits::Format::kBoosted > 0)
        if (stage == 0) copy(Size<Traits::Format::kBoosted>(), Traits::kTileParamBytes, boost_index<Traits, Key>(tile));
      if constexpr (Traits::kGathered)
        gather_stage(to, tile.subtiles, stage);
      else
        warp_copy_async<Traits::kStageBytes>(to + stage * Traits::kStageBytes, tile.subtiles + stage * Traits::kStageBytes, lane);
    }
    ptx::copy_commit();
  }
  // Waits for a stage of the oldest slot. No stage of a softmax step is refilled before all of them were waited for; so fewer groups are
  // pending at the later stages of a step.
  __device__ __forceinline__ void wait(int, int stage) {
    constexpr int kStepStages = Traits::kStepSubtiles / Traits::kStageSubtiles, kOthers = Traits::kStages - 1;
    static_assert(kStepStages <= 4);
    switch (stage % kStepStages) {
      case 0: ptx::copy_wait<kOthers>(); break;
      case 1: ptx::copy_wait<(kStepStages > 1 ? kOthers - 1 : 0)>(); break;
      case 2: ptx::copy_wait<(kStepStages > 2 ? kOthers - 2 : 0)>(); break;
      default: ptx::copy_wait<(kStepStages > 3 ? kOthers - 3 : 0)>();
    }
    __syncwarp();
  }
  // The refill must not overtake other lanes' reads of the stage.
  __device__ __forceinline__ void release(int) { __syncwarp(); }
  __device__ __forceinline__ void next_round() {}

 private:
  __device__ __forceinline__ void gather_stage(uint32_t to, const uint8_t* block, int stage) {
    using Runs = StageRuns<Traits>;
#pragma unroll
    for (int run = 0; run < Runs::kCount; ++run) {
      const int token = (stage * Runs::kCount + run) * Runs::kTokens;
      warp_copy_async<Runs::kBytes>(to + Runs::offset(token), Runs::address(block, token) + lane * 16, lane);
    }
  }
};

#if KVGEN_SM90
// 1-D bulk copies by one lane, per stage or per tile. They complete on mbarriers.
template <class Traits, Copy kCopy>
struct Ring {
  static constexpr bool kWholeTile = kCopy == Copy::bulk_tile;
  static constexpr int kBarriers = kWholeTile ? Traits::kTilesInFlight : Traits::kStages;
  static constexpr int kCopySubtiles = kWholeTile ? Traits::kTileSubtiles : Traits::kStageSubtiles;  // of one copy
  using Key = StageParams<Traits, Which::key, kCopySubtiles * 32>;
  using Value = StageParams<Traits, Which::value, kCopySubtiles * 32>;
  uint32_t base;
  uint32_t barriers;
  int lane;
  uint32_t parity = 0;

  __device__ Ring(uint32_t shared, int warp, int lane_)
      : base(ptx::pinned(shared + warp * Traits::kTilesInFlight * Traits::kSlotBytes)),
        barriers(shared + Traits::Memory::kBarriers + warp * kBarriers * 8),
        lane(lane_) {
    if (lane == 0) {
      for (int i = 0; i < kBarriers; ++i) ptx::barrier_init(barriers + i * 8, 1);
      ptx::barrier_init_fence();
    }
    __syncwarp();
  }
  __device__ __forceinline__ uint32_t slot(int slot_idx) const { return base + slot_idx * Traits::kSlotBytes; }

  __device__ __forceinline__ void fill(int slot_idx, int stage, const TileAddress& tile) {
    if (kWholeTile && stage != Traits::kTileStages - 1) return;  // the whole tile is refilled after its last stage
    if (Traits::kGathered && tile.exists) return gather(slot_idx, stage, tile.subtiles);
    const int nth = kWholeTile ? 0 : stage;
    constexpr int kBytes = kCopySubtiles * Traits::kSubtileStride;
    const uint32_t params = slot(slot_idx), to = params + Traits::kTileHeaderBytes + nth * kBytes, barrier = barrier_of(slot_idx, stage);
    if (lane == 0 && tile.exists) {
      // If a block is one tile, all its params precede the sub-tiles in memory, so that one copy may have both, unless a boost index or
      // padding lies between.
      const int key = Key::any(nth) ? Key::kBytes : 0, value = Value::any(nth) ? Value::kBytes : 0;
      const int index = nth == 0 ? Traits::Format::kBoosted : 0;
      const bool adjacent = Traits::kTilesPerBlock == 1 && nth == 0 && Traits::Format::kHeaderBytes == Traits::kTileParamBytes;
      const int beside = adjacent && key + value == Traits::kTileParamBytes ? key + value : 0;
      ptx::barrier_expect(barrier, kBytes + key + value + index);
      const auto copy = [&](auto size, int at, const uint8_t* from) { ptx::copy_bulk(params + at, from, size, barrier); };
      if (beside == 0) Key::each(tile, nth, copy), Value::each(tile, nth, copy);
      if constexpr (Traits::Format::kBoosted > 0)
        if (nth == 0) copy(Size<Traits::Format::kBoosted>(), Traits::kTileParamBytes, boost_index<Traits, Key>(tile));
      ptx::copy_bulk(to - beside, tile.subtiles + nth * kBytes - beside, kBytes + beside, barrier);
    }
  }
  __device__ __forceinline__ void wait(int slot_idx, int stage) {
    if (!kWholeTile || stage == 0) ptx::barrier_wait(barrier_of(slot_idx, stage), parity);
  }
  __device__ __forceinline__ void release(int stage) {
    if (kWholeTile && stage != Traits::kTileStages - 1) return;
    if constexpr (Traits::kExchangeShared) ptx::copy_bulk_fence();
    __syncwarp();
  }
  // The phase parity of the barriers flips when all slots were used once.
  __device__ __forceinline__ void next_round() { parity ^= 1; }

 private:
  // Each lane copies one run. Bytes that arrive before expect_tx do not complete the barrier, since its single arrival is lane 0's
  // expect_tx.
  __device__ __forceinline__ void gather(int slot_idx, int stage, const uint8_t* block) {
    using Runs = StageRuns<Traits>;
    constexpr int kRuns = Runs::kCount * (kWholeTile ? Traits::kTileStages : 1);
    static_assert(kRuns <= 32);
    const int token = ((kWholeTile ? 0 : stage * Runs::kCount) + min(lane, kRuns - 1)) * Runs::kTokens;
    const uint8_t* from = Runs::address(block, token);
    const uint32_t barrier = barrier_of(slot_idx, stage);
    if (lane == 0) ptx::barrier_expect(barrier, kRuns * Runs::kBytes);
    if (lane < kRuns) ptx::copy_bulk(slot(slot_idx) + Runs::offset(token), from, Runs::kBytes, barrier);
  }
  __device__ __forceinline__ uint32_t barrier_of(int slot_idx, int stage) const {
    return barriers + (kWholeTile ? slot_idx : slot_idx * Traits::kTileStages + stage) * 8;
  }
};

#endif

}  // namespace kvgen
