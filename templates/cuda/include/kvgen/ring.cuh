// A warp's own ring of units in shared memory. Nobody else fills or reads it, so no barrier of the CTA is needed.
// A slot holds the unit's K channel params, then its sub-tiles; each sub-tile is one stage.
#pragma once
#include "kvgen/ptx.cuh"
#include "kvgen/traits.cuh"

namespace kvgen {

// Where a unit lies in global memory; null params or sub-tiles mean there is nothing left to copy.
struct Unit {
  const uint8_t* params = nullptr;
  const uint8_t* subtiles = nullptr;
};

template <int kBytes>
__device__ __forceinline__ void warp_copy_async(uint32_t shared, const uint8_t* global, int lane) {
  static_assert(kBytes % 16 == 0);
#pragma unroll
  for (int at = 0; at < kBytes / 512; ++at) ptx::copy_async16(shared + at * 512 + lane * 16, global + at * 512 + lane * 16);
  if constexpr (kBytes % 512 != 0) {
    constexpr int kDone = kBytes / 512 * 512;
    if (lane < (kBytes % 512) / 16) ptx::copy_async16(shared + kDone + lane * 16, global + kDone + lane * 16);
  }
}

template <class Traits, Copy kCopy = Traits::kCopy>
struct Ring;

// cp.async by all lanes. One commit group per stage, empty ones too, so that counting groups counts stages.
template <class Traits>
struct Ring<Traits, Copy::async> {
  uint32_t base;
  int lane;

  __device__ Ring(uint32_t shared, int warp, int lane_) : base(shared + warp * Traits::kDepth * Traits::kSlotBytes), lane(lane_) {}
  __device__ __forceinline__ uint32_t slot(int depth) const { return base + depth * Traits::kSlotBytes; }

  __device__ __forceinline__ void fill(int depth, int sub, const Unit& unit) {
    if (unit.subtiles) {
      const uint32_t to = slot(depth);
      if (sub == 0 && Traits::kUnitParams > 0) warp_copy_async<Traits::kUnitParams>(to, unit.params, lane);
      const int at = sub * Traits::Format::kSubtileBytes;
      warp_copy_async<Traits::Format::kSubtileBytes>(to + Traits::kUnitParams + at, unit.subtiles + at, lane);
    }
    ptx::copy_commit();
  }
  // Waits for the oldest stage.
  __device__ __forceinline__ void wait(int, int) {
    ptx::copy_wait<Traits::kStages - 1>();
    __syncwarp();
  }
  __device__ __forceinline__ void next_round() {}
};

#if KVGEN_SM90
// 1-D bulk copies by one lane, per sub-tile or per unit, completing on barriers.
template <class Traits, bool kWholeUnit>
struct BulkRing {
  static constexpr int kBarriers = kWholeUnit ? Traits::kDepth : Traits::kStages;
  uint32_t base;
  uint32_t barriers;
  int lane;
  uint32_t parity = 0;

  __device__ BulkRing(uint32_t shared, int warp, int lane_)
      : base(shared + warp * Traits::kDepth * Traits::kSlotBytes),
        barriers(shared + Traits::kBarriers + warp * Traits::kStages * 8),
        lane(lane_) {
    if (lane == 0) {
      for (int i = 0; i < kBarriers; ++i) ptx::barrier_init(barriers + i * 8, 1);
      ptx::barrier_init_fence();
    }
    __syncwarp();
  }
  __device__ __forceinline__ uint32_t slot(int depth) const { return base + depth * Traits::kSlotBytes; }

  __device__ __forceinline__ void fill(int depth, int sub, const Unit& unit) {
    const bool params = sub == 0 && Traits::kUnitParams > 0;
    if (kWholeUnit && sub != Traits::kUnit - 1) return;  // refilled when its last sub-tile is done
    if (lane != 0 || !unit.subtiles) return;
    const uint32_t to = slot(depth);
    constexpr int kBytes = Traits::Format::kSubtileBytes;
    if constexpr (kWholeUnit) {
      const uint32_t barrier = barriers + depth * 8;
      ptx::barrier_expect(barrier, Traits::kSlotBytes);
      if constexpr (Traits::kUnitParams > 0) ptx::copy_bulk(to, unit.params, Traits::kUnitParams, barrier);
      ptx::copy_bulk(to + Traits::kUnitParams, unit.subtiles, Traits::kUnitBytes, barrier);
    } else {
      const uint32_t barrier = barriers + (depth * Traits::kUnit + sub) * 8;
      ptx::barrier_expect(barrier, kBytes + (params ? Traits::kUnitParams : 0));
      if (params) ptx::copy_bulk(to, unit.params, Traits::kUnitParams, barrier);
      ptx::copy_bulk(to + Traits::kUnitParams + sub * kBytes, unit.subtiles + sub * kBytes, kBytes, barrier);
    }
  }
  __device__ __forceinline__ void wait(int depth, int sub) {
    if (!kWholeUnit) ptx::barrier_wait(barriers + (depth * Traits::kUnit + sub) * 8, parity);
    if (kWholeUnit && sub == 0) ptx::barrier_wait(barriers + depth * 8, parity);
  }
  // After every slot was used once, completions have the other parity.
  __device__ __forceinline__ void next_round() { parity ^= 1; }
};

template <class Traits>
struct Ring<Traits, Copy::bulk> : BulkRing<Traits, false> {
  using BulkRing<Traits, false>::BulkRing;
};
template <class Traits>
struct Ring<Traits, Copy::bulk_unit> : BulkRing<Traits, true> {
  using BulkRing<Traits, true>::BulkRing;
};
#endif

}  // namespace kvgen
