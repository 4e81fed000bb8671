// Computes the plan of a step from the lengths on the device (kvgen/schedule/plan.hpp describes the plan), and changes lengths.
#pragma once
#include "kvgen/host/args.cuh"
#include "kvgen/ptx.cuh"
#include "kvgen/schedule/plan.hpp"

namespace kvgen {

constexpr int kMaxPlanThreads = 1024;

struct PlanArgs {
  PlanShape shape;
  const int* lengths = nullptr;
  int* plan = nullptr;
  int* overflow = nullptr;  // host memory; set to 1 if a sequence has no room
  int limit = 0;            // maximum length of a sequence
  bool skip_empty = false;
};

// Sum over the lanes up to and including this one.
__device__ __forceinline__ int inclusive_sum(int mine, int lane) {
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(~0u, mine, by);
    if (lane >= by) mine += other;
  }
  return mine;
}

// Sums over the threads of a CTA of two numbers that each thread gives: those of the threads before this one (`before`), and of all
// (`total`). The constructor writes to `warps`, so a __syncthreads() must lie between two BlockSums.
struct BlockSums {
  int before[2], total[2];

  __device__ BlockSums(int first, int second, int (&warps)[2][32]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int mine[2] = {first, second};
    int upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      upto[i] = inclusive_sum(mine[i], lane);
      if (lane == 31) warps[i][warp] = upto[i];
    }
    __syncthreads();
    // Every warp adds up the sums of all warps, which takes less time than a second barrier behind one warp that does.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int other = lane < static_cast<int>(blockDim.x) / 32 ? warps[i][lane] : 0;
      before[i] = upto[i] - mine[i] + __reduce_add_sync(~0u, lane < warp ? other : 0), total[i] = __reduce_add_sync(~0u, other);
    }
  }
};

// The load of each head of a sequence (row.hpp), the position of the first head in the row, and its number. `length` is negative for
// sequences that do not attend.
struct PlannedSequence {
  int length;
  HeadLoad load;
  int at, number;
};

struct PlanShared {
  int warps[2][32];
  int ranges[32][OwnLengths::kMost];
  PlannedSequence sequences[kMaxPlanBatch];
};

// The number of heads that attend, and the sum of their loads.
struct PlanTotals {
  int heads = 0, loads = 0;
};

// Reads the lengths and computes the positions of all heads in a row with shared ranges; every CTA does so for itself. CTA 0 also writes
// the plan's header, lists empty sequences and reports overflows.
__device__ inline PlanTotals read_sequences(const PlanArgs& args, PlanShared& shared) {
  const PlanShape& shape = args.shape;
  const int threads = static_cast<int>(blockDim.x);
  const bool writes = blockIdx.x == 0;
  PlanTotals totals;
  int empty = 0;
  for (int base = 0; base < shape.batch; base += threads) {
    const int b = base + static_cast<int>(threadIdx.x);
    const int length = b < shape.batch ? args.lengths[b] : 0;
    const SequenceStep step = b < shape.batch ? step_of(length, shape.fresh, args.limit, args.skip_empty) : SequenceStep::overflows;
    const bool works = step == SequenceStep::attends, is_empty = step == SequenceStep::empty;
    const HeadLoad load = works ? shape.load(length) : HeadLoad{};
    const BlockSums sums(shape.heads * load.all(), works + (is_empty << 16), shared.warps);
    if (b < shape.batch) {
      const int number = totals.heads + (sums.before[1] & 0xffff) * shape.heads;
      shared.sequences[b] = {works ? length : -1, load, totals.loads + sums.before[0] + number * shape.head_cost, number};
      if (writes && is_empty) args.plan[shape.empty_at() + empty + (sums.before[1] >> 16)] = b;
      if (writes && step == SequenceStep::overflows && args.overflow) *args.overflow = 1;
    }
    totals.loads += sums.total[0], totals.heads += (sums.total[1] & 0xffff) * shape.heads, empty += sums.total[1] >> 16;
    __syncthreads();
  }
  if (writes && threadIdx.x == 0) shape.begin(args.plan, empty, totals.heads);
  return totals;
}

// Chooses between shared ranges and own ones as the host's make_plan does: the shortest own length for which the workers suffice. Lane i
// of every warp counts the ranges that the i-th length needs, for some of the sequences.
__device__ inline Row choose_row(const PlanShape& shape, const PlanTotals& totals, PlanShared& shared) {
  const Row shared_row = shape.shared_row(totals.heads, totals.loads);
  const OwnLengths own = shape.own_lengths(totals.heads, shared_row);
  if (own.count == 0) return shared_row;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x) / 32;
  const Row mine = shape.own_row(own[lane < own.count ? lane : 0], 0);
  int ranges = 0;
  for (int b = warp; b < shape.batch; b += warps)
    if (shared.sequences[b].length >= 0) ranges += shape.heads * mine.own_ranges(shared.sequences[b].load);
  shared.ranges[warp][lane] = ranges;
  __syncthreads();
  ranges = 0;
  for (int i = 0; i < warps; ++i) ranges += shared.ranges[i][lane];
  const int shortest = __reduce_max_sync(~0u, lane < own.count && ranges <= shape.workers ? lane : -1);
  return shortest >= 0 ? shape.own_row(own[shortest], __shfl_sync(~0u, ranges, shortest)) : shared_row;
}

