// Products of many rows by the warp groups of SM90 (wgmma): scaled weights from registers, x from shared memory, which all warps of a k
// group share.
#pragma once
#include "kvgen/linear/warp_weights.cuh"

namespace kvgen::linear {

template <class Schedule>
class WideMainloop {
  using T = Traits<Schedule>;
  using Packed = typename T::Packed;
  using Element = typename T::Element;
  using Total = float (&)[T::kTiles][T::kColumns][4];

  static constexpr int kRunInputs = 128 * T::kRows;  // bytes of 64 channels of x
  static constexpr int kInputs = T::kStage / 64 * kRunInputs, kCodes = T::kWarpsN * T::kWarpStage;
  static constexpr int kStages = T::kWarpsK * T::kStages;  // of all k groups
  // Products of the stage before are still read from its slot, so a stage is copied to the slot of two stages before.
  static constexpr int kAhead = T::kStages - 2;
  static_assert(!T::kWarpGroups || (T::kWarpsN % 4 == 0 && kAhead >= 1));

  const Arguments& a_;
  WarpWeights<Schedule> weights_;
  const Place<Schedule> at_;
  uint32_t inputs_, codes_;  // all stages of x come first, since the swizzle asks for multiples of 1024 bytes

 public:
  static constexpr int kBytes = kStages * (kInputs + kCodes);

  __device__ WideMainloop(const Arguments& a, uint32_t shared, int block, int rank) : a_(a), at_(rank) {
    inputs_ = shared + at_.group * T::kStages * kInputs;
    codes_ = shared + kStages * kInputs + at_.group * T::kStages * kCodes + at_.member * T::kWarpStage;
    weights_.begin(a, (block * T::kWarpsN + at_.member) * T::kTiles, at_.first, at_.lane);
  }

  __device__ __forceinline__ void run(Total total) {
#if KVGEN_SM90
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < at_.stages) copy_weights(i, i);
    ptx::griddepcontrol_wait();  // weights are constant, x is not
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < at_.stages) copy_inputs(i, i);
      ptx::copy_commit();
    }
    int slot = 0, into = kAhead;
    for (int i = 0; i < at_.stages; ++i) {
      ptx::copy_wait<kAhead - 1>();
      ptx::copy_bulk_fence();  // matrix instructions read what copies wrote
      group_sync(at_.group, T::kWarpsN * 32);
      if (i + kAhead < at_.stages) copy_weights(into, i + kAhead), copy_inputs(into, i + kAhead);
      ptx::copy_commit();
      multiply(slot, total);
      if (++slot == T::kStages) slot = 0;
      if (++into == T::kStages) into = 0;
    }
    ptx::copy_wait_all();
#endif
  }

 private:
  __device__ __forceinline__ uint32_t codes(int slot) const { return codes_ + slot * kCodes; }
  __device__ __forceinline__ void copy_weights(int slot, int stage) const { weights_.copy(codes(slot), stage * T::kWarpsK); }
  __device__ __forceinline__ void copy_inputs(int slot, int stage) const {
    constexpr int kVectors = T::kStage / 8, kStep = T::kWarpsN * 32 / kVectors;
    const int thread = at_.member * 32 + at_.lane, vector = thread % kVectors, first = thread / kVectors;
    const uint32_t to = inputs_ + slot * kInputs + vector / 8 * kRunInputs;
    const uint8_t* from = a_.x + 2 * ((at_.first + stage * T::kWarpsK) * T::kStage + vector * 8);
#pragma unroll
    for (int i = 0; i < ceil_div(T::kRows, kStep); ++i) {
      const int row = first + i * kStep;
      if (row < a_.rows) ptx::copy_async16(to + row * 128 + (vector % 8 ^ row % 8) * 16, from + row * a_.x_stride);
    }
  }

#if KVGEN_SM90
  __device__ __forceinline__ void multiply(int slot, Total total) const {
    uint32_t w[2][T::kTiles][4];  // while one fragment is multiplied, the next one is expanded
#pragma unroll
    for (int run = 0; run < T::kStage / 64; ++run) {
      const uint32_t x = inputs_ + slot * kInputs + run * kRunInputs;
      const uint32_t unit = codes(slot) + run * 64 / Packed::kUnit * Packed::kUnitBytes;
      uint32_t words[T::kTiles][4 * Codes::kWords];
      Zeros zero[T::kTiles];
      Scales scale[T::kTiles];
#pragma unroll
      for (int t = 0; t < T::kTiles; ++t) {
        const uint32_t tile = unit + t * T::kTileStage;
        weights_.load_codes(tile + run * 64 % Packed::kUnit / 64 * Packed::kRunBytes, words[t]);
        zero[t] = weights_.zeros(tile, t), scale[t] = weights_.scales(tile);
      }
#pragma unroll
      for (int f = 0; f < 4; ++f) {
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) {
          uint32_t a[4];
          Codes::expand(&words[t][f * Codes::kWords], zero[t], a);
          scale[t].template apply<Element>(a, w[f % 2][t]);
        }
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) wgmma<Element>(total[t], w[f % 2][t], wgmma_matrix(x + f * 32));
        wgmma_commit();
        wgmma_wait<1>();
      }
    }
    wgmma_wait<0>();  // else registers of weights in flight would be given to values of the next stage
  }
#endif
  using Codes = Decoder<Element, Schedule::kBits>;
};

}  // namespace kvgen::linear
