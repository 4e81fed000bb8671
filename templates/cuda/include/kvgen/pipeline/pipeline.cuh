// A warp's pipeline: its ring of KV tiles, filled from its tile iterator.
#pragma once
#include "kvgen/pipeline/kv_tiles.cuh"

namespace kvgen {

template <class Traits>
struct Pipeline {
  Ring<Traits> ring;
  KvTiles<Traits> tiles;
  TileAddress upcoming;
  int slot = 0;    // of the oldest tile
  int issued = 0;  // stages whose copies were issued before the others

  __device__ Pipeline(uint32_t rings, const KvTiles<Traits>& tiles_, int warp, int lane) : ring(rings, warp, lane), tiles(tiles_) {}
  // Issues the first stage before the length is known.
  __device__ __forceinline__ void fill_early() {
    ring.fill(0, 0, tiles.first_allocated());
    issued = 1;
  }
  // Begins with the tiles of an iterator: its first stage is issued before all else.
  __device__ __forceinline__ void begin(const KvTiles<Traits>& tiles_) {
    tiles = tiles_, slot = 0, issued = 1;
    tiles.prefetch_page();
    ring.fill(0, 0, tiles.initial(0));
  }
  // Fills the ring.
  __device__ __forceinline__ void fill() {
    upcoming = tiles.initial(0);
    // The loops are not unrolled: a CTA runs this once, and fetching the code costs more than running it.
#pragma unroll 1
    for (int i = 0; i < Traits::kTilesInFlight; ++i) {
      if (i || !issued) tiles.prefetch_page();
#pragma unroll 1
      for (int stage = i ? 0 : issued; stage < Traits::kTileStages; ++stage) ring.fill(i, stage, upcoming);
      tiles.step();
      if constexpr (Traits::kPaged) tiles.pages.round = (i + 1) % PagePrefetch<Traits>::kTiles;
      upcoming = tiles.initial(i + 1);
    }
  }
  // A stage of the oldest tile is no longer read: it is refilled.
  __device__ __forceinline__ void release(int stage) {
    ring.release(stage);
    if (stage == 0) tiles.prefetch_page();
    ring.fill(slot, stage, upcoming);
  }
  // The oldest tile is no longer read.
  __device__ __forceinline__ void step() {
    tiles.step();
    upcoming = tiles.next();
    if (Traits::kTilesInFlight == 1 || ++slot == Traits::kTilesInFlight) slot = 0, ring.next_round();
  }
};

}  // namespace kvgen
