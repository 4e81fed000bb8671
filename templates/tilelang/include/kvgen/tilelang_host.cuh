// The host's side of a variant that TileLang lowered: grids, workspace, plans, arguments of the attention kernel, and the kernel that ends
// a step.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kvgen/host/launch.cuh"
#include "kvgen/schedule/split_model.cuh"
#include "kvgen/tilelang_finish.cuh"

namespace kvgen {

// The attention kernel's arguments by the names that TileLang gave them. Strides and offsets count 16 bytes. The grid is `ctas` x `splits`;
// with a plan CTAs are workers, and `tiles_at` is where the plan's work tiles begin, counted in work tiles.
template <class Element>
struct TileArgs {
  Element *q, *k_residual, *v_residual;
  __half* packed;
  int *lengths, *table, *plan;
  float *partial, *stats;
  int64_t q_batch, q_token, q_head, k_new, k_batch, k_token, k_head, v_new, v_batch, v_token, v_head;  // new tokens: from the residual on
  int64_t packed_rows, packed_outer, packed_head, table_stride;
  int q_len, fresh, runs, ctas, splits, tiles_at;
  float scale;
};

// Numbers of a variant: kCtasPerSm, kTileTokens, kTileBytes, kRingBytes, kGroup, kMaxQLen, kOverlap.
template <class Format, class Schedule>
struct TileHost {
  using Args = TileArgs<typename Format::Element>;
  static constexpr int kMaxRuns = ceil_div(Schedule::kGroup * Schedule::kMaxQLen, kQRows);
  static constexpr int kMaxSplits = 256;
  static constexpr int kMaxBatch = kMaxPlanBatch;

  static int resident_ctas() { return multiprocessors() * Schedule::kCtasPerSm; }
  static int runs(int q_len) { return ceil_div(Schedule::kGroup * q_len, kQRows); }
  static int splits(int heads, int max_len) { return model(heads).cheapest(std::max(1, max_len / Schedule::kTileTokens), kMaxSplits); }

  // In bytes: the readers of each sequence's length, a multiple of 128, then `slots` partial results and their row_max and row_sum.
  struct Workspace {
    int64_t stats, partial, bytes;
    Workspace(int batch, int64_t slots) {
      stats = (batch * int64_t{4} + 127) / 128 * 128;
      partial = stats + slots * kQRows * 8;
      bytes = partial + slots * kQRows * Format::kHeadDim * 4;
    }
  };
  // Slots for every split of any length, and for the work tiles of a plan.
  static int64_t workspace_bytes(int batch, int kv_heads, int, int) {
    const int heads = batch * kv_heads;
    int64_t slots = int64_t{heads} * kMaxRuns + resident_ctas();
    for (int runs = 1; runs <= kMaxRuns; ++runs) slots = std::max<int64_t>(slots, heads * runs * model(heads * runs).most(kMaxSplits));
    return Workspace(batch, slots).bytes;
  }

  // Tokens of a split if all lengths are `max_len`; 0 if sequences are not split. Verification chooses its lengths by it.
  static int64_t split_tokens(int batch, int kv_heads, int max_len, int q_len) {
    if (batch == 0) return 0;
    const int count = splits(batch * kv_heads * runs(q_len), max_len), tiles = std::max(1, max_len / Schedule::kTileTokens);
    return count == 1 ? 0 : static_cast<int64_t>(ceil_div(tiles, count)) * Schedule::kTileTokens;
  }

  static PlanShape plan_shape(int batch, int kv_heads, int q_len, bool append) {
    PlanShape shape;
    shape.batch = batch, shape.heads = kv_heads * runs(q_len), shape.workers = resident_ctas();
    shape.tile_tokens = Schedule::kTileTokens, shape.block_tokens = Format::kTokens;
    shape.head_cost = ceil_div(start_bytes(Schedule::kCtasPerSm, Schedule::kRingBytes), Schedule::kTileBytes), shape.least_tiles = 1;
    shape.tile_residual = tile_residual(Schedule::kTileBytes, Format::kHeadDim);
    shape.q_len = q_len, shape.fresh = append ? q_len : 0;
    return shape;
  }

  // Enqueues a step. `attend(planned, arguments, launch)` launches one of the two programs, which need kRingBytes of shared memory.
  template <class Attend>
  static cudaError_t launch(const AttendArgs& a, bool append, cudaStream_t stream, Attend attend) {
    constexpr int kFinishThreads = 256;
    const PlanShape shape = plan_shape(a.cache.batch, a.cache.kv_heads, a.q_len, append);
    Args t = arguments(a, append);
    t.ctas = a.plan ? int{shape.workers} : a.cache.batch * a.cache.kv_heads * t.runs;
    t.splits = a.plan ? 1 : splits(t.ctas, a.max_len), t.tiles_at = shape.tiles_at() / 8;
    const Workspace at(a.cache.batch, a.plan ? shape.most_work_tiles() : int64_t{t.ctas} * t.splits);
    char* work = static_cast<char*>(a.workspace);
    t.stats = reinterpret_cast<float*>(work + at.stats), t.partial = reinterpret_cast<float*>(work + at.partial);
    const int shared = SharedMemory::of_device().of_one_in(Schedule::kCtasPerSm, Schedule::kRingBytes);
    const cudaError_t error = attend(t, Launch(dim3(t.ctas, t.splits), 32, shared, stream, false));
    if (error != cudaSuccess) return error;
    const FinishArgs finish{a, shape, t.partial, t.stats, reinterpret_cast<int*>(work), t.runs, t.splits, append};
    return Launch(dim3(t.ctas), kFinishThreads, 0, stream, Schedule::kOverlap).run(finish_kernel<Format, Schedule, kFinishThreads>, finish);
  }

 private:
  static Args arguments(const AttendArgs& a, bool append) {
    constexpr int kElements = 8;  // in 16 bytes
    using Element = typename Format::Element;
    const auto distance = [](const void* from, const void* to) {
      return (reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from)) / 16;
    };
    Args t = {};
    t.q = static_cast<Element*>(a.q.data), t.packed = reinterpret_cast<__half*>(a.cache.packed);
    t.k_residual = static_cast<Element*>(a.cache.k_residual), t.v_residual = static_cast<Element*>(a.cache.v_residual);
    t.lengths = a.cache.lengths, t.table = const_cast<int*>(a.cache.block_table), t.plan = const_cast<int*>(a.plan);
    t.q_batch = a.q.batch_stride / kElements, t.q_token = a.q.token_stride / kElements, t.q_head = a.q.head_stride / kElements;
    if (append) {
      t.fresh = a.q_len;
      t.k_new = distance(a.cache.k_residual, a.k_new.data), t.v_new = distance(a.cache.v_residual, a.v_new.data);
      t.k_batch = a.k_new.batch_stride / kElements, t.k_token = a.k_new.token_stride / kElements,
      t.k_head = a.k_new.head_stride / kElements;
      t.v_batch = a.v_new.batch_stride / kElements, t.v_token = a.v_new.token_stride / kElements,
      t.v_head = a.v_new.head_stride / kElements;
    }
    t.packed_rows = INT64_MAX;  // which no copy reaches
    t.packed_outer = a.cache.outer_stride_bytes / 16, t.packed_head = a.cache.head_stride_bytes / 16, t.table_stride = a.cache.table_stride;
    t.q_len = a.q_len, t.runs = runs(a.q_len), t.scale = a.scale * 1.4426950408889634f;
    return t;
  }
  static SplitModel model(int heads) { return {heads, resident_ctas(), Schedule::kCtasPerSm, Schedule::kTileBytes}; }
};

}  // namespace kvgen
