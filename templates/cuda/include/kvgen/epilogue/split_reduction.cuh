// The last CTA to arrive reduces the splits of a head in device memory, in one level or in two. The order of summation does not depend on
// which CTA arrives last, so repeated calls agree bit for bit.
#pragma once
#include "kvgen/epilogue/output.cuh"
#include "kvgen/mainloop/traits.cuh"

namespace kvgen {

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

// Adds `count` partial results of kWide consecutive channels of a row; slot(i) is the slot of the i-th. kBatch loads are issued together,
// so that they share the latency of L2.
template <class Traits, int kWide, int kBatch, class Slot>
__device__ __forceinline__ void add_splits(const Workspace<Traits>& work, int level, int count, int row, int channel, Slot&& slot,
                                           PartialSum<kWide>& sum) {
  for (int base = 0; base < count; base += kBatch) {
    RowStats stats[kBatch];
    float values[kBatch][kWide];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = slot(min(base + i, count - 1));  // past the end the last one is loaded again, with weight 0
      const float2 t = __ldcg(reinterpret_cast<const float2*>(work.row_stats(level, at, row)));
      stats[i] = base + i < count ? RowStats{t.x, t.y} : RowStats{-INFINITY, 0.f};
      load_wide<kWide>(work.sum(at, row) + channel, values[i]);
    }
    sum.template add<kBatch>([&](int i) { return stats[i]; }, [&](int i, int j) { return base + i < count ? values[i][j] : 0.f; });
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
    if (Traits::kReduction == Reduction::two_level && !first_level(head, slots)) return false;
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = last(head, slots);
    __syncthreads();
    if (!flags[0]) return false;
    reduce(head, slots);
    return true;
  }
  // The two steps of `run`, for a CTA that reduces several heads. One thread calls `last`, after all threads have stored.
  __device__ bool last(const Head& head, const SplitSlots& slots) const {
    return arrive_last(work.counter(args, head), levels(slots).groups * Traits::kClusterSize);
  }
  __device__ __forceinline__ void reduce(const Head& head, const SplitSlots& slots) const {
    const auto [groups, width] = levels(slots);
    const auto slot = [&, width = width](int i) { return slots.at(i * width); };
    each_sum(head, width > 1 ? 1 : 0, groups, slot, [&](int row, int channel, const PartialSum<kWide>& sum, const auto& sink) {
      write_output<Traits>(args, head, row, channel, 1, sum.value, sum.stats, sink);
    });
  }

 private:
  // The last CTA sums `groups` results, each of which is the sum of `width` splits.
  struct Levels {
    int groups, width;
  };
  __device__ static Levels levels(const SplitSlots& slots) {
    int width = 1;
    if (Traits::kReduction == Reduction::two_level && slots.count > 16)
      for (width = 8; width * width < slots.count;) ++width;
    return {ceil_div(slots.count, width), width};
  }

  template <class Slot, class Use>
  __device__ __forceinline__ void each_sum(const Head& head, int level, int count, Slot&& slot, Use&& use) const {
    for (int at = static_cast<int>(threadIdx.x) % Traits::kReduceThreads * kWide; at < kElements; at += Traits::kReduceThreads * kWide) {
      const int row = at / Traits::kHeadDim, channel = at % Traits::kHeadDim;
      const auto sink = Traits::Sinks::template load<Traits>(args, head, row);
      PartialSum<kWide> sum;
      if (count <= 4)
        add_splits<Traits, kWide, 4>(work, level, count, row, channel, slot, sum);
      else
        add_splits<Traits, kWide, (kWide > 2 ? 8 : 16)>(work, level, count, row, channel, slot, sum);
      use(row, channel, sum, sink);
    }
  }
  // The first of two levels: the last CTA of a group of splits sums the group and continues; the other CTAs of the group exit.
  __device__ bool first_level(const Head& head, const SplitSlots& slots) const {
    const int width = levels(slots).width;
    if (width == 1) return true;
    const int group = slots.rank / width, members = min(width, slots.count - group * width);
    int* arrivals = work.counters + args.cache.batch * args.cache.kv_heads * Traits::kRuns +
                    (work.counter(args, head) - work.counters) * Workspace<Traits>::kGroupCounters + group;
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = arrive_last(arrivals, members);
    __syncthreads();
    if (!flags[0]) return false;
    const auto member = [&](int i) { return slots.at(group * width + i); };
    each_sum(head, 0, members, member, [&](int row, int channel, const PartialSum<kWide>& sum, const auto&) {
      for (int j = 0; j < kWide; ++j) __stcg(work.sum(member(0), row) + channel + j, sum.value[j]);
      if (channel == 0)
        __stcg(reinterpret_cast<float2*>(work.row_stats(1, member(0), row)), make_float2(sum.stats.row_max, sum.stats.row_sum));
    });
    return true;
  }
};

}  // namespace kvgen
