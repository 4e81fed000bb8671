// The tail's tiles, and which warp of which part takes them.
#pragma once
#include "kvgen/span.cuh"
#include "kvgen/tail.cuh"
#include "kvgen/walk.cuh"

namespace kvgen {

// First token of a warp's `turn`-th tile of 16 tokens of the tail. Those go round the parts from the last, and there round the warps
// from the last: they have fewest units.
template <class Traits>
__device__ __forceinline__ int tail_tile(const Place<Traits>& place, int turn, int warp) {
  return ((turn * Traits::kWarps + Traits::kWarps - 1 - warp) * place.ctas + place.ctas - 1 - place.rank) * TailTile<Traits>::kTokens;
}

// The warp's tiles of the tail, the first of which was asked for.
template <class Traits>
__device__ __forceinline__ void attend_tail(const AttendArgs& args, const Shared<Traits>& shared, const Tail<Traits>& tail,
                                            TailTile<Traits>& tile, const Place<Traits>& place, int warp, int lane,
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
  if (tile.valid <= 0) return;
#pragma unroll 1
  for (int turn = 1; tile.valid > 0; ++turn) {
    if (tail.fresh && tail.count() < Traits::Format::kTokens) tile.append(tail, lane);
    attend_tile<Traits>(tile, tail.count(), args.q_len, shared.query(), shared.factors, lane, state);
    tile.fetch(tail, tail_tile<Traits>(place, turn, warp), lane);
  }
#pragma unroll
  for (int i = 0; i < Traits::kColumnTiles; ++i) mix_values<Traits>(state[i]);
}

}  // namespace kvgen
