// How x gets to shared memory for the products by mma.sync: rows that are padded against bank conflicts.
#pragma once
#include "kvgen/linear/warp_weights.cuh"

namespace kvgen::linear {

// Every k group copies the x of its stages to the slots of its ring, behind the weights.
template <class Schedule>
class RingInputs {
  using T = Traits<Schedule>;

  const Arguments& a_;
  const Place<Schedule> at_;

 public:
  static constexpr int kPitch = 2 * T::kStage + 16;            // bytes of a row of x
  static constexpr int kSlot = T::kRows * kPitch, kBytes = 0;  // of a slot of the ring, and apart from the rings

  __device__ RingInputs(const Arguments& a, uint32_t, int, const Place<Schedule>& at) : a_(a), at_(at) {}
  __device__ __forceinline__ void prepare() const {}
  __device__ __forceinline__ void begin() const { ptx::griddepcontrol_wait(); }
  __device__ __forceinline__ void copy(uint32_t slot, int stage) const {
    constexpr int kVectors = T::kStage / 8, kStep = T::kWarpsN * 32 / kVectors;
    const int thread = at_.member * 32 + at_.lane, vector = thread % kVectors;
    const uint32_t to = slot + vector * 16;
    const uint8_t* from = a_.x + 2 * ((at_.first + stage * T::kWarpsK) * T::kStage + vector * 8);
#pragma unroll
    for (int i = 0; i < ceil_div(T::kRows, kStep); ++i) {
      const int row = thread / kVectors + i * kStep;
      if (row < a_.rows) ptx::copy_async16(to + row * kPitch, from + row * a_.x_stride);
    }
  }
  // Until the copies of a stage that the group's threads have waited for are there. Returns where x is.
  __device__ __forceinline__ uint32_t wait(uint32_t slot, int) const {
    if constexpr (T::kWarpsN == 1)
      __syncwarp();
    else
      group_sync(at_.group, T::kWarpsN * 32);
    return slot;
  }
};

// All x of the CTA's channels stays in shared memory. It comes by bulk copies of a row and a chunk of channels; each of the kShare CTAs of
// a cluster that have these channels copies every kShare-th row, for all of them. A chunk's mbarrier completes once, so nothing waits for
// room.
template <class Schedule>
class MulticastInputs {
  using T = Traits<Schedule>;
  static constexpr int kStages = ceil_div(T::kAllStages, T::kSplit);  // of the CTA
  static constexpr int kChunk = 4, kChunks = ceil_div(kStages, kChunk), kStageBytes = 2 * T::kStage;

  const Arguments& a_;
  const Place<Schedule> at_;
  uint32_t shared_, barriers_;
  int block_;

 public:
  static constexpr int kPitch = kStages * kStageBytes + 16;
  static constexpr int kSlot = 0, kBytes = T::kRows * kPitch + kChunks * 8;

  __device__ MulticastInputs(const Arguments& a, uint32_t shared, int block, const Place<Schedule>& at)
      : a_(a), at_(at), shared_(shared), barriers_(shared + T::kRows * kPitch), block_(block) {}
  __device__ __forceinline__ void prepare() const {
#if KVGEN_SM90
    if (threadIdx.x == 0) {
      for (int chunk = 0; chunk < kChunks; ++chunk) ptx::barrier_init(barriers_ + 8 * chunk, 1);
      ptx::barrier_init_fence();
      for (int chunk = 0; chunk < kChunks; ++chunk) ptx::barrier_expect(barriers_ + 8 * chunk, a_.rows * bytes(chunk));
    }
    ptx::cluster_arrive();
#endif
  }
  __device__ __forceinline__ void begin() const {
#if KVGEN_SM90
    ptx::cluster_wait();  // all mbarriers exist
    ptx::griddepcontrol_wait();
    const int first = block_ % T::kShare, rows = (a_.rows - first + T::kShare - 1) / T::kShare;
    if (at_.lane == 0)
      for (int i = threadIdx.x / 32; i < kChunks * rows; i += T::kThreads / 32) {
        const int chunk = i / rows, row = first + i % rows * T::kShare, at = chunk * kChunk * kStageBytes;
        if (bytes(chunk) == 0) return;
        const uint32_t to = shared_ + row * kPitch + at, barrier = barriers_ + 8 * chunk;
        const uint8_t* from = a_.x + row * a_.x_stride + at_.begin * kStageBytes + at;
        copy_bulk_to(kSharing << at_.rank, to, from, bytes(chunk), barrier);
      }
#endif
  }
  __device__ __forceinline__ void copy(uint32_t, int) const {}
  // Until the x of a stage, and the warp's copies that its threads have waited for, are there. Returns where x is.
  __device__ __forceinline__ uint32_t wait(uint32_t, int stage) const {
    const int at = at_.first - at_.begin + stage * T::kWarpsK;
    __syncwarp();
#if KVGEN_SM90
    ptx::barrier_wait(barriers_ + at / kChunk * 8, 0);
#endif
    return shared_ + at * kStageBytes;
  }

 private:
  // CTAs of the cluster that have the channels of its first.
  static constexpr uint16_t kSharing = ((1 << T::kSplit * T::kShare) - 1) / ((1 << T::kSplit) - 1);

  __device__ __forceinline__ int bytes(int chunk) const {  // of a row
    const int left = at_.end - at_.begin - chunk * kChunk;
    return (left < 0 ? 0 : left < kChunk ? left : kChunk) * kStageBytes;
  }
};

}  // namespace kvgen::linear
