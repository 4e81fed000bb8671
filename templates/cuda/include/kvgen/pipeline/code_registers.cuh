// The codes that a warp attends to next, loaded from global memory into registers. Codes lie in fragment order, so the lane that loads a
// word can be the one that expands it, and they need not pass through shared memory.
#pragma once
#include <algorithm>

#include "kvgen/pipeline/tile_params.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

template <class Traits>
struct CodeRegisters {
  using Format = typename Traits::Format;
  static constexpr int kKeyLoads = Format::template codes_bytes<typename Traits::Key>() / 512;
  static constexpr int kValueLoads = Format::template codes_bytes<typename Traits::Value>() / 512;
  // Sub-tiles in flight. Their codes take 64 registers at most, which leaves none for more.
  static constexpr int kDepth = std::min(Traits::kTileSubtiles, kKeyLoads + kValueLoads <= 4 ? 4 : 2);
  static_assert(Traits::kTilesInFlight == 1 && Traits::kStepSubtiles == 1 && Traits::kTileSubtiles % kDepth == 0);
  static_assert(kKeyLoads * 512 == Format::kKeyTokenParams && kValueLoads * 512 == Format::kValueTokenParams - Format::kValueCodes);
  static_assert(!Traits::kGathered && Traits::kHalfStride == 0 && Format::kBoosted == 0);
  const uint8_t* tile;  // address of the first sub-tile of the KV tile that the warp attends to
  uint4 keys[kDepth][kKeyLoads], values[kDepth][kValueLoads];

  __device__ __forceinline__ void begin(const TileAddress& first) {
    tile = first.subtiles;
    if (!first.exists) return;
#pragma unroll
    for (int sub = 0; sub < kDepth; ++sub) {
      load(keys[sub], tile + sub * Traits::kSubtileStride + Format::kKeyCodes);
      load(values[sub], tile + sub * Traits::kSubtileStride + Format::kValueCodes);
    }
  }
  // Called when the `sub`-th sub-tile's keys, or its values, are read no more: loads those of the sub-tile that comes kDepth later.
  __device__ __forceinline__ void refill_keys(int sub, const TileAddress& upcoming) {
    if (const uint8_t* later = subtile_after(sub, upcoming)) load(keys[sub % kDepth], later + Format::kKeyCodes);
  }
  __device__ __forceinline__ void refill_values(int sub, const TileAddress& upcoming) {
    if (const uint8_t* later = subtile_after(sub, upcoming)) load(values[sub % kDepth], later + Format::kValueCodes);
  }
  __device__ __forceinline__ void step(const TileAddress& upcoming) { tile = upcoming.subtiles; }

 private:
  // Null beyond the last tile.
  __device__ __forceinline__ const uint8_t* subtile_after(int sub, const TileAddress& upcoming) const {
    const int later = sub + kDepth;
    if (later < Traits::kTileSubtiles) return tile + later * Traits::kSubtileStride;
    return upcoming.exists ? upcoming.subtiles + (later - Traits::kTileSubtiles) * Traits::kSubtileStride : nullptr;
  }
  template <int kLoads>
  __device__ __forceinline__ static void load(uint4 (&to)[kLoads], const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) to[i] = ptx::load_once16(from + i * 512);
  }
};

}  // namespace kvgen
