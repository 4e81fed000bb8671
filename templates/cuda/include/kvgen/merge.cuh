// From warps' states to a head's output: merged in the CTA, then over CTAs by the last to arrive (one level or two) or over
// the shared memory of a cluster. Partial results are always added in the same order, whoever adds them.
#pragma once
#include "kvgen/args.cuh"
#include "kvgen/part.cuh"
#include "kvgen/softmax.cuh"

namespace kvgen {

// Sums of a column in some reference: what CTAs exchange.
struct Total {
  float reference = -1e30f;
  float sum = 0.f;
};

// The slots where the partial results of a head's parts lie, one to a part, and which of them is this CTA's.
struct Slots {
  int first, count, rank;

  __device__ int at(int i) const { return first + i; }
  __device__ int own() const { return first + rank; }
};

// Device memory that outlives a launch: zeroed counters, then partial results.
template <class Traits>
struct Workspace {
  static constexpr int kGroupCounters = 32;  // of the first level, per head
  static constexpr int kLevels = 2;          // a column's totals outlive their group's, which other threads may still read
  int* lengths_read;
  int* counters;
  Total* totals;
  float* sums;

  __host__ __device__ static int64_t bytes(int heads, int slots) {
    const int64_t columns = static_cast<int64_t>(slots) * Traits::kColumns;
    return counter_bytes(heads) + kLevels * columns * sizeof(Total) + columns * Traits::kHeadDim * 4;
  }
  __host__ __device__ static int64_t counter_bytes(int heads) { return (16LL + heads * 4LL * (1 + kGroupCounters) + 255) / 256 * 256; }

  __device__ Workspace(void* memory, int heads, int slots) {
    lengths_read = static_cast<int*>(memory);
    counters = lengths_read + 4;
    totals = reinterpret_cast<Total*>(static_cast<uint8_t*>(memory) + counter_bytes(heads));
    sums = reinterpret_cast<float*>(totals + static_cast<int64_t>(kLevels) * slots * Traits::kColumns);
  }
  __device__ Total* total(int level, int slot, int column) const {
    return totals + (static_cast<int64_t>(slot) * kLevels + level) * Traits::kColumns + column;
  }
  __device__ float* sum(int slot, int column) const { return sums + (static_cast<int64_t>(slot) * Traits::kColumns + column) * Traits::kHeadDim; }
};

// Writes a finished column element; the first channel's owner writes the log-sum-exp.
template <class Traits>
__device__ __forceinline__ void write_output(const AttendArgs& args, const Head& head, int column, int channel, float value, const Total& total) {
  using Element = typename Traits::Format::Element;
  const int query = column / Traits::kGroup, q_head = head.head * Traits::kGroup + column % Traits::kGroup;
  if (query >= args.q_len) return;
  args.out.row<Element>(head.batch, query, q_head)[channel] = static_cast<Element>(total.sum > 0.f ? value / total.sum : 0.f);
  if (args.lse && channel == 0) {
    const int64_t at = (static_cast<int64_t>(head.batch) * args.cache.kv_heads * Traits::kGroup + q_head) * args.q_len + query;
    args.lse[at] = total.sum > 0.f ? (total.reference + log2f(total.sum)) * 0.6931471805599453f : -INFINITY;
  }
}

// A column tile of all warps, merged: element i * kThreads + thread of [column][channel].
template <class Traits>
struct Merged {
  static constexpr int kElements = Traits::kTileColumns * Traits::kHeadDim;
  static constexpr int kPerThread = ceil_div(kElements, Traits::kThreads);
  float value[kPerThread];
  Total total[kPerThread];

  template <class Use>
  __device__ __forceinline__ static void each(Use&& use) {  // use(i, column, channel)
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = i * Traits::kThreads + threadIdx.x;
      if (kElements % Traits::kThreads == 0 || at < kElements) use(i, at / Traits::kHeadDim, at % Traits::kHeadDim);
    }
  }
};

