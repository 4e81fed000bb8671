// Partial results, which CTAs store in device memory for the CTA that reduces the splits of a head.
#pragma once
#include "kvgen/host/args.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

// The row_max of a row's scores in log2 units, and the row_sum of 2^(score - row_max). Their log-sum-exp is row_max + log2(row_sum).
struct RowStats {
  float row_max = -1e30f;
  float row_sum = 0.f;
};

// The partial results of a head have the slots [first, first + count); this CTA has split `rank`.
struct SplitSlots {
  int first, count, rank;

  __device__ int own() const { return first + rank; }
};

// A sum of partial results, relative to row_max, for kWide elements of a row. Partial results of warps, of splits and of CTAs in a cluster
// are all rescaled and added here.
template <int kWide>
struct PartialSum {
  RowStats stats;
  float value[kWide] = {};

  // Adds kCount partial results in a fixed order. stats_of(i) and value_of(i, j) return the i-th.
  template <int kCount, class StatsOf, class ValueOf>
  __device__ __forceinline__ void add(StatsOf&& stats_of, ValueOf&& value_of) {
    float row_max = stats.row_max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) row_max = fmaxf(row_max, stats_of(i).row_max);
    const float rescale = ptx::exp2(stats.row_max - row_max);
    stats = {row_max, stats.row_sum * rescale};
#pragma unroll
    for (int j = 0; j < kWide; ++j) value[j] *= rescale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const RowStats other = stats_of(i);
      const float factor = ptx::exp2(other.row_max - row_max);
      stats.row_sum += factor * other.row_sum;
#pragma unroll
      for (int j = 0; j < kWide; ++j) value[j] += factor * value_of(i, j);
    }
  }
};

// The workspace: counters, which every launch leaves at zero, then partial results, which begin behind the counters of the largest batch:
// those of one batch never lie where another's counters do. `slots` counts the partial results of all runs of packed-GQA rows.
template <class Traits>
struct Workspace {
  int* lengths_read;
  int* counters;  // of the arrivals of every head's splits, by run
  int* runs_read;
  RowStats* stats;
  float* sums;  // 16 bytes of which are read at once: args.slots is even

  __host__ __device__ static int64_t bytes(int kv_heads, int64_t slots) {
    const int64_t rows = slots * Traits::kQRows;
    return counter_bytes(kv_heads) + rows * sizeof(RowStats) + rows * Traits::kHeadDim * 4;
  }
  static constexpr int kHeadCounters = Traits::kRuns + (Traits::kRuns > 1);  // one for each run, and one that counts the runs
  __host__ __device__ static int64_t counter_bytes(int kv_heads) { return 256 + 4LL * kHeadCounters * kMaxPlanBatch * kv_heads; }

  __device__ Workspace(const AttendArgs& args) {
    const int heads = args.cache.batch * args.cache.kv_heads, runs = Traits::kRuns == 1 ? 1 : args.runs;
    lengths_read = static_cast<int*>(args.workspace);
    counters = lengths_read + 4;
    runs_read = counters + heads * Traits::kRuns;
    stats = reinterpret_cast<RowStats*>(static_cast<uint8_t*>(args.workspace) + counter_bytes(args.cache.kv_heads));
    sums = reinterpret_cast<float*>(stats + static_cast<int64_t>(args.slots) * runs * Traits::kQRows);
  }
  __device__ RowStats* row_stats(int slot, int row) const { return stats + static_cast<int64_t>(slot) * Traits::kQRows + row; }
  __device__ float* sum(int slot, int row) const { return sums + (static_cast<int64_t>(slot) * Traits::kQRows + row) * Traits::kHeadDim; }
  __device__ int* counter(const AttendArgs& args, const Head& head) const {
    return counters + (head.sequence * args.cache.kv_heads + head.head) * Traits::kRuns + head.run;
  }
  __device__ int* run_counter(const AttendArgs& args, const Head& head) const {
    return runs_read + head.sequence * args.cache.kv_heads + head.head;
  }
};

}  // namespace kvgen
