// y = x W^T for few rows of x and packed weights W. A warp multiplies kTiles tiles of 16 rows of W by all rows of x, over every
// kWarpsK-th stage of the channels of its CTA; kWarpsN warps share the rows of x of a stage. W is the A operand of the MMA, so that 1 to 8
// rows of x fill its 8 columns. CTAs of a cluster share the channels. All sums have one order, so equal calls give equal bits.
#pragma once
#include "kvgen/linear/wide.cuh"

namespace kvgen::linear {

// Products by mma.sync: a ring of stages for each k group, x in rows that are padded against bank conflicts.
template <class Schedule>
class Mainloop {
  using T = Traits<Schedule>;
  using Packed = typename T::Packed;
  using Element = typename T::Element;
  using Total = float (&)[T::kTiles][T::kColumns][4];

  static constexpr int kUnitRuns = Packed::kUnit / 64;
  static constexpr int kPitch = 2 * T::kStage + 16;           // bytes of a row of x
  static constexpr int kInputs = T::kWarpsN * T::kWarpStage;  // where x begins in a slot
  static constexpr int kSlot = kInputs + T::kRows * kPitch;
  // Many rows multiply scaled weights, which are rounded to 16 bits; few rows have their sums scaled.
  static constexpr bool kFewRows = T::kColumns <= 4, kScaledSums = Packed::kGrouped && kFewRows;

  const Arguments& a_;
  WarpWeights<Schedule> weights_;
  int lane_, group_, member_, first_, stages_;
  uint32_t ring_, row_;

 public:
  static constexpr int kBytes = T::kWarpsK * T::kStages * kSlot;

  __device__ Mainloop(const Arguments& a, uint32_t shared, int block, int rank) : a_(a) {
    const int warp = threadIdx.x / 32;
    lane_ = threadIdx.x % 32, group_ = warp / T::kWarpsN, member_ = warp % T::kWarpsN;
    const int begin = T::kAllStages * rank / T::kSplit, end = T::kAllStages * (rank + 1) / T::kSplit;
    first_ = begin + group_, stages_ = std::max(0, (end - first_ + T::kWarpsK - 1) / T::kWarpsK);
    ring_ = ptx::pinned(shared + group_ * T::kStages * kSlot);
    row_ = lane_ % 8 * kPitch + lane_ / 8 * 16;
    weights_.begin(a, (block * T::kWarpsN + member_) * T::kTiles, first_, lane_);
  }

  __device__ __forceinline__ void run(Total total) {
#pragma unroll
    for (int i = 0; i < T::kStages - 1; ++i)
      if (i < stages_) copy_weights(i, i);
    ptx::griddepcontrol_wait();  // weights are constant, x is not
#pragma unroll
    for (int i = 0; i < T::kStages - 1; ++i) {
      if (i < stages_) copy_inputs(i, i);
      ptx::copy_commit();
    }
    int slot = 0;
    for (int i = 0; i < stages_; ++i) {
      ptx::copy_wait<T::kStages - 2>();
      sync();
      const int next = i + T::kStages - 1, into = slot == 0 ? T::kStages - 1 : slot - 1;
      if (next < stages_) copy_weights(into, next), copy_inputs(into, next);
      ptx::copy_commit();
      multiply(ring_ + slot * kSlot, total);
      if (++slot == T::kStages) slot = 0;
    }
    ptx::copy_wait_all();
  }

 private:
  __device__ __forceinline__ void sync() const {
    if constexpr (T::kWarpsN == 1)
      __syncwarp();
    else
      group_sync(group_, T::kWarpsN * 32);
  }
  __device__ __forceinline__ void copy_weights(int slot, int stage) const {
    weights_.copy(ring_ + slot * kSlot + member_ * T::kWarpStage, stage * T::kWarpsK);
  }
  __device__ __forceinline__ void copy_inputs(int slot, int stage) const {
    constexpr int kVectors = T::kStage / 8, kStep = T::kWarpsN * 32 / kVectors;
    const int thread = member_ * 32 + lane_, vector = thread % kVectors;
    const uint32_t to = ring_ + slot * kSlot + kInputs + vector * 16;
    const uint8_t* from = a_.x + 2 * ((first_ + stage * T::kWarpsK) * T::kStage + vector * 8);
#pragma unroll
    for (int i = 0; i < ceil_div(T::kRows, kStep); ++i) {
      const int row = thread / kVectors + i * kStep;
      if (row < a_.rows) ptx::copy_async16(to + row * kPitch, from + row * a_.x_stride);
    }
  }

