// Assigns the tiles of a head's residual to CTAs and warps, and attends to them.
#pragma once
#include "kvgen/mainloop/packed_loop.cuh"
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/mainloop/values.cuh"

namespace kvgen {

// The position of a CTA among those that share a head.
struct SplitPlace {
  int rank, ctas;
};

// First token of a warp's `round`-th tile of 16 unquantized tokens. Tiles go to the CTAs and warps in reverse order, since the last ones
// have the fewest KV tiles.
template <class Traits>
__device__ __forceinline__ int residual_tile(const Residual<Traits>& residual, const SplitPlace& place, int round, int warp) {
  return residual.tile_token((round * Traits::kWarps + Traits::kWarps - 1 - warp) * place.ctas + place.ctas - 1 - place.rank);
}

// Loads the warp's first tile of the residual, and prefetches its later ones into L2: both before the ring is filled, because the loads
// would wait behind the ring's traffic. Without sink, local or rollback tokens nearly all warps have one tile.
template <class Traits>
__device__ __forceinline__ void fetch_residual(const Residual<Traits>& residual, const SplitPlace& place, int warp, int lane,
                                               ResidualTile<Traits>& tile) {
  tile.fetch(residual, residual_tile<Traits>(residual, place, 0, warp), lane);
  if constexpr (Traits::Format::ResidualRows::kRows > Traits::Format::kTokens) {
#pragma unroll 1
    for (int round = 1;; ++round) {
      const int token = residual_tile<Traits>(residual, place, round, warp);
      if (token >= residual.tile_limit(token)) break;
      residual.prefetch(token, lane);
    }
  }
}

// Attends to the warp's tiles of the residual, the first of which is already loaded. The warp that has the step's tokens in registers
// appends them (in the first run of packed-GQA rows), unless the step packs a block: then `flush` takes them from the caller's tensors,
// because the rows of the tokens behind the block may be those of the block. With rollback each token has a row of its own, which is read
// again if the block is taken back.
template <class Traits>
__device__ __forceinline__ void attend_residual(const Shared<Traits>& shared, const Residual<Traits>& residual, ResidualTile<Traits>& tile,
                                                const SplitPlace& place, const SeqlenInfo& seqlen, int warp, int lane,
                                                State<Traits> (&state)[Traits::kQTiles]) {
  if (tile.valid <= 0) return;
#pragma unroll 1
  for (int round = 1; tile.valid > 0; ++round) {
    if (residual.fresh && (Traits::Format::ResidualRows::kRollback > 0 || !residual.fills_block()) &&
        (Traits::kRuns == 1 || seqlen.run == 0))
      tile.append(residual, lane);
    attend_residual_tile<Traits>(tile, seqlen, shared.query(), shared.factors, lane, state);
    tile.fetch(residual, residual_tile<Traits>(residual, place, round, warp), lane);
  }
#pragma unroll
  for (int i = 0; i < Traits::kQTiles; ++i) mix_values<Traits>(state[i]);
}

}  // namespace kvgen
