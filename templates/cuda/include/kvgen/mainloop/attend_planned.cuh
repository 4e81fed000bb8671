// The kernel that takes a plan. A CTA goes through the work tiles that the plan gives it. The loads of the next work tile are in flight
// while the result of the last one is stored.
#pragma once
#include "kvgen/epilogue/append.cuh"
#include "kvgen/epilogue/store.cuh"
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/pipeline/pipeline.cuh"
#include "kvgen/schedule/work_queue.cuh"

namespace kvgen {

// A worker of the plan is one CTA for each run of packed-GQA rows. The CTAs of a worker go through the same work tiles at the same time, so
// all but one of them read K and V from L2.
template <class Traits>
__device__ __forceinline__ int worker_of(const AttendArgs& args) {
  return static_cast<int>(blockIdx.x) / (Traits::kRuns == 1 ? 1 : args.runs);
}
template <class Traits>
__device__ __forceinline__ Head head_of(const AttendArgs& args, const WorkTile& tile) {
  return {tile.sequence, tile.head, Traits::kRuns == 1 ? 0 : static_cast<int>(blockIdx.x) % args.runs};
}
template <class Traits>
__device__ __forceinline__ SplitSlots slots_of(const AttendArgs& args, const WorkTile& tile) {
  const int run = head_of<Traits>(args, tile).run;
  return {tile.slot - tile.split_idx + run * args.slots, tile.num_splits, tile.split_idx};
}

// A warp's first KV tile of a work tile. The warps take the KV tiles of a CTA round-robin, and the round goes on over work tiles: `done`
// counts the KV tiles of the earlier ones.
template <class Traits>
__device__ __forceinline__ int first_tile(const WorkTile& tile, int done, int warp) {
  return tile.first + (warp + Traits::kWarps - done % Traits::kWarps) % Traits::kWarps;
}

template <class Traits>
__device__ __forceinline__ KvTiles<Traits> tiles_of(const AttendArgs& args, const WorkTile& tile, int done, int* words, int warp,
                                                    int lane) {
  KvTiles<Traits> tiles(args, head_of<Traits>(args, tile), Traits::kWarps, words, lane);
  // The blocks before the window may have no page, so in gathered tiles the iterator replaces them by the window's first block.
  const int fresh = args.k_new.data ? args.q_len : 0, first = Traits::Mask::first_token(max(tile.length + fresh - args.q_len, 0));
  tiles.begin(first_tile<Traits>(tile, done, warp), tile.end, Traits::packed_length(tile.length, fresh), first / Traits::Format::kTokens);
  return tiles;
}

// Whether the head exists. The speculative work tile may hold any values, also when q is loaded for it after griddepcontrol.wait.
__device__ __forceinline__ bool exists(const AttendArgs& args, const Head& head) {
  return static_cast<unsigned>(head.sequence) < static_cast<unsigned>(args.cache.batch) &&
         static_cast<unsigned>(head.head) < static_cast<unsigned>(args.cache.kv_heads);
}

// Prefetches the first KV tiles of a work tile into L2. The work tile may hold stale values, so they are checked first.
template <class Traits>
__device__ __forceinline__ void prefetch_first(const AttendArgs& args, const WorkTile& tile, int warp, int lane) {
  // With a sliding window, block i lies at place i mod kWindowPlaces, so every tile number is valid; the bound only avoids int overflow.
  const int tiles = Traits::Format::kWindowPlaces > 0 ? 1 << 28 : args.cache.blocks * Traits::kTilesPerBlock;
  const Head head = head_of<Traits>(args, tile);
  if (!exists(args, head) || static_cast<unsigned>(tile.first) >= static_cast<unsigned>(tiles)) return;
  L2Prefetch<Traits>::prefetch_tiles(args, head, first_tile<Traits>(tile, 0, warp), lane);
  if (warp == Traits::kWarps - 1) L2Prefetch<Traits>::prefetch_residual(args, head, lane);
}

// Stores the result of a work tile whose states are in shared memory. This function and `finish_work` are not inlined, since their
// registers would add to those of the loop.
template <class Traits>
__device__ __noinline__ void store_work_tile(const AttendArgs& args, uint8_t* memory, const WorkTile& tile, int q_tile) {
  store_result<Traits>(args, Shared<Traits>(memory), Workspace<Traits>(args), head_of<Traits>(args, tile), slots_of<Traits>(args, tile),
                       q_tile);
}

// Ends a CTA that had `count` work tiles: stores the last result, reduces the heads that are split over CTAs, and packs the residuals that
// became blocks. Only the first and the last work tile of a CTA can belong to a split head, so half of the threads reduce each of them.
template <class Traits, bool kAppend>
__device__ __noinline__ void finish_work(const AttendArgs& args, uint8_t* memory, const WorkQueue queue, int count, bool flushes) {
  const Shared<Traits> shared(memory);
  const Workspace<Traits> work(args);
  const SplitReduction<Traits> reduction{args, work, shared.flags};
  const auto end = [&](int i) -> const WorkTile& { return i ? queue[count - 1] : queue.first(); };
  __syncthreads();
  store_work_tile<Traits>(args, memory, end(1), Traits::kQTiles - 1);
  __syncthreads();
  if (const int i = threadIdx.x / 32; i < 2 && threadIdx.x % 32 == 0)
    shared.flags[i] = i < count && end(i).num_splits > 1 && reduction.last(head_of<Traits>(args, end(i)), slots_of<Traits>(args, end(i)));
  __syncthreads();
  if (const int i = threadIdx.x / Traits::kReduceThreads; shared.flags[i])
    reduction.reduce(head_of<Traits>(args, end(i)), slots_of<Traits>(args, end(i)));
  if constexpr (kAppend && !Traits::kArrival) {
    if (!flushes) return;
    for (int i = 0; i < count; ++i) {
      const WorkTile tile = queue.in_plan(i);
      const Residual<Traits> residual(args, head_of<Traits>(args, tile), tile.length);
      if (!residual.fills_block() || (tile.num_splits > 1 && !shared.flags[i > 0])) continue;
      if (last_run<Traits>(args, work, residual.head, shared.flags + 2)) flush<Traits>(args, shared, residual);
    }
  }
}

// Writes the outputs of empty sequences, which are distributed over the CTAs. It runs last, so that no work tile waits for the plan's
// header.
template <class Traits>
__device__ __noinline__ void write_empties(const AttendArgs& args, const PlanShape& shape) {
  const Plan plan(args.plan, shape);
  for (int i = blockIdx.x; i < plan.memory[0]; i += gridDim.x) write_empty<Traits>(args, plan.empty[i]);
}

template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    attend_planned(const __grid_constant__ AttendArgs args, const __grid_constant__ PlanShape shape) {
  extern __shared__ __align__(128) uint8_t memory[];
  using ResidualRows = typename Traits::Format::ResidualRows;
  ptx::griddepcontrol_launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shared<Traits> shared(memory);
  const Plan plan(args.plan, shape);
  WorkQueue queue(plan, worker_of<Traits>(args), shared.work_tiles + warp * (WorkQueue::kWarpBytes / static_cast<int>(sizeof(WorkTile))),
                  lane);
  prefetch_first<Traits>(args, queue.load_speculative(), warp, lane);
  ptx::griddepcontrol_wait();

  QueryLoader<Traits> loader;
  if (exists(args, head_of<Traits>(args, queue.first()))) loader.fetch(args, head_of<Traits>(args, queue.first()), warp, lane);
  if (queue.load_confirmed() && queue.has(0)) loader.fetch(args, head_of<Traits>(args, queue.first()), warp, lane);
  if (!queue.has(0)) {
    ptx::copy_wait_all();
    return write_empties<Traits>(args, shape);
  }
  int* words = shared.pages + warp * Traits::kPageEntries;
  WorkTile work = queue.first();
  Pipeline<Traits> pipeline(shared.ring(), tiles_of<Traits>(args, work, 0, words, warp, lane), warp, lane);
  pipeline.begin(pipeline.tiles);
  bool flushes = false;
  for (int index = 0, done = 0;; ++index) {
    warp = ptx::pinned(warp), lane = ptx::pinned(lane);  // derived values are computed again, which keeps them out of the loop's registers
    const Head head = head_of<Traits>(args, work);
    const SplitPlace place{work.split_idx, work.num_splits};
    const Residual<Traits> residual(args, head, work.length);
    const SeqlenInfo seqlen{head.head, work.length + residual.fresh, args.q_len,
                            ResidualRows::first(Traits::packed_length(work.length, residual.fresh)), head.run};
    ResidualTile<Traits> tile;
    tile.clear();
    fetch_residual<Traits>(residual, place, warp, lane, tile);
    pipeline.fill();
    if (index > 0) {
      __syncthreads();
      store_work_tile<Traits>(args, memory, queue[index - 1], Traits::kQTiles - 1);
      queue.request(index + 1);
    }
    rotate_tile<Traits>(residual, lane, tile);
    loader.publish(args, shared, warp, lane);
    flushes |= kAppend && residual.fills_block();
    __syncthreads();

    State<Traits> state[Traits::kQTiles];
#pragma unroll
    for (int i = 0; i < Traits::kQTiles; ++i) state[i].clear();
    attend_residual<Traits>(shared, residual, tile, place, seqlen, warp, lane, state);
    attend_packed<Traits>(shared, pipeline, first_tile<Traits>(work, done, warp), work.end, Traits::kWarps, PackedMask<Traits>{seqlen},
                          lane, state);
    ptx::copy_wait_all();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Traits::kQTiles; ++i) {
      unmix_values<Traits>(state[i]);
      publish_state<Traits>(state[i], shared.merge, shared.warp_stats, warp, lane);
      if (i + 1 == Traits::kQTiles) break;
      __syncthreads();
      store_work_tile<Traits>(args, memory, queue[index], i);
      __syncthreads();
    }
    if (!queue.has(index + 1)) {
      finish_work<Traits, kAppend>(args, memory, queue, index + 1, flushes);
      return write_empties<Traits>(args, shape);
    }
    done += queue[index].end - queue[index].first;
    work = queue[index + 1];
    loader.fetch(args, head_of<Traits>(args, work), warp, lane);
    pipeline.begin(tiles_of<Traits>(args, work, done, words, warp, lane));
  }
}

}  // namespace kvgen
