// The kernel: a CTA has one part of one head. Where its units begin it knows, most often, before it knows how many there are.
#pragma once
#include "kvgen/finish.cuh"
#include "kvgen/walk.cuh"

namespace kvgen {

// First token of a warp's `turn`-th tile of 16 tokens of the tail. Those go round the parts from the last, and there round the warps
// from the last: they have fewest units.
template <class Traits>
__device__ __forceinline__ int tail_tile(const Place<Traits>& place, int turn, int warp) {
  return ((turn * Traits::kWarps + Traits::kWarps - 1 - warp) * place.ctas + place.ctas - 1 - place.rank) * TailTile<Traits>::kTokens;
}

// Whether the warp may have more than one tile. What is asked for when the ring is filled comes after that: such a warp fills its own late.
template <class Traits>
__device__ __forceinline__ bool several_tiles(const Tail<Traits>& tail, const Place<Traits>& place, int warp) {
  constexpr int kMostTokens = Traits::Format::kTokens - 1 + Traits::kQueries;
  return kMostTokens > Traits::kWarps * TailTile<Traits>::kTokens && tail_tile(place, 1, warp) < tail.count();
}

// The warp's tiles of the tail, the first of which was asked for. Fills the ring, if it is not yet, when the last tile was asked for.
template <class Traits>
__device__ __forceinline__ void attend_tail(const AttendArgs& args, const Shared<Traits>& shared, const Tail<Traits>& tail, TailTile<Traits>& tile, const Place<Traits>& place,
                                            Walk<Traits>& walk, bool filled, int warp, int lane, State<Traits> (&state)[Traits::kColumnTiles]) {
  if (tile.valid <= 0) return;
#pragma unroll 1
  for (int turn = 1; tile.valid > 0; ++turn) {
    if (tail.fresh && tail.count() < Traits::Format::kTokens) tile.append(tail, lane);
    attend_tile<Traits>(tile, tail.count(), args.q_len, shared.query(), shared.factors, lane, state);
    tile.fetch(tail, tail_tile<Traits>(place, turn, warp), lane);
    if (!filled && tail_tile<Traits>(place, turn + 1, warp) >= tail.count()) walk.fill_up(), filled = true;
  }
#pragma unroll
  for (int i = 0; i < Traits::kColumnTiles; ++i) mix_values<Traits>(state[i]);
}

// The states of all warps become the part's result, or the head's. Whether this CTA completed the head.
template <class Traits>
__device__ __forceinline__ bool finish_part(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Head& head, const Slots& slots, int warp,
                                            int lane, State<Traits> (&state)[Traits::kColumnTiles]) {
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    unmix_values<Traits>(state[tile]);
    publish_state<Traits>(state[tile], shared.merge, shared.warp_totals, warp, lane);
    __syncthreads();
    hand_on<Traits>(args, shared, work, head, slots, tile);
    if (tile + 1 < Traits::kColumnTiles) __syncthreads();
  }
  if (slots.count == 1) return blockIdx.x % Traits::kTogether == 0;
  return Combination<Traits>{args, work, shared.flags}.run(head, slots);
}

template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm) attend_part(const __grid_constant__ AttendArgs args, const __grid_constant__ Grid grid) {
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr int kTokens = Traits::Format::kTokens;
  constexpr bool kEarly = Traits::kCopy == Copy::async && !Traits::kPaged && !Traits::kGathered;  // K and V before lengths are known
  ptx::take_turn();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = blockIdx.y;
  const Shared<Traits> shared(memory);
  const Survey<Traits> survey(args.cache, shared.lengths, warp, lane);
  const Part likely = Part::even(grid, slot, args.cache.batch);
  Head head{likely.batch, static_cast<int>(blockIdx.x) / Traits::kTogether};
  QueryLoader<Traits> loader;
  loader.fetch(args, head, warp, lane);
  Walk<Traits> walk(shared.ring(), Cursor<Traits>(args, head, Place<Traits>(likely), survey.copied, warp, lane), warp, lane);
  if constexpr (kEarly) walk.fill_first(grid.guess && likely.count > 0);
  survey.template wait<kEarly>();
  const Part part = survey.part(grid, slot);
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.slots * args.cache.kv_heads);
  if (part.count == 0) return leave<Traits, kAppend>(args, work, warp, lane);
  const Place<Traits> place(part);
  if (part.batch != likely.batch || part.first != likely.first || part.count != likely.count) {  // lengths are not alike
    if constexpr (kEarly) ptx::copy_wait_all();
    __syncwarp();
    head.batch = part.batch;
    loader.fetch(args, head, warp, lane);
    walk.cursor = Cursor<Traits>(args, head, place, survey.copied, warp, lane);
    walk.early = 0;
  }
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) Inbox<Traits>::open(memory);
#endif
  const int length = survey.length(part.batch);
  __syncwarp();  // then the place of the lengths is the page queue's
  const Tail<Traits> tail(args, head.batch, head.head, length);
  TailTile<Traits> tile;
  tile.fetch(tail, tail_tile<Traits>(place, 0, warp), lane);
  walk.cursor.limit(length);
  const int first = walk.cursor.unit;
  const bool several = several_tiles(tail, place, warp);
  if (!several) walk.fill_up();
  loader.publish(args, shared, warp, lane);
  __syncthreads();

  State<Traits> state[Traits::kColumnTiles];
#pragma unroll
  for (int i = 0; i < Traits::kColumnTiles; ++i) state[i].clear();
  attend_tail<Traits>(args, shared, tail, tile, place, walk, !several, warp, lane, state);
  const Sight<Traits> sight{length + tail.fresh, args.q_len, length / kTokens * kTokens};
  attend_units<Traits>(shared, walk, first, sight, lane, state);
  if constexpr (kEarly) ptx::copy_wait_all();  // what was asked for too early
  const int readers = kAppend ? count_reader(work) : 0;  // looked at in the end: the trip to the counter costs nobody time
  const bool completed = finish_part<Traits>(args, shared, work, head, Slots{head.head * grid.slots + part.first, part.count, part.rank}, warp, lane, state);

  if constexpr (kAppend) {
    const int same = ptx::pinned(length);  // so that of the tail no more than this outlives the loop
    if (const Tail<Traits> whole(args, head.batch, head.head, same); completed && whole.count() >= kTokens) flush<Traits>(args, shared, whole, same);
    advance_lengths(args, work, readers, warp, lane);
  }
}

}  // namespace kvgen
