// The work tiles of a CTA, read from the plan. Each warp keeps the first one and the latest three in shared memory, where they cost no
// registers.
#pragma once
#include "kvgen/host/args.cuh"
#include "kvgen/ptx.cuh"
#include "kvgen/schedule/plan.hpp"

namespace kvgen {

// The step's plan in device memory.
struct Plan {
  const int* memory;
  const WorkRange* ranges;
  const WorkTile* tiles;
  const int* empty;
  int max_tiles;

  __device__ Plan(const int* plan, const PlanShape& shape)
      : memory(plan),
        ranges(reinterpret_cast<const WorkRange*>(plan + shape.ranges_at())),
        tiles(reinterpret_cast<const WorkTile*>(plan + shape.tiles_at())),
        empty(plan + shape.empty_at()),
        max_tiles(shape.most_work_tiles()) {}
};

class WorkQueue {
 public:
  static constexpr int kWarpBytes = 4 * sizeof(WorkTile);

  // kWarpBytes of shared memory for each warp
  __device__ WorkQueue(const Plan& plan, int worker, WorkTile* memory, int lane)
      : tiles_(plan.tiles), range_address_(plan.ranges + worker), max_tiles_(plan.max_tiles), memory_(memory), lane_(lane) {}

  // Speculative first work tile: loaded before griddepcontrol.wait, so it may hold stale values. Before the wait it serves prefetches,
  // after it the first load of q, which is repeated if `load_confirmed` finds another head.
  __device__ __forceinline__ const WorkTile& load_speculative() {
    range_ = range_of(range_field());
    store_first(first_field(range_.begin));
    return memory_[kFirst];
  }
  // Loads the first work tile after the wait. Returns whether its head differs from the speculative one.
  __device__ __forceinline__ bool load_confirmed() {
    const WorkTile seen = memory_[kFirst];
    const int guess = range_.begin;
    __syncwarp();
    // Both loads are issued before either is waited for: the range rarely differs from the speculative one.
    const int ends = range_field(), field = first_field(guess);
    range_ = range_of(ends);
    store_first(field);
    if (range_.begin != guess) store_first(first_field(range_.begin));
    const WorkTile& first = memory_[kFirst];
    if (lane_ < 8) reinterpret_cast<int*>(memory_)[lane_] = reinterpret_cast<const int*>(&first)[lane_];
    __syncwarp();
    request(1);
    return seen.sequence != first.sequence || seen.head != first.head;
  }
  __device__ __forceinline__ bool has(int index) const { return index < range_.end - range_.begin; }
  // A work tile of the CTA: the latest one requested, or one of the two before it.
  __device__ __forceinline__ const WorkTile& operator[](int index) const { return memory_[index % kLatest]; }
  __device__ __forceinline__ const WorkTile& first() const { return memory_[kFirst]; }
  // Any work tile, read from device memory.
  __device__ __forceinline__ const WorkTile& in_plan(int index) const { return tiles_[range_.begin + index]; }
  // Starts the copy of a work tile. It has arrived after the warp's next copy_wait_all and __syncwarp.
  __device__ __forceinline__ void request(int index) const {
    if (lane_ < 2 && has(index))
      ptx::copy_async16(ptx::shared_address(memory_ + index % kLatest) + lane_ * 16,
                        reinterpret_cast<const uint4*>(tiles_ + range_.begin + index) + lane_);
  }

 private:
  static constexpr int kLatest = 3, kFirst = 3;
  const WorkTile* tiles_;
  const WorkRange* range_address_;
  int max_tiles_;
  WorkTile* memory_;
  int lane_;
  WorkRange range_;

  // Two lanes load the range for all: before griddepcontrol.wait, loads of one address by several lanes may give different values.
  __device__ __forceinline__ int range_field() const { return ptx::load_relaxed(reinterpret_cast<const int*>(range_address_) + lane_ % 2); }
  __device__ __forceinline__ static WorkRange range_of(int field) { return {__shfl_sync(~0u, field, 0), __shfl_sync(~0u, field, 1)}; }
  // Lane i loads the i-th field. The index is clamped, since a speculative range may hold any values.
  __device__ __forceinline__ int first_field(int index) const {
    return ptx::load_relaxed(reinterpret_cast<const int*>(tiles_ + min(max(index, 0), max_tiles_ - 1)) + lane_ % 8);
  }
  __device__ __forceinline__ void store_first(int field) const {
    if (lane_ < 8) reinterpret_cast<int*>(memory_ + kFirst)[lane_] = field;
    __syncwarp();
  }
};

}  // namespace kvgen
