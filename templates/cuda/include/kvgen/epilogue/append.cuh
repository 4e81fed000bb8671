// The end of a decode step: packs a block of unquantized tokens, and advances the lengths.
#pragma once
#include "kvgen/epilogue/store.cuh"
#include "kvgen/mainloop/packed_loop.cuh"
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/pack/quantize.cuh"

namespace kvgen {

// Whether this CTA, which completed a run of the head's packed-GQA rows, is the last one to do so: then no CTA reads the residual any more.
// All threads call it, once per run of a head that is to be flushed. `flag` is in shared memory.
template <class Traits>
__device__ __forceinline__ bool last_run(const AttendArgs& args, const Workspace<Traits>& work, const Head& head, int* flag) {
  if (Traits::kRuns == 1 || args.runs == 1) return true;
  __syncthreads();
  if (threadIdx.x == 0) *flag = arrive_last(work.run_counter(args, head), args.runs);
  __syncthreads();
  return *flag;
}

// Packs the oldest unquantized block, and stores the step's other tokens, which were not appended yet. All threads of the CTA that
// completed the head call it, when no CTA reads the residual any more.
template <class Traits>
__device__ void flush(const AttendArgs& args, const Shared<Traits>& shared, const Residual<Traits>& residual) {
  using Format = typename Traits::Format;
  using ResidualRows = typename Format::ResidualRows;
  using Memory = typename Traits::Memory;
  static_assert(pack_smem_bytes<Format>() <= (Memory::kFlush ? Memory::kTotal - Memory::kFlush : Memory::kPages));
  uint8_t* block = args.cache.block<Format>(residual.head.sequence, residual.head.head, ResidualRows::packed_blocks(residual.length));
  const auto scales = StaticScales::of<Format>(args.scales, args.cache.kv_heads, residual.head.head);
  __syncthreads();
  if constexpr (kRotated<typename Format::Key> || kRotated<typename Format::Value>) {
    // The rows of the block's new tokens are free, or hold them already.
    residual.keep_rotated(residual.old, min(residual.count(), Format::kTokens), [&](int token) { return residual.row_of(token); });
    __syncthreads();
    pack_block<Format, Traits::kThreads>([&](int token) { return residual.k_held(token); },
                                         [&](int token) { return residual.v_held(token); }, block, shared.memory + Memory::kFlush, scales);
    if constexpr (ResidualRows::kRollback == 0)
      residual.keep_rotated(max(residual.old, Format::kTokens), residual.count(), [&](int token) { return residual.later_row_of(token); });
  } else {
    pack_block<Format, Traits::kThreads>([&](int token) { return residual.k_row(token); }, [&](int token) { return residual.v_row(token); },
                                         block, shared.memory + Memory::kFlush, scales);
    if constexpr (ResidualRows::kRollback == 0)
      residual.store(ResidualRows::kLocal > 0 ? max(residual.old, Format::kTokens) : Format::kTokens, residual.count());
  }
}

// Counts this CTA as a reader of the lengths; returns the previous count to thread 0. It is called after all warps have read the lengths
// and well before the count is used, because the atomic's result returns after earlier loads.
template <class Traits>
__device__ __forceinline__ int count_reader(const Workspace<Traits>& work) {
  return threadIdx.x == 0 ? atomicAdd(work.lengths_read, 1) : 0;
}

// The last reader of the lengths advances them, since no CTA reads them afterwards. A sequence without room keeps its length. `readers` is
// the previous count, in thread 0.
template <class Traits>
__device__ __forceinline__ void advance_lengths(const AttendArgs& args, const Workspace<Traits>& work, int readers, int warp, int lane) {
  if (warp != 0 || __shfl_sync(~0u, readers, 0) != static_cast<int>(gridDim.x * gridDim.y * gridDim.z) - 1) return;
  if (lane == 0) *work.lengths_read = 0;
  for (int i = lane; i < args.cache.batch; i += 32) {
    const int length = args.cache.lengths[i];
    if (length <= args.limit - args.q_len) args.cache.lengths[i] = length + args.q_len;
  }
}

// Ends the CTAs of a sequence without room for the step's tokens: they write nothing and set the overflow flag.
template <class Traits>
__device__ __noinline__ void skip_step(const AttendArgs& args, int warp, int lane) {
  const Workspace<Traits> work(args);
  if (threadIdx.x == 0) *args.overflow = 1;
  ptx::copy_wait_all();
  __syncthreads();
  if (args.advance) advance_lengths(args, work, count_reader(work), warp, lane);
}

}  // namespace kvgen