  __device__ __forceinline__ void multiply(uint32_t slot, Total total) const {
    const uint32_t weights = slot + member_ * T::kWarpStage, inputs = slot + kInputs + row_;
#pragma unroll
    for (int unit = 0; unit < T::kUnits; ++unit) {
      const uint32_t codes = weights + unit * Packed::kUnitBytes, x = inputs + unit * Packed::kUnit * 2;
      if constexpr (kFewRows)
        multiply_few(codes, x, total);
      else
        multiply_many(codes, x, total);
    }
  }

  // The fragments of x stay in registers for a unit, and every tile's codes are expanded as they are needed.
  __device__ __forceinline__ void multiply_few(uint32_t codes, uint32_t inputs, Total total) const {
    uint32_t x[T::kColumns][kUnitRuns * 8];
#pragma unroll
    for (int c = 0; c < T::kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 2 * kUnitRuns; ++i) load_matrices(&x[c][4 * i], inputs + c * 8 * kPitch + i * 64);
#pragma unroll
    for (int t = 0; t < T::kTiles; ++t) {
      const uint32_t tile = codes + t * T::kTileStage;
      const Zeros zero = weights_.zeros(tile, t);
      float sum[T::kColumns][4] = {};
#pragma unroll
      for (int run = 0; run < kUnitRuns; ++run)
        weights_.each_fragment(tile + run * Packed::kRunBytes, zero, [&](int f, const uint32_t(&a)[4]) {
#pragma unroll
          for (int c = 0; c < T::kColumns; ++c)
            mma<Element>(kScaledSums ? sum[c] : total[t][c], a, x[c][8 * run + 2 * f], x[c][8 * run + 2 * f + 1]);
        });
      if constexpr (kScaledSums) {
        const float low = to_floats<Element>(weights_.scale(tile, 0)).x, high = to_floats<Element>(weights_.scale(tile, 8)).x;
#pragma unroll
        for (int c = 0; c < T::kColumns; ++c)
#pragma unroll
          for (int j = 0; j < 4; ++j) total[t][c][j] += sum[c][j] * (j < 2 ? low : high);
      }
    }
  }

  // The expanded codes of a run stay in registers, for all rows of x.
  __device__ __forceinline__ void multiply_many(uint32_t codes, uint32_t inputs, Total total) const {
#pragma unroll
    for (int run = 0; run < kUnitRuns; ++run) {
      uint32_t w[T::kTiles][4][4];
#pragma unroll
      for (int t = 0; t < T::kTiles; ++t) {
        const uint32_t tile = codes + t * T::kTileStage;
        const Scales scale = weights_.scales(tile);
        weights_.each_fragment(tile + run * Packed::kRunBytes, weights_.zeros(tile, t),
                               [&](int f, const uint32_t(&a)[4]) { scale.apply<Element>(a, w[t][f]); });
      }
#pragma unroll
      for (int c = 0; c < T::kColumns; ++c) {
        uint32_t x[8];
        load_matrices(&x[0], inputs + c * 8 * kPitch + run * 128), load_matrices(&x[4], inputs + c * 8 * kPitch + run * 128 + 64);
#pragma unroll
        for (int f = 0; f < 4; ++f)
#pragma unroll
          for (int t = 0; t < T::kTiles; ++t) mma<Element>(total[t][c], w[t][f], x[2 * f], x[2 * f + 1]);
      }
    }
  }
};

template <class Schedule>
using Loop = std::conditional_t<Schedule::kWarpGroups, WideMainloop<Schedule>, Mainloop<Schedule>>;

template <class Schedule>
constexpr int shared_bytes() {
  return std::max(Loop<Schedule>::kBytes, Sums<Schedule>::kBytes);
}

template <class Schedule>
__global__ void __launch_bounds__(Traits<Schedule>::kThreads, Schedule::kCtas) linear_kernel(const __grid_constant__ Arguments a) {
  using T = Traits<Schedule>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int block = blockIdx.x / T::kSplit, rank = blockIdx.x % T::kSplit;
  float total[T::kTiles][T::kColumns][4] = {};
  Loop<Schedule>(a, shared, block, rank).run(total);
  ptx::griddepcontrol_launch_dependents();
  __syncthreads();  // sums take the place of the rings
  Sums<Schedule>(a, shared, block, rank).store(total);
}

}  // namespace kvgen::linear
