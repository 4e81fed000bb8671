// The host's side of a variant that TileLang lowered: grids, workspace, plans, arguments of the attention kernel, and the kernel that ends
// a step.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kvgen/epilogue/workspace.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/pack/quantize.cuh"
#include "kvgen/schedule/plan.hpp"

namespace kvgen {

// The end of a step after the attention kernel that TileLang lowered: reduces the splits of each head to its output, and in decode appends
// the step's tokens.

constexpr int kQRows = 8;  // packed-GQA rows of a CTA

struct FinishArgs {
  AttendArgs args;
  PlanShape shape;
  const float *partial, *stats;  // by slot: sums of weighted values [kQRows, kHeadDim], and (row_max, row_sum) [kQRows]
  int* readers;                  // of each sequence's length; zero between launches
  int runs, splits;
  bool append;
};

// The result of a head: slots [first, first + count).
struct HeadSplits {
  int sequence, head, run, first, count;
};

template <class Format_, class Schedule, int kThreads_>
struct Finish {
  using Format = Format_;
  using Element = typename Format::Element;
  static constexpr int kThreads = kThreads_, kDim = Format::kHeadDim;
  static constexpr int kWarps = kThreads / 32, kPart = kDim + 32, kPartsBytes = kWarps * kPart * 4;  // floats of a warp, bytes of all
  static constexpr int kMemory = std::max<int>(pack_smem_bytes<Format>(), kPartsBytes);
  const FinishArgs& finish;
  uint8_t* memory;

  __device__ const AttendArgs& args() const { return finish.args; }

  // Output and LSE of a head's query rows; without slots those of a head without tokens. The CTA's warps share the rows, and a row's warps
  // its splits.
  __device__ void reduce(const HeadSplits& head) const {
    constexpr int kChannels = kDim / 32;  // of a lane
    const int rows = min(kQRows, Schedule::kGroup * args().q_len - head.run * kQRows), parts = kWarps / rows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / parts, part = warp % parts;
    const float* stats = finish.stats + (int64_t{head.first} * kQRows + row) * 2;
    const float* partial = finish.partial + (int64_t{head.first} * kQRows + row) * kDim + lane;
    float row_max = -INFINITY, row_sum = 0.f, sums[kChannels] = {};
    if (row < rows) {
      for (int split = lane; split < head.count; split += 32) row_max = fmaxf(row_max, stats[split * kQRows * 2]);
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, lanes));
#pragma unroll 8
      for (int split = part; split < head.count; split += parts) {
        const float weight = ptx::exp2(stats[split * kQRows * 2] - row_max);
        row_sum += weight * stats[split * kQRows * 2 + 1];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) sums[i] += weight * partial[split * kQRows * kDim + i * 32];
      }
    }
    float* const shared = reinterpret_cast<float*>(memory) + warp * kPart + lane;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) shared[i * 32] = sums[i];
    shared[kDim] = row_sum;
    __syncthreads();
    if (row < rows && part == 0) {
      for (int other = 1; other < parts; ++other) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) sums[i] += shared[other * kPart + i * 32];
        row_sum += shared[other * kPart + kDim];
      }
      const int q_row = head.run * kQRows + row, query = q_row / Schedule::kGroup;
      const int q_head = head.head * Schedule::kGroup + q_row % Schedule::kGroup;
      Element* out = args().out.template row<Element>(head.sequence, query, q_head);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) out[i * 32 + lane] = static_cast<Element>(row_sum == 0.f ? 0.f : sums[i] / row_sum);
      const int64_t at = (int64_t{head.sequence} * args().cache.kv_heads * Schedule::kGroup + q_head) * args().q_len + query;
      if (lane == 0 && args().lse) args().lse[at] = row_sum == 0.f ? -INFINITY : (row_max + log2f(row_sum)) * 0.6931471805599453f;
    }
    __syncthreads();
  }

  // Stores the step's tokens of a KV head in the residual of a sequence of `length` tokens. If they fill a block, that is packed first.
  __device__ void append(int sequence, int kv_head, int length) const {
    const Residual<Finish> tokens(args(), {sequence, kv_head, 0}, length);
    const int packed = tokens.fills_block() ? Format::kTokens : 0;
    if (packed) {
      uint8_t* block = args().cache.template block<Format>(sequence, kv_head, length / Format::kTokens);
      pack_block<Format, kThreads>([&](int token) { return tokens.k_row(token); }, [&](int token) { return tokens.v_row(token); }, block,
                                   memory);
    }
    constexpr int kVectors = kDim / 8;
    const int first = max(tokens.old, packed);
    for (int i = threadIdx.x; i < (tokens.count() - first) * kVectors; i += kThreads) {
      const int token = first + i / kVectors, offset = i % kVectors * 8, to = (token - packed) * kDim + offset;
      *reinterpret_cast<uint4*>(tokens.k_residual + to) = *reinterpret_cast<const uint4*>(tokens.k_row(token) + offset);
      *reinterpret_cast<uint4*>(tokens.v_residual + to) = *reinterpret_cast<const uint4*>(tokens.v_row(token) + offset);
    }
  }

  __device__ void run(const HeadSplits& head, int length) const {
    reduce(head);
    if (finish.append && head.run == 0) append(head.sequence, head.head, length);
  }

  // One CTA per head and run. Of a sequence without room nothing is written. The last CTA to read a length advances it.
  __device__ void run_static() const {
    const int heads = args().cache.kv_heads * finish.runs, sequence = blockIdx.x / heads, head = blockIdx.x % heads;
    const int length = args().cache.lengths[sequence];
    const bool fits = !finish.append || length <= args().limit - args().q_len;
    __syncthreads();
    if (fits)
      run({sequence, head / finish.runs, head % finish.runs, static_cast<int>(blockIdx.x) * finish.splits, finish.splits}, length);
    else if (threadIdx.x == 0)
      *args().overflow = 1;
    if (!finish.append || !args().advance || threadIdx.x > 0 || ptx::arrive(finish.readers + sequence) != heads - 1) return;
    finish.readers[sequence] = 0;
    if (fits) args().cache.lengths[sequence] = length + args().q_len;
  }

  // The heads whose first work tile the worker had, and its share of the empty sequences.
  __device__ void run_planned() const {
    const int* plan = args().plan;
    const WorkRange range = reinterpret_cast<const WorkRange*>(plan + finish.shape.ranges_at())[blockIdx.x];
    for (int i = range.begin; i < range.end; ++i) {
      const WorkTile tile = reinterpret_cast<const WorkTile*>(plan + finish.shape.tiles_at())[i];
      if (tile.split_idx > 0) continue;
      run({tile.sequence, tile.head / finish.runs, tile.head % finish.runs, tile.slot, tile.num_splits}, tile.length);
      __syncthreads();
    }
    for (int i = blockIdx.x; i < plan[0]; i += gridDim.x)
      for (int head = 0; head < args().cache.kv_heads * finish.runs; ++head)
        reduce({plan[finish.shape.empty_at() + i], head / finish.runs, head % finish.runs, 0, 0});
  }
};

