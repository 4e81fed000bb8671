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
  __device__ float* sum(int slot, int column) const {
    return sums + (static_cast<int64_t>(slot) * Traits::kColumns + column) * Traits::kHeadDim;
  }
};

// NaN where the sum is, 0 and -inf where nothing was seen. Writes finished elements of a column, every `stride`-th from `channel` on; the
// first channel's owner writes the log-sum-exp.
template <class Traits, int kWide>
__device__ __forceinline__ void write_output(const AttendArgs& args, const Head& head, int column, int channel, int stride,
                                             const float (&value)[kWide], const Total& total) {
  using Element = typename Traits::Format::Element;
  const int query = column / Traits::kGroup, q_head = head.head * Traits::kGroup + column % Traits::kGroup;
  if (query >= args.q_len) return;
  Element* to = args.out.row<Element>(head.batch, query, q_head) + channel;
  const float inverse = total.sum == 0.f ? 0.f : __fdividef(1.f, total.sum);  // a division in full is much code to run once
#pragma unroll
  for (int i = 0; i < kWide; ++i) to[i * stride] = static_cast<Element>(value[i] * inverse);
  if (args.lse && channel == 0) {
    const int64_t at = (static_cast<int64_t>(head.batch) * args.cache.kv_heads * Traits::kGroup + q_head) * args.q_len + query;
    args.lse[at] = total.sum == 0.f ? -INFINITY : (total.reference + log2f(total.sum)) * 0.6931471805599453f;
  }
}

// A column tile of all warps, merged: a thread has some channels of one column, so that it weighs warps but once. Every kStride-th of them.
template <class Traits>
struct Merged {
  static constexpr int kElements = Traits::kTileColumns * Traits::kHeadDim;
  static constexpr int per_thread(int least) { return Traits::kHeadDim % least ? per_thread(least + 1) : least; }
  static constexpr int kPerThread = per_thread(ceil_div(kElements, Traits::kThreads)), kStride = Traits::kHeadDim / kPerThread;
  float value[kPerThread];
  Total total;

  __device__ __forceinline__ static int column() { return static_cast<int>(threadIdx.x) / kStride; }
  __device__ __forceinline__ static int channel() { return static_cast<int>(threadIdx.x) % kStride; }
  // Whether there is anything for the thread to do.
  __device__ __forceinline__ static bool any() { return column() < Traits::kTileColumns; }
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
        to[row_channel(16 * u) + 8 * (g / 2) + g % 2 + 2 * half] =
            state.out[u][2 * half + c] + state.affine[u * Traits::kValueGroups / Traits::kRowTiles][c];
  }
}

template <class Traits>
__device__ __forceinline__ void merge_warps(const float* buffer, const Total* totals, Merged<Traits>& merged) {
  if (!merged.any()) return;
  const int column = merged.column();
  const float* from = buffer + column * Traits::kMergeStride + merged.channel();
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) merged.total.reference = fmaxf(merged.total.reference, totals[w * 8 + column].reference);
#pragma unroll
  for (float& value : merged.value) value = 0.f;
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    const Total part = totals[w * 8 + column];
    const float factor = ptx::exp2(part.reference - merged.total.reference);
    merged.total.sum += factor * part.sum;