// Computes the positions of all heads in a row where each has ranges of its own.
__device__ inline void place_own_ranges(const PlanShape& shape, const Row& row, PlanShared& shared) {
  const int threads = static_cast<int>(blockDim.x);
  int positions = 0;
  for (int base = 0; base < shape.batch; base += threads) {
    const int b = base + static_cast<int>(threadIdx.x);
    const bool works = b < shape.batch && shared.sequences[b].length >= 0;
    const BlockSums sums(works ? shape.heads * row.positions(shared.sequences[b].load) : 0, 0, shared.warps);
    if (works) shared.sequences[b].at = positions + sums.before[0];
    positions += sums.total[0];
    __syncthreads();
  }
}

// The positions that stand for the residual of the head before the first one of sequence `b`.
__device__ inline int gap_before(const Row& row, const PlanShared& shared, int b) {
  while (--b >= 0)
    if (shared.sequences[b].length >= 0) return row.gap(shared.sequences[b].load);
  return 0;
}

// Writes the work tiles of all heads. A group of 2^shift threads shares a head; each thread writes the work tiles of some of its ranges.
__device__ inline void write_work_tiles(const PlanArgs& args, const Row& row, const PlanShared& shared) {
  const PlanShape& shape = args.shape;
  const int heads = shape.batch * shape.heads;
  const int threads = static_cast<int>(gridDim.x * blockDim.x), thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  int shift = 0;
  while (shift < 5 && heads << (shift + 1) <= threads) ++shift;
  for (int i = thread >> shift; i < heads; i += threads >> shift) {
    const int b = i / shape.heads, head = i % shape.heads;
    const PlannedSequence sequence = shared.sequences[b];
    if (sequence.length < 0) continue;
    const int at = sequence.at + head * row.positions(sequence.load);
    const int gap = head > 0 ? row.gap(sequence.load) : gap_before(row, shared, b);
    const HeadRange range(row, sequence.number + head, at, gap, sequence.load);
    range.write(shape, row, args.plan, b, head, sequence.length, thread & ((1 << shift) - 1), 1 << shift);
  }
}

// One CTA per SM is enough; unless told so, the compiler spills registers to let two run.
static __global__ void __launch_bounds__(kMaxPlanThreads, 1) plan_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ PlanShared shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const PlanTotals totals = read_sequences(args, shared);
  const Row row = choose_row(args.shape, totals, shared);
  if (!row.shared) place_own_ranges(args.shape, row, shared);
  write_work_tiles(args, row, shared);
}

struct AdvanceArgs {
  int* lengths;
  int batch;
  const int* counts;  // tokens of each sequence; null: `count`
  int count;
  bool skip_empty;  // an empty sequence stays empty, unless `counts` gives it tokens
  int limit;        // maximum length; a sequence without room, or with a negative count, keeps its length
  int* overflow;    // set to 1 then
};

static __global__ void advance_kernel(const __grid_constant__ AdvanceArgs args) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  for (int b = threadIdx.x; b < args.batch; b += blockDim.x) {
    const int length = args.lengths[b], more = args.counts ? args.counts[b] : length > 0 || !args.skip_empty ? args.count : 0;
    if (more < 0 || more > args.limit - length)
      *args.overflow = 1;
    else
      args.lengths[b] = length + more;
  }
}

struct CropArgs {
  int *lengths, *least;  // least: the shortest length that a sequence may be cropped to, kept from crop to crop
  int batch;
  const int* counts;  // tokens of each sequence; null: `count`, of those that have any
  int count;
  int rollback;   // how far below its longest length a sequence may be
  int* overflow;  // set to 1 where a sequence would be shorter than that; it keeps its length
};

static __global__ void crop_kernel(const __grid_constant__ CropArgs args) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  for (int b = threadIdx.x; b < args.batch; b += blockDim.x) {
    const int length = args.lengths[b], fewer = args.counts ? args.counts[b] : length > 0 ? args.count : 0;
    const int least = max(args.least[b], length - args.rollback);  // between two crops lengths only grow, so this one is the longest
    args.least[b] = least;
    if (fewer < 0 || fewer > length - least)
      *args.overflow = 1;
    else
      args.lengths[b] = length - fewer;
  }
}

}  // namespace kvgen
