// Even parts: every head in as many, a CTA has one of them. It knows its head from its place in the grid and where its units begin before
// it knows how many there are. Where lengths are not alike, the CTAs take ranges instead.
#pragma once
#include "kvgen/ranges.cuh"

namespace kvgen {

// The lengths that a warp has to know, copied to a place of its own ahead of K and V: the compiler would put loads behind them.
template <class Traits>
struct Survey {
  static constexpr int kTurns = std::min(4, kMaxBatch / Traits::kWarps / 32);  // sequences per lane that are copied
  static constexpr int kSlack = 1024;  // tokens that take no longer than a CTA takes to start and to finish
  const CacheArgs& cache;
  int* copied;
  int lane;

  __device__ Survey(const CacheArgs& cache_, int* lengths, int warp, int lane_) : cache(cache_), copied(lengths + warp * kTurns * 32), lane(lane_) {
#pragma unroll
    for (int at = lane; at < kTurns * 32; at += 32)
      if (at < cache.batch) ptx::copy_async<4>(ptx::shared_address(copied + at), cache.lengths + at);
    ptx::copy_commit();
  }
  // From here on what was copied can be asked for, `later` groups of copies after it.
  template <int kLater>
  __device__ __forceinline__ void wait() const {
    ptx::copy_wait<kLater>();
    __syncwarp();
  }
  __device__ __forceinline__ int length(int batch) const { return batch < kTurns * 32 ? copied[batch] : cache.lengths[batch]; }
  // Whether parts of equal numbers take about equal times. All lanes ask.
  __device__ __forceinline__ bool alike() const {
    int total = 0, longest = 0;
#pragma unroll 1
    for (int at = lane; at < min(cache.batch, kTurns * 32); at += 32) total += copied[at], longest = max(longest, copied[at]);
#pragma unroll 8
    for (int at = kTurns * 32 + lane; at < cache.batch; at += 32) total += cache.lengths[at], longest = max(longest, cache.lengths[at]);
    const int64_t all = __reduce_add_sync(~0u, total), most = __reduce_max_sync(~0u, longest);
    return most * cache.batch <= all + all / 8 + static_cast<int64_t>(kSlack) * cache.batch;
  }
};

// Walks the packed units of one warp. The warps of all of a head's parts take them in turn, so that where a warp begins does not
// depend on the sequence's length.
template <class Traits>
struct PortionCursor {
  const AttendArgs& args;
  Blocks<Traits> blocks;
  int unit, end = 0, length = 0;

  __device__ PortionCursor(const AttendArgs& args_, const Head& head, int warp, int lane)
      : args(args_), blocks(lane, Traits::kWarps * gridDim.x), unit(warp * gridDim.x + blockIdx.x) {
    blocks.enter(args, head.batch, head.head);
  }
  // The first unit, if memory goes that far: perhaps it is not the sequence's. Where no table says where it lies.
  __device__ __forceinline__ Unit likely() { return unit < args.cache.blocks * Traits::kUnitsPerBlock ? blocks.packed(args, unit, 0, 0) : Unit{}; }
  __device__ void limit(int length_) {
    length = length_, end = Traits::packed_units(length);
    blocks.look_up(unit, end, length);
  }
  __device__ __forceinline__ Unit here() { return unit < end ? blocks.packed(args, unit, end, length) : Unit{}; }
  __device__ __forceinline__ Unit next() {
    unit += blocks.stride;
    return here();
  }
  __device__ Tail<Traits> tail() const { return Tail<Traits>(args, 0, 0, length); }  // for rings that carry pieces; these do not
};

// First token of a warp's `turn`-th tile of 16 tokens of the tail. Those go round the parts from the last, and there round the warps
// from the last: they have fewest units.
template <class Traits>
__device__ __forceinline__ int tail_tile(int turn, int warp) {
  const int splits = gridDim.x;
  return ((turn * Traits::kWarps + Traits::kWarps - 1 - warp) * splits + splits - 1 - static_cast<int>(blockIdx.x)) * TailTile<Traits>::kTokens;
}

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
    tile.fetch(tail, tail_tile<Traits>(turn, warp), lane);
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
  constexpr bool kEarly = Traits::kCopy == Copy::async && !Traits::kPaged && !Traits::kGathered;  // K and V before the length is known
  ptx::take_turn();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shared<Traits> shared(memory);
  const Single single{{{static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)}}};
  const Head& head = single.heads[0];
  const Survey<Traits> survey(args.cache, shared.lengths, warp, lane);
  QueryLoader<Traits> loader;
  loader.fetch(args, head, warp, lane);
  Walk<Traits, PortionCursor<Traits>> walk(shared.ring(), PortionCursor<Traits>(args, head, warp, lane), warp, lane);
  if constexpr (kEarly) walk.fill_first(walk.cursor.likely());
  survey.template wait<kEarly>();
  if (args.cache.batch > 1 && !survey.alike()) {
    ptx::copy_wait_all();
    __syncthreads();  // others may still look at what they copied
    return call_range<Ranges, kAppend>(args, grid);
  }
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) Inbox<Traits>::open(memory);
#endif
  const int length = survey.length(head.batch);
  const Tail<Traits> tail(args, head.batch, head.head, length);
  TailTile<Traits> tile;
  tile.fetch(tail, tail_tile<Traits>(0, warp), lane);
  walk.cursor.limit(length);
  const int first = walk.cursor.unit;
  walk.fill_up(kEarly ? 1 : 0);
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
  const Sight<Traits> sight{length + tail.fresh, args.q_len, length / kTokens * kTokens};
  attend_units<Traits>(shared, walk, first, Traits::packed_units(length), walk.cursor.blocks.stride, sight, lane, state);
  if constexpr (kEarly) ptx::copy_wait_all();  // what was asked for too early
  const bool completed = finish_part<Traits>(args, shared, work, head, warp, lane, state);

  if constexpr (kAppend) {
    if (completed && tail.count() >= kTokens) flush<Traits>(args, shared, tail, length);
    advance_lengths(args, work, readers, grid.ctas, warp, lane);
  }
}

}  // namespace kvgen
