// y = x W^T for few rows of x and packed weights W. A warp multiplies kTiles tiles of 16 rows of W by all rows of x, over every
// kWarpsK-th stage of the channels of its CTA; kWarpsN warps share the rows of x of a stage. W is the A operand of the MMA, so that 1 to 8
// rows of x fill its 8 columns. CTAs of a cluster share the channels. All sums have one order, so equal calls give equal bits.
#pragma once
#include "kvgen/linear/inputs.cuh"
#include "kvgen/linear/wide.cuh"

namespace kvgen::linear {

// Products by mma.sync: a ring of stages for each k group.
template <class Schedule>
class Mainloop {
  using T = Traits<Schedule>;
  using Packed = typename T::Packed;
  using Element = typename T::Element;
  using Total = float (&)[T::kTiles][T::kColumns][4];
  using Inputs = std::conditional_t<(T::kShare > 1), MulticastInputs<Schedule>, RingInputs<Schedule>>;

  static constexpr int kUnitRuns = Packed::kUnit / 64, kPitch = Inputs::kPitch;
  static constexpr int kInputs = T::kWarpsN * T::kWarpStage, kSlot = kInputs + Inputs::kSlot;  // where x begins in a slot, and its bytes
  static constexpr int kRings = T::kWarpsK * T::kStages * kSlot;
  // Many rows multiply scaled weights, which are rounded to 16 bits; few rows have their sums scaled.
  static constexpr bool kFewRows = T::kColumns <= 4, kScaledSums = Packed::kGrouped && kFewRows;

  WarpWeights<Schedule> weights_;
  const Place<Schedule> at_;
  const Inputs inputs_;
  uint32_t ring_, row_;

 public:
  static constexpr int kBytes = kRings + Inputs::kBytes;

  __device__ Mainloop(const Arguments& a, uint32_t shared, int block, int rank) : at_(rank), inputs_(a, shared + kRings, block, at_) {
    ring_ = ptx::pinned(shared + at_.group * T::kStages * kSlot);
    row_ = at_.lane % 8 * kPitch + at_.lane / 8 * 16;
    weights_.begin(a, (block * T::kWarpsN + at_.member) * T::kTiles, at_.first, at_.lane);
  }

  __device__ __forceinline__ void run(Total total) {
    inputs_.prepare();
#pragma unroll
    for (int i = 0; i < T::kStages - 1; ++i) {
      if (i < at_.stages) copy_weights(i, i);
      if constexpr (T::kShare > 1) ptx::copy_commit();
    }
    inputs_.begin();  // weights are constant, x is not
    if constexpr (T::kShare == 1)
#pragma unroll
      for (int i = 0; i < T::kStages - 1; ++i) {
        if (i < at_.stages) copy_inputs(i, i);
        ptx::copy_commit();
      }
    int slot = 0;
    for (int i = 0; i < at_.stages; ++i) {
      ptx::copy_wait<T::kStages - 2>();
      const uint32_t weights = ring_ + slot * kSlot, x = inputs_.wait(weights + kInputs, i);
      const int next = i + T::kStages - 1, into = slot == 0 ? T::kStages - 1 : slot - 1;
      if (next < at_.stages) copy_weights(into, next), copy_inputs(into, next);
      ptx::copy_commit();
      multiply(weights + at_.member * T::kWarpStage, x + row_, total);
      if (++slot == T::kStages) slot = 0;
    }
    ptx::copy_wait_all();
  }

 private:
  __device__ __forceinline__ void copy_weights(int slot, int stage) const {
    weights_.copy(ring_ + slot * kSlot + at_.member * T::kWarpStage, stage * T::kWarpsK);
  }
  __device__ __forceinline__ void copy_inputs(int slot, int stage) const { inputs_.copy(ring_ + slot * kSlot + kInputs, stage); }

  __device__ __forceinline__ void multiply(uint32_t weights, uint32_t inputs, Total total) const {
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
  if constexpr (T::kEarly) ptx::griddepcontrol_launch_dependents();
  Loop<Schedule>(a, shared, block, rank).run(total);
  if constexpr (!T::kEarly) ptx::griddepcontrol_launch_dependents();
  __syncthreads();  // sums take the place of the rings
  Sums<Schedule>(a, shared, block, rank).store(total);
}

}  // namespace kvgen::linear
