// Even parts: every head in as many, a CTA has one of them. It knows its head from its place in the grid, asks for its share of the
// tail before its rings are filled, and has no more to plan. Where lengths are not alike, the CTAs take ranges instead.
#pragma once
#include "kvgen/ranges.cuh"

namespace kvgen {

// Whether parts of equal numbers take about equal times. All lanes ask.
__device__ __forceinline__ bool alike(const CacheArgs& cache, int lane) {
  constexpr int kSlack = 1024;  // tokens that take no longer than a CTA takes to start and to finish
  int total = 0, longest = 0;
#pragma unroll 4
  for (int at = lane; at < cache.batch; at += 32) total += cache.lengths[at], longest = max(longest, cache.lengths[at]);
  const int64_t all = __reduce_add_sync(~0u, total), most = __reduce_max_sync(~0u, longest);
  return most * cache.batch <= all + all / 8 + static_cast<int64_t>(kSlack) * cache.batch;
}

// The CTA's part: packed units, and tiles of 16 tokens of the tail, which go round the parts from the last, and there round the
// warps from the last: those that have fewest units.
template <class Traits>
struct Portion {
  int length, fresh;  // of the sequence before the call; new tokens
  int begin, end;     // units

  __device__ Portion(const AttendArgs& args, const Grid& grid, int batch, int fresh_) : length(args.cache.lengths[batch]), fresh(fresh_) {
    const int rank = blockIdx.x, packed = Traits::packed_units(length), each = grid.by_splits.quotient(packed), more = packed - each * static_cast<int>(gridDim.x);
    begin = rank * each + min(rank, more);
    end = begin + each + (rank < more);
  }
  __device__ int count() const { return length % Traits::Format::kTokens + fresh; }
  // First token of the warp's `turn`-th tile.
  __device__ static int tile(int turn, int warp) {
    const int splits = gridDim.x;
    return ((turn * Traits::kWarps + Traits::kWarps - 1 - warp) * splits + splits - 1 - static_cast<int>(blockIdx.x)) * TailTile<Traits>::kTokens;
  }
};

// Walks the packed units of one warp: every kWarps-th of the CTA's part.
template <class Traits>
struct PortionCursor {
  const AttendArgs& args;
  Blocks<Traits> blocks;
  int unit, end, length;

  __device__ PortionCursor(const AttendArgs& args_, const Portion<Traits>& portion, const Head& head, int warp, int lane)
      : args(args_), blocks(lane), unit(portion.begin + warp), end(portion.end), length(portion.length) {
    blocks.enter(args, head.batch, head.head);
    blocks.look_up(unit, end, length);
    blocks.prefetch_pages(portion.begin, portion.end, length, threadIdx.x, Traits::kThreads);
  }
  __device__ __forceinline__ Unit here() { return unit < end ? blocks.packed(args, unit, end, length) : Unit{}; }
  __device__ __forceinline__ Unit next() {
    unit += Traits::kWarps;
    return here();
  }
  __device__ Tail<Traits> tail() const { return Tail<Traits>(args, 0, 0, length); }  // for rings that carry pieces; these do not
};

// The one head of a CTA, as a group.
struct Single {
  Head heads[1];
  static constexpr int count = 1;
};

// The warp's tiles of the tail, the first of which was asked for.
template <class Traits>
__device__ __forceinline__ void attend_tail(const AttendArgs& args, const Shared<Traits>& shared, const Tail<Traits>& tail, TailTile<Traits>& tile, int warp, int lane,
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
  if (tile.valid <= 0) return;
#pragma unroll 1
  for (int turn = 1; tile.valid > 0; ++turn) {
    if (tail.fresh && tail.count() < Traits::Format::kTokens) tile.append(tail, lane);
    attend_piece<Traits>(tile, tile.first, tail.count(), args.q_len, shared.query(), shared.factors, lane, state);
    tile.fetch(tail, Portion<Traits>::tile(turn, warp), lane);
  }
#pragma unroll
  for (int i = 0; i < Traits::kColumnTiles; ++i) mix_values<Traits>(state[i]);
}

// The states of all warps become the part's result, or the head's. Whether this CTA completed the head.
template <class Traits>
__device__ __forceinline__ bool finish_part(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Head& head, int warp, int lane,
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
  constexpr int kTogether = Traits::kCombine == Combine::cluster ? Traits::kCluster : 1;  // CTAs whose results are one
  const int count = gridDim.x / kTogether, rank = blockIdx.x / kTogether;
  const Parts parts = Parts::even((head.batch * args.cache.kv_heads + head.head) * count, count, rank);
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    unmix_values<Traits>(state[tile]);
    publish_state<Traits>(state[tile], shared.merge, shared.warp_totals, warp, lane);
    __syncthreads();
    hand_on<Traits>(args, shared, work, head, parts, count == 1, tile);
    if (tile + 1 < Traits::kColumnTiles) __syncthreads();
  }
  return count == 1 ? blockIdx.x == 0 : Combination<Traits>{args, work, shared.flags}.run(head, parts, rank);
}

template <class Traits, class Ranges, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm) attend_even(const __grid_constant__ AttendArgs args, const __grid_constant__ Grid grid) {
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr int kTokens = Traits::Format::kTokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (args.cache.batch > 1 && !alike(args.cache, lane)) return attend_range<Ranges, kAppend>(args, grid, memory);
  const Shared<Traits> shared(memory);
  const Single single{{{static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)}}};
  const Head& head = single.heads[0];
  const Portion<Traits> portion(args, grid, head.batch, kAppend ? args.q_len : 0);
  QueryLoader<Traits> loader;
  loader.fetch(args, head, warp, lane);
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) ptx::cluster_arrive();
#endif
  const Tail<Traits> tail(args, head.batch, head.head, portion.length);
  TailTile<Traits> tile;
  tile.fetch(tail, Portion<Traits>::tile(0, warp), lane);
  Walk<Traits, PortionCursor<Traits>> walk(shared.ring(), PortionCursor<Traits>(args, portion, head, warp, lane), warp, lane);
  loader.publish(args, shared, single, warp, lane);
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.ctas);
  int readers = 0;  // asked for here, looked at in the end: the trip to the counter costs nobody time
  if constexpr (kAppend)
    readers = count_reader(work);
  else
    __syncthreads();

  State<Traits> state[Traits::kColumnTiles];
#pragma unroll
  for (int i = 0; i < Traits::kColumnTiles; ++i) state[i].clear();
  attend_tail<Traits>(args, shared, tail, tile, warp, lane, state);
  const Sight<Traits> sight{portion.length + portion.fresh, args.q_len, portion.length / kTokens * kTokens};
  attend_units<Traits>(shared, walk, portion.begin + warp, portion.end, sight, lane, state);
  const bool completed = finish_part<Traits>(args, shared, work, head, warp, lane, state);

  if constexpr (kAppend) {
    if (completed && tail.count() >= kTokens) flush<Traits>(args, shared, tail, portion.length);
    advance_lengths(args, work, readers, grid.ctas, warp, lane);
  }
}

}  // namespace kvgen
