// The end of a head: its warps' parts merged and handed on, its block packed if the residual became a whole one.
#pragma once
#include "kvgen/merge.cuh"
#include "kvgen/quantize.cuh"
#include "kvgen/span.cuh"
#include "kvgen/tail_tiles.cuh"

namespace kvgen {

// The warps' shares of a column tile of a part: merged, over a cluster's CTAs too, and written, as output if this is all of the head.
template <class Traits>
__device__ __forceinline__ void hand_on(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work,
                                        const Head& head, const Slots& slots, int tile) {
  Merged<Traits> merged;
  merge_warps<Traits>(shared.merge, shared.warp_totals, merged);
  const auto write = [&](int column, int channel, int stride, const auto& value, const Total& total) {
    const int at = tile * 8 + column;
    if (at >= Traits::kColumns) return;
    if (slots.count == 1) return write_output<Traits>(args, head, at, channel, stride, value, total);
    constexpr int kWide = sizeof value / sizeof *value;
#pragma unroll
    for (int i = 0; i < kWide; ++i) __stcg(work.sum(slots.own(), at) + channel + i * stride, value[i]);
    if (channel == 0) __stcg(reinterpret_cast<float2*>(work.total(0, slots.own(), at)), make_float2(total.reference, total.sum));
  };
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) {
    Inbox<Traits>(shared.memory, tile).combine(tile, merged, [&](int column, int channel, float value, const Total& total) {
      const float one[] = {value};
      write(column, channel, 1, one, total);
    });
    return;
  }
#endif
  if (merged.any()) write(merged.column(), merged.channel(), merged.kStride, merged.value, merged.total);
}

// The states of all warps become the part's result, or the head's. Whether this CTA completed the head.
template <class Traits>
__device__ __forceinline__ bool finish_part(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work,
                                            const Head& head, const Slots& slots, int warp, int lane,
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
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

// Where a block is packed: in the rings' and the merge's place, or, where that is too small, behind all else.
template <class Traits>
struct Scratch {
  static constexpr int kBytes = pack_smem_bytes<typename Traits::Format>();
  static constexpr int kExtra = kBytes <= Traits::kLengths ? 0 : kBytes;
  static constexpr int kAt = kExtra ? Traits::kSharedBytes : 0;
};

// Packs the block that a tail has become; what is left over of the new tokens moves to the front of the residual.
template <class Traits>
__device__ void flush(const AttendArgs& args, const Shared<Traits>& shared, const Tail<Traits>& tail, int length) {
  using Format = typename Traits::Format;
  uint8_t* block = args.cache.block<Traits::kPaged>(tail.batch, tail.head, length / Format::kTokens, Format::kBlockBytes);
  __syncthreads();
  pack_block<Format, Traits::kThreads>([&](int token) { return tail.k_row(token); }, [&](int token) { return tail.v_row(token); }, block,
                                       shared.memory + Scratch<Traits>::kAt);
  tail.store(Format::kTokens, tail.count(), 0);
}

// Thread 0's number of CTAs that had read the lengths before this one. Called when all of its warps have, and when little else is on
// its way: an answer comes after what was asked for earlier.
template <class Traits>
__device__ __forceinline__ int count_reader(const Workspace<Traits>& work) {
  return threadIdx.x == 0 ? atomicAdd(work.lengths_read, 1) : 0;
}

// The last CTA to have read the lengths writes the new ones: nobody reads them any more. `readers`, of thread 0: how many had read
// them before.
template <class Traits>
__device__ __forceinline__ void advance_lengths(const AttendArgs& args, const Workspace<Traits>& work, int readers, int warp, int lane) {
  if (warp != 0 || __shfl_sync(~0u, readers, 0) != static_cast<int>(gridDim.x * gridDim.y) - 1) return;
  if (lane == 0) *work.lengths_read = 0;
  for (int i = lane; i < args.cache.batch; i += 32) args.cache.lengths[i] += args.q_len;
}

// For a CTA that is not needed.
template <class Traits, bool kAppend>
__device__ __forceinline__ void leave(const AttendArgs& args, const Workspace<Traits>& work, int warp, int lane) {
  ptx::copy_wait_all();
  if constexpr (!kAppend) return;
  __syncthreads();
  advance_lengths(args, work, count_reader(work), warp, lane);
}

}  // namespace kvgen
