// The codes of K, or of V, that a warp attends to next, loaded from global memory into registers. Codes lie in fragment order, so the lane
// that loads a word can be the one that expands it, and they need not pass through shared memory. PROTOTYPE: see `hybrid` in traits.cuh.
#pragma once
#include <algorithm>

#include "kvgen/pipeline/tile_params.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

template <class Traits>
struct CodeRegisters {
  using Format = typename Traits::Format;
  static constexpr int kLoads = Traits::kRegisterBytes / 512;
  static constexpr int kDepth = std::min(Traits::kTileSubtiles, hybrid::kLoads / kLoads >= 4 ? 4 : hybrid::kLoads / kLoads >= 2 ? 2 : 1);
  static constexpr int kAt = hybrid::kKeys ? Format::kKeyCodes : Format::kValueCodes;
  static_assert(Traits::kTileSubtiles % kDepth == 0 && kLoads * 512 == Traits::kRegisterBytes);
  static_assert(Traits::kTilesInFlight <= 2 && kDepth >= Traits::kStepSubtiles);
  static_assert(!Traits::kGathered && Traits::kHalfStride == 0 && Format::kBoosted == 0);
  const uint8_t* tile;  // addresses of the codes of the KV tile that the warp attends to, and of its next one
  const uint8_t* next;
  bool exists;
  uint4 codes[kDepth][kLoads];

  __device__ __forceinline__ void first(const TileAddress& address) { tile = address.subtiles + kAt, exists = address.exists; }
  // Beyond the last tile all lanes load the same bytes of this one: the loads have no condition, so that the loop may overwrite codes that
  // it has used. With a condition it would have to keep them.
  __device__ __forceinline__ void second(const TileAddress& address, int lane) {
    next = address.exists ? address.subtiles + kAt : tile - lane * 16;
  }
  __device__ __forceinline__ void begin() {
    if (!exists) return;
#pragma unroll
    for (int sub = 0; sub < kDepth; ++sub) load(codes[sub], tile + sub * Traits::kSubtileStride);
  }
  // Prefetches the same codes to L2, a line in each lane.
  __device__ __forceinline__ void prefetch(int lane) const {
    if (!exists) return;
    constexpr int kLines = Traits::kRegisterBytes / 128;
#pragma unroll
    for (int at = 0; at < kDepth * kLines; at += 32)
      if (const int line = at + lane; kDepth * kLines % 32 == 0 || line < kDepth * kLines)
        ptx::prefetch_l2(tile - lane * 16 + line / kLines * Traits::kSubtileStride + line % kLines * 128);
  }
  // Called when the `sub`-th sub-tile's codes are read no more: loads those of the sub-tile that comes kDepth later.
  __device__ __forceinline__ void refill(int sub) {
    const int later = sub + kDepth;
    if (later < Traits::kTileSubtiles)
      load(codes[sub % kDepth], tile + later * Traits::kSubtileStride);
    else
      load(codes[sub % kDepth], next + (later - Traits::kTileSubtiles) * Traits::kSubtileStride);
  }
  __device__ __forceinline__ void step() { tile = next; }

 private:
  __device__ __forceinline__ static void load(uint4 (&to)[kLoads], const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) to[i] = ptx::load_once16(from + i * 512);
  }
};

}  // namespace kvgen