// Publishes a warp's state of a column tile.
template <class Traits>
__device__ __forceinline__ void publish_state(State<Traits>& state, float* buffer, Total* totals, int warp, int lane) {
#pragma unroll
  for (int lanes = Traits::kHalves ? 2 : 4; lanes < 32; lanes *= 2)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.sum[c] += __shfl_xor_sync(~0u, state.sum[c], lanes);
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) state.affine[q][c] += __shfl_xor_sync(~0u, state.affine[q][c], lanes);
    }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = 2 * (lane % 4) + c, g = lane / 4;
    if (column >= Traits::kTileColumns) continue;
    if (g == 0) totals[warp * 8 + column] = Total{state.reference[c], state.sum[c]};
    float* to = buffer + (warp * Traits::kTileColumns + column) * Traits::kMergeStride;
#pragma unroll
    for (int u = 0; u < Traits::kRowTiles; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[row_channel(16 * u) + 8 * (g / 2) + g % 2 + 2 * half] = state.out[u][2 * half + c] + state.affine[u * Traits::kValueGroups / Traits::kRowTiles][c];
  }
}

template <class Traits>
__device__ __forceinline__ void merge_warps(const float* buffer, const Total* totals, Merged<Traits>& merged) {
  Merged<Traits>::each([&](int i, int column, int channel) {
    Total all;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) all.reference = fmaxf(all.reference, totals[w * 8 + column].reference);
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      const Total part = totals[w * 8 + column];
      const float factor = ptx::exp2(part.reference - all.reference);
      all.sum += factor * part.sum;
      value += factor * buffer[(w * Traits::kTileColumns + column) * Traits::kMergeStride + channel];
    }
    merged.value[i] = value, merged.total[i] = all;
  });
}

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

// Adds up `count` partial results of kWide neighbouring channels of a column; slot(i) names the i-th. Loads come in batches,
// so that one trip to the L2 serves many.
template <class Traits, int kWide, int kBatch, class Slot>
__device__ __forceinline__ void gather_batches(const Workspace<Traits>& work, int level, int count, int column, int channel, Slot&& slot, float (&value)[kWide], Total& all) {
  all = Total{};
#pragma unroll
  for (int j = 0; j < kWide; ++j) value[j] = 0.f;
  for (int base = 0; base < count; base += kBatch) {
    Total totals[kBatch];
    float values[kBatch][kWide];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = slot(min(base + i, count - 1));  // repeated rather than skipped, and weighed with nothing
      const float2 t = __ldcg(reinterpret_cast<const float2*>(work.total(level, at, column)));
      totals[i] = base + i < count ? Total{t.x, t.y} : Total{};
      load_wide<kWide>(work.sum(at, column) + channel, values[i]);
    }
    float reference = all.reference;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) reference = fmaxf(reference, totals[i].reference);
    const float kept = ptx::exp2(all.reference - reference);
    all.sum *= kept, all.reference = reference;
#pragma unroll
    for (int j = 0; j < kWide; ++j) value[j] *= kept;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float factor = base + i < count ? ptx::exp2(totals[i].reference - reference) : 0.f;
      all.sum += factor * totals[i].sum;
#pragma unroll
      for (int j = 0; j < kWide; ++j) value[j] += factor * values[i][j];
    }
  }
}

template <class Traits, int kWide, class Slot>
__device__ __forceinline__ void gather(const Workspace<Traits>& work, int level, int count, int column, int channel, Slot&& slot, float (&value)[kWide], Total& all) {
  if (count <= 4)
    gather_batches<Traits, kWide, 4>(work, level, count, column, channel, slot, value, all);
  else
    gather_batches<Traits, kWide, (kWide > 2 ? 8 : 16)>(work, level, count, column, channel, slot, value, all);
}

// Results that CTAs bring for one of them to add up, by a counter that is left at zero: tickets in its lower half, results that are there in its upper one.
// One thread of each asks.
struct Arrivals {
  static constexpr int kThere = 1 << 16;
  int* counter;
  int expected;