template <class Format, class Schedule, int kThreads>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishArgs finish) {
  using Step = Finish<Format, Schedule, kThreads>;
  static_assert(Step::kMemory <= 48 * 1024);
  __shared__ __align__(16) uint8_t memory[Step::kMemory];
  ptx::griddepcontrol_wait();
  const Step step{finish, memory};
  finish.args.plan ? step.run_planned() : step.run_static();
}

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
  static constexpr bool kSlots = false;

  static int resident_ctas() { return multiprocessors() * Schedule::kCtasPerSm; }
  static int runs(int q_len) { return ceil_div(Schedule::kGroup * q_len, kQRows); }
  static int splits(int heads, int max_len) { return model(heads).cheapest(std::max(1, max_len / Schedule::kTileTokens), kMaxSplits); }

  // In bytes: the readers of each sequence's length, for the largest batch, then `slots` partial results and their row_max and row_sum.
  struct Workspace {
    int64_t stats, partial, bytes;
    explicit Workspace(int64_t slots) {
      stats = kMaxBatch * 4;
      partial = stats + slots * kQRows * 8;
      bytes = partial + slots * kQRows * Format::kHeadDim * 4;
    }
  };
  // Slots for every split of any length, and for the work tiles of a plan, of any batch up to this one.
  static int64_t workspace_bytes(int batch, int kv_heads, int, int) {
    const int heads = batch * kv_heads;
    const int64_t planned = int64_t{heads} * kMaxRuns + resident_ctas();
    return Workspace(std::max(planned, model(heads * kMaxRuns).most_results(kMaxSplits))).bytes;
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
    const Workspace at(a.plan ? shape.most_work_tiles() : int64_t{t.ctas} * t.splits);
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
