// What a CTA has to do, read from the plan: its work tiles and its empty sequences. Each warp keeps the first work tile and the latest
// three in shared memory, where they cost no registers.
#pragma once
#include "kvgen/host/args.cuh"
#include "kvgen/ptx.cuh"
#include "kvgen/schedule/plan.hpp"

namespace kvgen {

// The step's plan in device memory.
struct Plan {
  const int* header;
  const WorkRange* ranges;
  const WorkTile* tiles;
  const int* empty;
  int max_tiles, batch;

  __device__ Plan(const int* plan, const PlanShape& shape)
      : header(plan),
        ranges(reinterpret_cast<const WorkRange*>(plan + shape.ranges_at())),
        tiles(reinterpret_cast<const WorkTile*>(plan + shape.tiles_at())),
        empty(plan + shape.empty_at()),
        max_tiles(shape.most_work_tiles()),
        batch(shape.batch) {}
};

// The empty sequences of a plan, as a CTA reads them with its first work tile.
struct EmptySequences {
  int count;
  int first;  // the CTA's first one, if it has any: CTA i writes the outputs of the i-th, and of every one gridDim.x further
};

class WorkQueue {
 public:
  static constexpr int kWarpBytes = 4 * sizeof(WorkTile);

  // kWarpBytes of shared memory for each warp
  __device__ WorkQueue(const Plan& plan, WorkTile* memory, int lane) : tiles_(plan.tiles), memory_(memory), lane_(lane) {}

  // Speculative first work tile: loaded before griddepcontrol.wait, so it may hold stale values. Before the wait it serves prefetches,
  // after it the first load of q, which is repeated if `load_confirmed` finds another head.
  __device__ __forceinline__ const WorkTile& load_speculative(const Plan& plan, int worker) {
    range_ = range_of(start_field(plan, worker));
    store_first(first_field(plan, range_.begin));
    return memory_[kFirst];
  }
  // Loads the first work tile and the empty sequences after the wait. Returns whether its head differs from the speculative one.
  __device__ __forceinline__ bool load_confirmed(const Plan& plan, int worker, EmptySequences& empties) {
    const WorkTile seen = memory_[kFirst];
    const int guess = range_.begin;
    __syncwarp();
    // Both loads are issued before either is waited for: the range rarely differs from the speculative one.
    const int start = start_field(plan, worker), field = first_field(plan, guess);
    range_ = range_of(start);
    empties = {__shfl_sync(~0u, start, kCountLane), __shfl_sync(~0u, start, kEmptyLane)};
    store_first(field);
    if (range_.begin != guess) store_first(first_field(plan, range_.begin));
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
  static constexpr int kLatest = 3, kFirst = 3, kCountLane = 2, kEmptyLane = 3;
  const WorkTile* tiles_;
  WorkTile* memory_;
  int lane_;
  WorkRange range_;

  // Lanes 0 and 1 load the range for all lanes, the next two the empty sequences. The first of them is loaded even if there is none. Each
  // number is loaded once: before griddepcontrol.wait, loads of one address by several lanes may give different values.
  __device__ __forceinline__ int start_field(const Plan& plan, int worker) const {
    const int* from = reinterpret_cast<const int*>(plan.ranges + worker) + lane_ % 2;
    if (lane_ == kCountLane) from = plan.header;
    if (lane_ == kEmptyLane) from = plan.empty + min(static_cast<int>(blockIdx.x), plan.batch - 1);
    return ptx::load_relaxed(from);
  }
  __device__ __forceinline__ static WorkRange range_of(int start) { return {__shfl_sync(~0u, start, 0), __shfl_sync(~0u, start, 1)}; }
  // Lane i loads the i-th field. The index is clamped, since a speculative range may hold any values.
  __device__ __forceinline__ int first_field(const Plan& plan, int index) const {
    return ptx::load_relaxed(reinterpret_cast<const int*>(tiles_ + min(max(index, 0), plan.max_tiles - 1)) + lane_ % 8);
  }
  __device__ __forceinline__ void store_first(int field) const {
    if (lane_ < 8) reinterpret_cast<int*>(memory_ + kFirst)[lane_] = field;
    __syncwarp();
  }
};

}  // namespace kvgen