  // Taken while the result is in the making: the trip to the counter costs nobody time.
  __device__ __forceinline__ int take_ticket() const { return atomicAdd(counter, 1) % kThere; }
  // The result is there. Whether this CTA has the last ticket; then all others' are there, too: who has one is about to bring its own.
  __device__ __forceinline__ bool complete(int ticket) const {
    if (ticket < expected - 1) {
      ptx::add_release(counter, kThere);
      return false;
    }
    ptx::wait_for(counter, (expected - 1) * kThere + expected);
    *counter = 0;
    return true;
  }
};

// The way of heads' partial results to the output, when they are in their slots: the last CTA of a head to arrive adds them up.
template <class Traits>
struct Combination {
  static constexpr int kElements = Traits::kColumns * Traits::kHeadDim;
  static constexpr int kWide = kElements >= 4 * Traits::kAdders ? 4 : kElements >= 2 * Traits::kAdders ? 2 : 1;
  const AttendArgs& args;
  const Workspace<Traits>& work;
  int* flags;

  // Whether this CTA completed the head. Called by all its threads; `ticket`: thread 0's.
  __device__ bool run(const Head& head, const Slots& slots, int ticket) const {
    if (!all_complete(arrivals(head, slots), ticket)) return false;
    if (const int width = levels(slots).width; Traits::kCombine == Combine::two_level && width > 1) {
      add_up_group(slots, width);
      const Arrivals groups{counter(head), levels(slots).groups};
      if (!all_complete(groups, threadIdx.x == 0 ? groups.take_ticket() : 0)) return false;
    }
    add_up(head, slots);
    return true;
  }
  // Those that a CTA is counted among.
  __device__ __forceinline__ Arrivals arrivals(const Head& head, const Slots& slots) const {
    const auto [groups, width] = levels(slots);
    if (Traits::kCombine != Combine::two_level || width == 1) return {counter(head), groups * Traits::kTogether};
    const int group = slots.rank / width;
    int* of_groups = work.counters + args.cache.batch * args.cache.kv_heads + (counter(head) - work.counters) * Workspace<Traits>::kGroupCounters;
    return {of_groups + group, min(width, slots.count - group * width)};
  }
  __device__ __forceinline__ void add_up(const Head& head, const Slots& slots) const {
    const auto [groups, width] = levels(slots);
    const auto slot = [&, width = width](int i) { return slots.at(i * width); };
    each_sum(width > 1 ? 1 : 0, groups, slot, [&](int column, int channel, const float(&value)[kWide], const Total& total) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) write_output<Traits>(args, head, column, channel + j, value[j], total);
    });
  }

 private:
  // The last to arrive adds up `groups` results, each of `width` parts.
  struct Levels {
    int groups, width;
  };
  __device__ static Levels levels(const Slots& slots) {
    int width = 1;
    if (Traits::kCombine == Combine::two_level && slots.count > 16)
      for (width = 8; width * width < slots.count;) ++width;
    return {ceil_div(slots.count, width), width};
  }
  __device__ int* counter(const Head& head) const { return work.counters + head.batch * args.cache.kv_heads + head.head; }

  template <class Slot, class Use>
  __device__ __forceinline__ void each_sum(int level, int count, Slot&& slot, Use&& use) const {
    for (int at = static_cast<int>(threadIdx.x) % Traits::kAdders * kWide; at < kElements; at += Traits::kAdders * kWide) {
      const int column = at / Traits::kHeadDim, channel = at % Traits::kHeadDim;
      Total total;
      float value[kWide];
      gather<Traits, kWide>(work, level, count, column, channel, slot, value, total);
      use(column, channel, value, total);
    }
  }
  // The first level: the results of a few neighbours become one, in the place of the first.
  __device__ void add_up_group(const Slots& slots, int width) const {
    const int first = slots.rank / width * width;
    const auto member = [&](int i) { return slots.at(first + i); };
    each_sum(0, min(width, slots.count - first), member, [&](int column, int channel, const float(&value)[kWide], const Total& total) {
      for (int j = 0; j < kWide; ++j) __stcg(work.sum(member(0), column) + channel + j, value[j]);
      if (channel == 0) __stcg(reinterpret_cast<float2*>(work.total(1, member(0), column)), make_float2(total.reference, total.sum));
    });
  }
  // Asked by all threads, which have all stored what they have of the result.
  __device__ __forceinline__ bool all_complete(const Arrivals& all, int ticket) const {
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = all.complete(ticket);
    __syncthreads();
    return flags[0];
  }
};