#pragma unroll
    for (int i = 0; i < merged.kPerThread; ++i)
      merged.value[i] += factor * from[w * Traits::kTileColumns * Traits::kMergeStride + i * merged.kStride];
  }
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
__device__ __forceinline__ void gather_batches(const Workspace<Traits>& work, int level, int count, int column, int channel, Slot&& slot,
                                               float (&value)[kWide], Total& all) {
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
__device__ __forceinline__ void gather(const Workspace<Traits>& work, int level, int count, int column, int channel, Slot&& slot,
                                       float (&value)[kWide], Total& all) {
  if (count <= 4)
    gather_batches<Traits, kWide, 4>(work, level, count, column, channel, slot, value, all);
  else
    gather_batches<Traits, kWide, (kWide > 2 ? 8 : 16)>(work, level, count, column, channel, slot, value, all);
}

// Whether this CTA is the last of `expected` to arrive. The counter is left at zero.
__device__ __forceinline__ bool arrive_last(int* counter, int expected) {
  const bool last = ptx::arrive(counter) == expected - 1;
  if (last) *counter = 0;
  return last;
}

// The way of heads' partial results to the output, when they are in their slots: the last CTA of a head to arrive adds them up.
template <class Traits>
struct Combination {
  static constexpr int kElements = Traits::kColumns * Traits::kHeadDim;
  static constexpr int kWide = kElements >= 4 * Traits::kAdders ? 4 : kElements >= 2 * Traits::kAdders ? 2 : 1;
  const AttendArgs& args;
  const Workspace<Traits>& work;
  int* flags;

  // Whether this CTA completed the head. Called by all its threads.
  __device__ bool run(const Head& head, const Slots& slots) const {
    if (Traits::kCombine == Combine::two_level && !first_level(head, slots)) return false;
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = last(head, slots);
    __syncthreads();
    if (!flags[0]) return false;
    add_up(head, slots);
    return true;
  }
  // Its two steps, for a CTA that has several heads. Whether it is the last: one thread asks, after all have stored.
  __device__ bool last(const Head& head, const Slots& slots) const {
    return arrive_last(counter(head), levels(slots).groups * Traits::kTogether);
  }
  __device__ __forceinline__ void add_up(const Head& head, const Slots& slots) const {
    const auto [groups, width] = levels(slots);
    const auto slot = [&, width = width](int i) { return slots.at(i * width); };
    each_sum(width > 1 ? 1 : 0, groups, slot, [&](int column, int channel, const float(&value)[kWide], const Total& total) {
      write_output<Traits>(args, head, column, channel, 1, value, total);
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
  // The first of two: the last of a few parts adds these up, the others are done.
  __device__ bool first_level(const Head& head, const Slots& slots) const {
    const int width = levels(slots).width;
    if (width == 1) return true;
    const int group = slots.rank / width, members = min(width, slots.count - group * width);
    int* arrivals = work.counters + args.cache.batch * args.cache.kv_heads +
                    (counter(head) - work.counters) * Workspace<Traits>::kGroupCounters + group;
    __syncthreads();
    if (threadIdx.x == 0) flags[0] = arrive_last(arrivals, members);
    __syncthreads();
    if (!flags[0]) return false;
    const auto member = [&](int i) { return slots.at(group * width + i); };
    each_sum(0, members, member, [&](int column, int channel, const float(&value)[kWide], const Total& total) {
      for (int j = 0; j < kWide; ++j) __stcg(work.sum(member(0), column) + channel + j, value[j]);
      if (channel == 0) __stcg(reinterpret_cast<float2*>(work.total(1, member(0), column)), make_float2(total.reference, total.sum));
    });
    return true;
  }
};

#if KVGEN_SM90
// Where the CTAs of a cluster, which hold parts of one head, send each other what they have of a column tile: each adds up a share of
// its elements. What arrives is counted by a barrier, so that nobody waits for more than that.
template <class Traits>
struct Inbox {
  static constexpr int kCluster = Traits::kCluster, kElements = Merged<Traits>::kElements, kShare = kElements / kCluster;
  // A thread for each CTA to send totals to.
  static_assert(kElements % kCluster == 0 && Merged<Traits>::kStride >= kCluster);
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
    for (int tile = 0; tile < Traits::kColumnTiles; ++tile)
      ptx::barrier_expect(Inbox(memory, tile).barrier, kElements * 4 + kCluster * Traits::kTileColumns * 8);
  }
  // Gives the share's sums to `use(column, channel, value, total)`.
  template <class Use>
  __device__ __forceinline__ void combine(int tile, const Merged<Traits>& merged, Use&& use) const {
    const int rank = blockIdx.x % kCluster;
    if (tile == 0) ptx::cluster_wait();
    if (const int column = merged.column(), channel = merged.channel(); merged.any()) {
#pragma unroll
      for (int i = 0; i < merged.kPerThread; ++i) {
        const int at = column * Traits::kHeadDim + channel + i * merged.kStride;
        send(values + rank * kShare + at % kShare, at / kShare, merged.value[i]);
      }
      if (channel < kCluster) send(totals + rank * 8 + column, channel, make_float2(merged.total.reference, merged.total.sum));
    }
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
