// Ends a head in a CTA: converts its warps' states to the head's output or to a partial result.
#pragma once
#include "kvgen/epilogue/merge.cuh"
#include "kvgen/epilogue/output.cuh"
#include "kvgen/mainloop/packed_loop.cuh"
#include "kvgen/mainloop/traits.cuh"

namespace kvgen {

// The last CTA to arrive reduces the splits of a head in device memory. The order of summation does not depend on which CTA that is, so
// repeated calls agree bit for bit.

template <int kWide>
__device__ __forceinline__ void load_wide(const float* from, float (&to)[kWide]) {
  if constexpr (kWide == 4) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (kWide == 2) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = __ldcg(from);
  }
}

// Adds the partial results of kWide consecutive channels of a row. kBatch loads are issued together, so that they share the latency of L2.
template <class Traits, int kWide, int kBatch>
__device__ __forceinline__ void add_splits(const Workspace<Traits>& work, const SplitSlots& slots, int row, int channel,
                                           PartialSum<kWide>& sum) {
  for (int base = 0; base < slots.count; base += kBatch) {
    RowStats stats[kBatch];
    float values[kBatch][kWide];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = slots.first + min(base + i, slots.count - 1);  // past the end the last one is loaded again, with weight 0
      const float2 t = __ldcg(reinterpret_cast<const float2*>(work.row_stats(at, row)));
      stats[i] = base + i < slots.count ? RowStats{t.x, t.y} : RowStats{-INFINITY, 0.f};
      load_wide<kWide>(work.sum(at, row) + channel, values[i]);
    }
    sum.template add<kBatch>([&](int i) { return stats[i]; }, [&](int i, int j) { return base + i < slots.count ? values[i][j] : 0.f; });
  }
}

// Whether this CTA is the last of `expected` to arrive. The last one resets the counter for the next launch.
__device__ __forceinline__ bool arrive_last(int* counter, int expected) {
  const bool last = ptx::arrive(counter) == expected - 1;
  if (last) *counter = 0;
  return last;
}

template <class Traits>
struct SplitReduction {
  static constexpr int kElements = Traits::kQRows * Traits::kHeadDim;
  static constexpr int kWide = kElements >= 4 * Traits::kReduceThreads ? 4 : kElements >= 2 * Traits::kReduceThreads ? 2 : 1;
  const AttendArgs& args;
  const Workspace<Traits>& work;
  int* flags;  // in shared memory

  // Returns whether this CTA arrived last and wrote the head's output. All its threads call it.
  __device__ bool run(const Head& head, const SplitSlots& slots) const {
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = last(head, slots);
    __syncthreads();
    if (!flags[0]) return false;
    reduce(head, slots);
    return true;
  }
  // The two steps of `run`, for a CTA that reduces several heads. One thread calls `last`, after all threads have stored.
  __device__ bool last(const Head& head, const SplitSlots& slots) const {
    return arrive_last(work.counter(args, head), slots.count * Traits::kClusterSize);
  }
  __device__ __forceinline__ void reduce(const Head& head, const SplitSlots& slots) const {
    for (int at = static_cast<int>(threadIdx.x) % Traits::kReduceThreads * kWide; at < kElements; at += Traits::kReduceThreads * kWide) {
      const int row = at / Traits::kHeadDim, channel = at % Traits::kHeadDim;
      const auto sink = Traits::Sinks::template load<Traits>(args, head, row);
      PartialSum<kWide> sum;
      if (slots.count <= 4)
        add_splits<Traits, kWide, 4>(work, slots, row, channel, sum);
      else
        add_splits<Traits, kWide, (kWide > 2 ? 8 : 16)>(work, slots, row, channel, sum);
      write_output<Traits>(args, head, row, channel, 1, sum.value, sum.stats, sink);
    }
  }
};

// Merges the published states of a tile of query rows, and those of the CTAs of a cluster, and stores the result: as output if the head has
// one split, otherwise as a partial result.
template <class Traits>
__device__ __forceinline__ void store_result(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work,
                                             const Head& head, const SplitSlots& slots, int q_tile) {
  using Sinks = typename Traits::Sinks;
  CtaResult<Traits> result;
  typename Sinks::Logit sink = Sinks::template load<Traits>(args, head, q_tile * 8 + result.row());
  merge_warps<Traits>(shared.merge, shared.warp_stats, result);
  if constexpr (kStatic<typename Traits::Value>)
    result.scale(StaticScales::of<typename Traits::Format>(args.scales, args.cache.kv_heads, head.head).value);
  result.rotate_back();
  const auto store = [&](int tile_row, int channel, int stride, const auto& sum) {
    const int row = q_tile * 8 + tile_row;
    if (row >= Traits::kQRows) return;
    if (slots.count == 1) return write_output<Traits>(args, head, row, channel, stride, sum.value, sum.stats, sink);
    constexpr int kWide = sizeof sum.value / sizeof *sum.value;
#pragma unroll
    for (int i = 0; i < kWide; ++i) __stcg(work.sum(slots.own(), row) + channel + i * stride, sum.value[i]);
    if (channel == 0)
      __stcg(reinterpret_cast<float2*>(work.row_stats(slots.own(), row)), make_float2(sum.stats.row_max, sum.stats.row_sum));
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
