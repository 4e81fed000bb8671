// The kernel with the static scheduler: every head has the same number of splits, and each split is one CTA or one cluster. It suits one
// sequence and sequences of equal lengths. Unequal lengths give the same output, but the CTAs of short sequences finish early.
#pragma once
#include "kvgen/epilogue/append.cuh"
#include "kvgen/epilogue/store.cuh"
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/pipeline/pipeline.cuh"

namespace kvgen {

// The grid is (KV heads x runs of packed-GQA rows x cluster size, splits, sequences). The warps of all CTAs of a run take the head's KV
// tiles round-robin, so a warp's first tile does not depend on the sequence length. The runs of a head are next to each other in the grid:
// they read the same tiles at the same time, so most of them come from L2.
template <class Traits>
struct StaticScheduler {
  Head head;
  SplitPlace place{static_cast<int>(blockIdx.y) * Traits::kClusterSize + static_cast<int>(blockIdx.x) % Traits::kClusterSize,
                   static_cast<int>(gridDim.y) * Traits::kClusterSize};

  __device__ explicit StaticScheduler(const AttendArgs& args) {
    const int x = static_cast<int>(blockIdx.x) / Traits::kClusterSize, runs = Traits::kRuns == 1 ? 1 : args.runs;
    head = {static_cast<int>(blockIdx.z), x / runs, x % runs};
  }
  __device__ int first_tile(int warp) const { return warp * place.ctas + place.rank; }
  __device__ int stride() const { return Traits::kWarps * place.ctas; }
  __device__ SplitSlots slots(const AttendArgs& args) const {
    const int splits = static_cast<int>(gridDim.y);
    const int first = (head.sequence * args.cache.kv_heads + head.head) * splits;
    return {first + (Traits::kRuns == 1 ? 0 : head.run * args.slots), splits, static_cast<int>(blockIdx.y)};
  }
};

// Whether the first tile's address is known before the sequence length. A sliding window moves the first tile, and a gathered tile depends
// on the number of blocks.
template <class Traits>
constexpr bool kEarlyTiles = !Traits::kGathered && Traits::Mask::kWindow == 0;

// Starts the iterator of a sequence whose length is known.
template <class Traits>
__device__ __forceinline__ int begin_tiles(KvTiles<Traits>& tiles, const StaticScheduler<Traits>& scheduler, int length, int total,
                                           int q_len, int warp) {
  const int end = Traits::packed_tiles(length);
  if constexpr (kEarlyTiles<Traits>) {
    tiles.limit(end, length);
  } else {
    const int token = Traits::Mask::first_token(max(total - q_len, 0)), block = token / Traits::Format::kTokens;
    const bool seen = block < Traits::Format::ResidualRows::packed_blocks(length);  // if not, no tile has blocks to read
    tiles.begin(token / Traits::kTileTokens + scheduler.first_tile(warp), seen ? end : 0, length, block);
  }
  return tiles.tile;
}

template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm) attend_static(const __grid_constant__ AttendArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  using ResidualRows = typename Traits::Format::ResidualRows;
  constexpr bool kFillEarly = Traits::kCopy == Copy::cp_async && !Traits::kPaged && kEarlyTiles<Traits>;
  ptx::griddepcontrol_launch_dependents();
#if KVGEN_SM90
  if constexpr (Traits::kReduction == Reduction::cluster) ClusterReduction<Traits>::open(memory);
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const StaticScheduler<Traits> scheduler(args);
  const Head& head = scheduler.head;
  if constexpr (kEarlyTiles<Traits>) L2Prefetch<Traits>::prefetch_tiles(args, head, scheduler.first_tile(warp), lane);
  if (args.one_wave && scheduler.place.rank == 0 && warp == Traits::kWarps - 1) L2Prefetch<Traits>::prefetch_residual(args, head, lane);
  ptx::griddepcontrol_wait();

  // The loads of the length and of q come before the copies of K and V, because they would wait behind them.
  const int length = ptx::load_relaxed(args.cache.lengths + head.sequence);
  QueryLoader<Traits> loader;
  loader.fetch(args, head, warp, lane);
  const Shared<Traits> shared(memory);
  KvTiles<Traits> tiles(args, head, scheduler.stride(), shared.pages + warp * Traits::kPageEntries, lane);
  if constexpr (kEarlyTiles<Traits>) tiles.begin_early(scheduler.first_tile(warp));
  Pipeline<Traits> pipeline(shared.ring(), tiles, warp, lane);
  if constexpr (kFillEarly) pipeline.fill_early();
  const Workspace<Traits> work(args);
  if (kAppend && length > args.limit - args.q_len) return skip_step<Traits>(args, warp, lane);
  const Residual<Traits> residual(args, head, length);
  const int packed = Traits::packed_length(length, residual.fresh);
  const SeqlenInfo seqlen{head.head, length + residual.fresh, args.q_len, ResidualRows::first(packed), head.run};
  ResidualTile<Traits> tile;
  fetch_residual<Traits>(residual, scheduler.place, warp, lane, tile);
  const int first = begin_tiles(pipeline.tiles, scheduler, packed, seqlen.length, args.q_len, warp);
  pipeline.fill();
  rotate_tile<Traits>(residual, lane, tile);
  loader.publish(args, shared, warp, lane);
  __syncthreads();
#if KVGEN_SM90
  if constexpr (Traits::kReduction == Reduction::cluster) ClusterReduction<Traits>::expect(memory);
#endif

  State<Traits> state[Traits::kQTiles];
#pragma unroll
  for (int i = 0; i < Traits::kQTiles; ++i) state[i].clear();
  attend_residual<Traits>(shared, residual, tile, scheduler.place, seqlen, warp, lane, state);
  attend_packed<Traits>(shared, pipeline, first, pipeline.tiles.end, scheduler.stride(), PackedMask<Traits>{seqlen}, lane, state);
  if constexpr (kFillEarly) ptx::copy_wait_all();  // the loop does not wait for the copies of an early tile that lies beyond the sequence
  const int readers = kAppend && args.advance ? count_reader(work) : 0;
  const bool completed = finish_head<Traits>(args, shared, work, head, scheduler.slots(args), warp, lane, state);

  if constexpr (kAppend) {
    if constexpr (!Traits::kArrival) {
      const int length_again = ptx::pinned(length);  // keeps the residual's addresses out of the loop's registers
      if (const Residual<Traits> full(args, head, length_again); completed && full.fills_block())
        if (last_run<Traits>(args, work, head, shared.flags)) flush<Traits>(args, shared, full);
    }
    if (args.advance) advance_lengths(args, work, readers, warp, lane);
  }
}

}  // namespace kvgen
