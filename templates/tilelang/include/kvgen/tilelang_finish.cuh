// The end of a step after the attention kernel that TileLang lowered: reduces the splits of each head to its output, and in decode appends
// the step's tokens.
#pragma once
#include <algorithm>

#include "kvgen/mainloop/residual.cuh"
#include "kvgen/pack/quantize.cuh"
#include "kvgen/schedule/plan.hpp"

namespace kvgen {

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

}  // namespace kvgen
