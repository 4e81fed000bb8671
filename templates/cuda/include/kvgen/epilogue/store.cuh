// Ends a head in a CTA: converts its warps' states to the head's output or to a partial result.
#pragma once
#include "kvgen/epilogue/cluster_reduction.cuh"
#include "kvgen/epilogue/merge_warps.cuh"
#include "kvgen/epilogue/split_reduction.cuh"
#include "kvgen/mainloop/packed_loop.cuh"

namespace kvgen {

// Merges the published states of a tile of query rows, and those of the CTAs of a cluster, and stores the result: as output if the head has
// one split, otherwise as a partial result.
template <class Traits>
__device__ __forceinline__ void store_result(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work,
                                             const Head& head, const SplitSlots& slots, int q_tile) {
  using Sinks = typename Traits::Sinks;
  CtaResult<Traits> result;
  typename Sinks::Logit sink = Sinks::template load<Traits>(args, head, q_tile * 8 + result.row());
  merge_warps<Traits>(shared.merge, shared.warp_stats, result);
  const auto store = [&](int tile_row, int channel, int stride, const auto& sum) {
    const int row = q_tile * 8 + tile_row;
    if (row >= Traits::kQRows) return;
    if (slots.count == 1) return write_output<Traits>(args, head, row, channel, stride, sum.value, sum.stats, sink);
    constexpr int kWide = sizeof sum.value / sizeof *sum.value;
#pragma unroll
    for (int i = 0; i < kWide; ++i) __stcg(work.sum(slots.own(), row) + channel + i * stride, sum.value[i]);
    if (channel == 0)
      __stcg(reinterpret_cast<float2*>(work.row_stats(0, slots.own(), row)), make_float2(sum.stats.row_max, sum.stats.row_sum));
  };
#if KVGEN_SM90
  if constexpr (Traits::kReduction == Reduction::cluster) {
    ClusterReduction<Traits>(shared.memory, q_tile).run(q_tile, result, [&](int row, int channel, const PartialSum<1>& sum) {
      sink = Sinks::template load<Traits>(args, head, q_tile * 8 + row);
      store(row, channel, 1, sum);
    });
    return;
  }
#endif
  if (result.any()) store(result.row(), result.channel(), result.kStride, result.sum);
}

// Publishes and stores all tiles of query rows. Returns whether this CTA wrote the head's output.
template <class Traits>
__device__ __forceinline__ bool finish_head(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work,
                                            const Head& head, const SplitSlots& slots, int warp, int lane,
                                            State<Traits> (&state)[Traits::kQTiles]) {
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
    unmix_values<Traits>(state[tile]);
    publish_state<Traits>(state[tile], shared.merge, shared.warp_stats, warp, lane);
    __syncthreads();
    store_result<Traits>(args, shared, work, head, slots, tile);
    if (tile + 1 < Traits::kQTiles) __syncthreads();
  }
  if (slots.count == 1) return blockIdx.x % Traits::kClusterSize == 0;
  return SplitReduction<Traits>{args, work, shared.flags}.run(head, slots);
}

}  // namespace kvgen
