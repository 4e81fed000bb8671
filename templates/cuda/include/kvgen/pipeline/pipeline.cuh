// A warp's pipeline: its ring of KV tiles, and the iterator that fills the ring.
#pragma once
#include "kvgen/pipeline/kv_tiles.cuh"

namespace kvgen {

template <class Traits>
struct Pipeline {
  Ring<Traits> ring;
  KvTiles<Traits> tiles;
  TileAddress upcoming;
  int slot = 0;    // slot of the oldest tile
  int issued = 0;  // stages of the first tile whose copies are already issued

  __device__ Pipeline(uint32_t rings, const KvTiles<Traits>& tiles_, int warp, int lane) : ring(rings, warp, lane), tiles(tiles_) {}
  // Issues the first stage before the sequence length is known.
  __device__ __forceinline__ void fill_early() {
    ring.fill(0, 0, tiles.first_allocated());
    issued = 1;
  }
  // Starts with the tiles of an iterator, and issues the first stage.
  __device__ __forceinline__ void begin(const KvTiles<Traits>& tiles_) {
    tiles = tiles_, slot = 0, issued = 1;
    tiles.prefetch_page();
    ring.fill(0, 0, tiles.initial(0));
  }
  // Fills the ring.
  __device__ __forceinline__ void fill() {
    upcoming = tiles.initial(0);
    // The loops are not unrolled: a CTA runs this code once, and fetching more instructions costs more than the loop does.
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
  // Waits for the `sub`-th sub-tile of the oldest tile.
  __device__ __forceinline__ void wait(int sub) {
    if (sub % Traits::kStageSubtiles == 0) ring.wait(slot, sub / Traits::kStageSubtiles);
  }
  // Called when the warp has read the `sub`-th sub-tile of the oldest tile: refills its stage after the stage's last sub-tile.
  __device__ __forceinline__ void release(int sub) {
    if ((sub + 1) % Traits::kStageSubtiles != 0) return;
    const int stage = sub / Traits::kStageSubtiles;
    ring.release(stage);
    if (stage == 0) tiles.prefetch_page();
    ring.fill(slot, stage, upcoming);
  }
  // Advances to the next tile, after all stages of the oldest one are released.
  __device__ __forceinline__ void step() {
    tiles.step();
    upcoming = tiles.next();
    if (Traits::kTilesInFlight == 1 || ++slot == Traits::kTilesInFlight) slot = 0, ring.next_round();
  }
};

}  // namespace kvgen