#if KVGEN_SM90
// Where the CTAs of a cluster, which hold parts of one head, send each other what they have of a column tile: each adds up a share of
// its elements. What arrives is counted by a barrier, so that nobody waits for more than that.
template <class Traits>
struct Inbox {
  static constexpr int kCluster = Traits::kCluster, kElements = Merged<Traits>::kElements, kShare = kElements / kCluster;
  static_assert(kElements % kCluster == 0);
  float* values;  // [from][element of the share]
  Total* totals;  // [from][column]
  uint32_t barrier;

  __device__ Inbox(uint8_t* memory, int tile) {
    values = reinterpret_cast<float*>(memory + Traits::kInbox + tile * (Traits::kInboxBytes / Traits::kColumnTiles));
    totals = reinterpret_cast<Total*>(values + kElements);
    barrier = ptx::shared_address(totals + kCluster * 8);
  }
  // All threads say that others may write here; `combine` waits until all others have said so.
  __device__ static void open(uint8_t* memory) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int tile = 0; tile < Traits::kColumnTiles; ++tile) ptx::barrier_init(Inbox(memory, tile).barrier, 1);
      ptx::barrier_init_fence();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  // How much will come. Some of it may be there: a barrier that was not told does not complete.
  __device__ static void expect(uint8_t* memory) {
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int tile = 0; tile < Traits::kColumnTiles; ++tile) ptx::barrier_expect(Inbox(memory, tile).barrier, kElements * 4 + kCluster * Traits::kTileColumns * 8);
  }
  // Gives the share's sums to `use(column, channel, value, total)`.
  template <class Use>
  __device__ __forceinline__ void combine(int tile, const Merged<Traits>& merged, Use&& use) const {
    const int rank = blockIdx.x % kCluster;
    if (tile == 0) ptx::cluster_wait();
    Merged<Traits>::each([&](int i, int column, int channel) {
      const int at = column * Traits::kHeadDim + channel;
      send(values + rank * kShare + at % kShare, at / kShare, merged.value[i]);
      if (channel < kCluster) send(totals + rank * 8 + column, channel, make_float2(merged.total[i].reference, merged.total[i].sum));
    });
    ptx::barrier_wait(barrier, 0);
    for (int at = threadIdx.x; at < kShare; at += Traits::kThreads) {
      const int column = (rank * kShare + at) / Traits::kHeadDim, channel = (rank * kShare + at) % Traits::kHeadDim;
      Total all;
      float value = 0.f;
#pragma unroll
      for (int i = 0; i < kCluster; ++i) all.reference = fmaxf(all.reference, totals[i * 8 + column].reference);
#pragma unroll
      for (int i = 0; i < kCluster; ++i) {
        const float factor = ptx::exp2(totals[i * 8 + column].reference - all.reference);
        value += factor * values[i * kShare + at], all.sum += factor * totals[i * 8 + column].sum;
      }
      use(column, channel, value, all);
    }
  }

 private:
  template <class Value>
  __device__ __forceinline__ void send(void* place, int to, Value value) const {
    ptx::send_cluster(ptx::cluster_address(ptx::shared_address(place), to), value, ptx::cluster_address(barrier, to));
  }
};
#endif

}  // namespace kvgen
