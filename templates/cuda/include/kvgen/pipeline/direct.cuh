// Codes of a softmax step on their way from global memory, in registers instead of a ring.
#pragma once
#include "kvgen/pipeline/kv_tiles.cuh"

namespace kvgen {

// The codes and params of a softmax step. Params go on to the slot in shared memory, where all lanes of the warp read them.
template <class Traits>
struct DirectCodes {
  using Format = typename Traits::Format;
  static constexpr int kStep = Traits::kStepSubtiles;
  static constexpr int kKeyLoads = Format::template codes_bytes<typename Traits::Key>() / 512;
  static constexpr int kValueLoads = Format::template codes_bytes<typename Traits::Value>() / 512;
  static_assert(!Traits::kPaged && !Traits::kGathered && Format::kBoosted == 0 && Traits::kHalfStride == 0 && Traits::kTilesInFlight == 1);
  static_assert(Traits::KeyChannelParams::kBytes == 512 && !Traits::KeyChannelParams::kRepeats && Traits::ValueChannelParams::kBytes == 0);
  static_assert(Format::kSubtileBytes - Format::kValueTokenParams == 128 && Format::kBoostCodes == Format::kKeyTokenParams);
  uint4 key[kStep][kKeyLoads], value[kStep][kValueLoads];
  uint32_t token_params[kStep];
  uint4 channel_params;

  __device__ __forceinline__ void load_keys(const uint8_t* subtile, int s) {
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) key[s][i] = ptx::load_codes16(subtile + Format::kKeyCodes + i * 512);
  }
  // `subtile` includes the lane's 16 bytes.
  __device__ __forceinline__ void load_values(const uint8_t* subtile, int s, int lane) {
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i) value[s][i] = ptx::load_codes16(subtile + Format::kValueCodes + i * 512);
    token_params[s] = ptx::load_codes4(subtile + Format::kValueTokenParams - lane * 12);
  }
};

struct DirectRing {
  uint32_t base;
  __device__ __forceinline__ uint32_t slot(int) const { return base; }
};

template <class Traits>
struct Pipeline<Traits, true> {
  static constexpr int kStep = Traits::kStepSubtiles;
  DirectRing ring;
  KvTiles<Traits> tiles;
  TileAddress current, upcoming;
  DirectCodes<Traits> codes;
  int lane;
  int slot = 0;

  __device__ Pipeline(uint32_t rings, const KvTiles<Traits>& tiles_, int warp, int lane_)
      : ring{ptx::pinned(rings + warp * Traits::kTilesInFlight * Traits::kSlotBytes)}, tiles(tiles_), lane(lane_) {}
  __device__ __forceinline__ void fill_early() {}
  __device__ __forceinline__ void begin(const KvTiles<Traits>& tiles_) { tiles = tiles_; }
  __device__ __forceinline__ void fill() {
    current = tiles.initial(0);
    load_channels(current);
    if (current.exists)
#pragma unroll
      for (int s = 0; s < kStep; ++s) {
        codes.load_keys(current.subtiles + s * Traits::kSubtileStride, s);
        codes.load_values(current.subtiles + s * Traits::kSubtileStride, s, lane);
      }
    tiles.step();
    upcoming = tiles.initial(1);
    prefetch(upcoming);
    prefetch(tiles.later());
  }
  // Loads into registers are too few to hide the latency of memory, so a tile comes to L2 before.
  __device__ __forceinline__ void prefetch(const TileAddress& tile) const {
#if KVGEN_SM90
    if (lane == 0 && tile.exists) ptx::prefetch_bulk(tile.subtiles, Traits::kTileBytes);
#endif
  }
  // Stores the params of the step at sub-tile `sub` where the warp reads them.
  __device__ __forceinline__ void publish(int sub) {
    if (sub == 0) {
      ptx::store_shared16(ring.base + lane * 16, codes.channel_params);
      load_channels(upcoming);
    }
#pragma unroll
    for (int s = 0; s < kStep; ++s)
      ptx::store_shared4(ring.base + Traits::kTileHeaderBytes + (sub + s) * Traits::kSubtileStride + Traits::Format::kValueTokenParams + lane * 4,
                         codes.token_params[s]);
    __syncwarp();
  }
  __device__ __forceinline__ void load_channels(const TileAddress& tile) {
    if (tile.exists) codes.channel_params = ptx::load_codes16(key_params<Traits>(tile));
  }
  // The address of the `s`-th sub-tile of the step after the one at `sub`; null beyond the last tile.
  __device__ __forceinline__ const uint8_t* after(int sub, int s) const {
    if (sub + kStep < Traits::kTileSubtiles) return current.subtiles + (sub + kStep + s) * Traits::kSubtileStride;
    return upcoming.exists ? upcoming.subtiles + s * Traits::kSubtileStride : nullptr;
  }
  __device__ __forceinline__ void step() {
    current = upcoming;
    tiles.step();
    upcoming = tiles.next();
    prefetch(tiles.later());
  }
};

}  // namespace kvgen
