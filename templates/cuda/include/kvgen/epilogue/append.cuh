// The end of a decode step: a residual that became a whole block is packed, and lengths advance.
#pragma once
#include "kvgen/epilogue/workspace.cuh"
#include "kvgen/mainloop/packed_loop.cuh"
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/pack/quantize.cuh"

namespace kvgen {

// Where a block is packed: in the place of the rings and the merge buffer, or, where that is too small, behind all else.
template <class Traits>
struct FlushMemory {
  static constexpr int kBytes = pack_smem_bytes<typename Traits::Format>();
  static constexpr int kExtra = kBytes <= Traits::kReusable ? 0 : kBytes;
  static constexpr int kAt = kExtra ? Traits::kSharedBytes : 0;
};

// Packs the block that a residual has become; tokens beyond it move to the front of the residual. All threads call it, in the CTA that
// completed the head, when no CTA reads the residual any more.
template <class Traits>
__device__ void flush(const AttendArgs& args, const Shared<Traits>& shared, const Residual<Traits>& residual, int length) {
  using Format = typename Traits::Format;
  uint8_t* block =
      args.cache.block<Traits::kPaged>(residual.head.sequence, residual.head.head, length / Format::kTokens, Format::kBlockBytes);
  __syncthreads();
  pack_block<Format, Traits::kThreads>([&](int token) { return residual.k_row(token); }, [&](int token) { return residual.v_row(token); },
                                       block, shared.memory + FlushMemory<Traits>::kAt);
  residual.store(Format::kTokens, residual.count(), 0);
}

// Counts this CTA among those that have read the lengths; gives thread 0 how many had before it. Called when all its warps have read them,
// and well before the number is needed: the atomic's answer queues behind earlier loads.
template <class Traits>
__device__ __forceinline__ int count_reader(const Workspace<Traits>& work) {
  return threadIdx.x == 0 ? atomicAdd(work.lengths_read, 1) : 0;
}

// The last CTA to have read the lengths writes the new ones: no CTA reads them any more. A sequence that has no room keeps its length.
// `readers`, of thread 0: how many CTAs had read them before.
template <class Traits>
__device__ __forceinline__ void advance_lengths(const AttendArgs& args, const Workspace<Traits>& work, int readers, int warp, int lane) {
  if (warp != 0 || __shfl_sync(~0u, readers, 0) != static_cast<int>(gridDim.x * gridDim.y * gridDim.z) - 1) return;
  if (lane == 0) *work.lengths_read = 0;
  for (int i = lane; i < args.cache.batch; i += 32) {
    const int length = args.cache.lengths[i];
    if (length <= args.limit - args.q_len) args.cache.lengths[i] = length + args.q_len;
  }
}

// For the CTAs of a sequence that has no room for the step's tokens: nothing is written, and the host is told.
template <class Traits>
__device__ __noinline__ void skip_step(const AttendArgs& args, int warp, int lane) {
  const Workspace<Traits> work(args);
  if (threadIdx.x == 0) *args.overflow = 1;
  ptx::copy_wait_all();
  __syncthreads();
  if (args.advance) advance_lengths(args, work, count_reader(work), warp, lane);
}

}  // namespace kvgen
