// The host side of a variant: grids, workspaces, plans, launches.
#pragma once
#include <algorithm>
#include <atomic>

#include "kvgen/host/launch.cuh"
#include "kvgen/mainloop/attend_planned.cuh"
#include "kvgen/mainloop/attend_static.cuh"

namespace kvgen {

template <class Format, class Schedule>
struct Attend {
  using StaticTraits = Traits<Format, Static<Schedule>>;
  using PlannedTraits = Traits<Format, Planned<Schedule>>;
  static constexpr int kMaxSplits = 256;
  static constexpr int kMaxBatch = kMaxPlanBatch;
  static constexpr bool kSlots = true;

  // Splits per head (or run of its packed-GQA rows) of the static scheduler: the number of least cost.
  static int splits(int heads, int max_len) {
    const int tiles = visible_tiles(max_len);
    if (Schedule::kReduction == Reduction::cluster)
      return std::clamp(std::min(resident_splits() / heads, tiles / Schedule::kCluster), 1, kMaxSplits);
    return model(heads).cheapest(tiles, kMaxSplits);
  }

  // The workspace has slots for the splits of any length and for the work tiles of a plan, of any batch up to this one.
  static int64_t workspace_bytes(int batch, int kv_heads, int, int) {
    const int heads = batch * kv_heads;
    const int64_t planned = int64_t{heads} * StaticTraits::kRuns + std::max(resident_ctas(), StaticTraits::kRuns);
    const int64_t slots = std::max(planned, model(heads * StaticTraits::kRuns).most_results(kMaxSplits));
    return Workspace<StaticTraits>::bytes(kv_heads, slots + StaticTraits::kRuns);  // one more for each run, for an even number
  }

  // Tokens of a split if all lengths are `max_len`; 0 if sequences are not split. Verification chooses its lengths by it.
  static int64_t split_tokens(int batch, int kv_heads, int max_len, int q_len) {
    if (batch == 0) return 0;
    const int count = splits(batch * kv_heads * StaticTraits::runs(q_len), max_len) * StaticTraits::kClusterSize,
              tiles = visible_tiles(max_len);
    return count == 1 ? 0 : static_cast<int64_t>(ceil_div(tiles, count)) * StaticTraits::kTileTokens;
  }

  static PlanShape plan_shape(int batch, int kv_heads, int q_len, bool append) {
    constexpr int kRingBytes = PlannedTraits::Memory::kBarriers;  // the barriers begin where the rings end
    constexpr int kHeadBytes = start_bytes(Schedule::kCtasPerSm, kRingBytes);
    PlanShape shape;
    shape.batch = batch, shape.heads = kv_heads;
    shape.workers = std::max(1, resident_ctas() / PlannedTraits::runs(q_len));
    shape.tile_tokens = PlannedTraits::kTileTokens, shape.block_tokens = Format::kTokens;
    shape.head_cost = ceil_div(kHeadBytes, PlannedTraits::kTileBytes), shape.least_tiles = PlannedTraits::kWarps;
    shape.window = PlannedTraits::Mask::kWindow, shape.q_len = q_len, shape.fresh = append ? q_len : 0;
    shape.unpacked = Format::ResidualRows::kUnpacked;
    shape.tile_residual = tile_residual(PlannedTraits::kTileBytes, Format::kHeadDim);
    if constexpr (PlannedTraits::kArrival)
      shape.block_tokens = 1, shape.unpacked = -shape.fresh, shape.tile_residual = 0;  // all are packed
    return shape;
  }

  // Enqueues one attend (or, with `append`, decode) step. The caller has checked shapes.
  static cudaError_t launch(const AttendArgs& args, bool append, cudaStream_t stream) {
    return append ? launch_step<true>(args, stream) : launch_step<false>(args, stream);
  }

  static int resident_ctas() { return multiprocessors() * Schedule::kCtasPerSm; }

 private:
  static constexpr int kMaxDevices = 64;

  static int even(int slots) { return slots + slots % 2; }

  template <bool kAppend>
  static cudaError_t launch_step(AttendArgs args, cudaStream_t stream) {
    const int batch = args.cache.batch, kv_heads = args.cache.kv_heads, heads = batch * kv_heads;
    args.runs = StaticTraits::runs(args.q_len);
    if (args.plan) {
      const PlanShape shape = plan_shape(batch, kv_heads, args.q_len, kAppend);
      args.slots = even(shape.most_work_tiles());
      Launch launch(dim3(shape.workers * args.runs), PlannedTraits::kThreads, shared_bytes<PlannedTraits>(), stream, Schedule::kOverlap);
      return launch.run(attend_planned<PlannedTraits, kAppend>, args, shape);
    }
    const int count = splits(heads * args.runs, args.max_len);
    args.slots = even(heads * count), args.one_wave = heads * args.runs * count <= resident_splits();
    Launch launch(dim3(kv_heads * args.runs * StaticTraits::kClusterSize, count, batch), StaticTraits::kThreads,
                  shared_bytes<StaticTraits>(), stream, Schedule::kOverlap, StaticTraits::kClusterSize);
    return launch.run(attend_static<StaticTraits, kAppend>, args);
  }

  template <class Traits>
  static int shared_bytes() {
    return SharedMemory::of_device().of_one_in(Schedule::kCtasPerSm, Traits::Memory::kTotal);
  }

  static int visible_tiles(int max_len) {
    constexpr int kWindow = StaticTraits::Mask::kWindow;
    const int tokens = kWindow > 0 ? std::min(max_len, kWindow + Format::kTokens) : max_len;
    return std::max(1, StaticTraits::packed_tiles(tokens));
  }
  static SplitModel model(int heads) { return {heads, resident_splits(), Schedule::kCtasPerSm, StaticTraits::kTileBytes}; }

  // Splits that are resident at once on the current device: CTAs or clusters.
  static int resident_splits() { return Schedule::kReduction == Reduction::cluster ? resident_clusters() : resident_ctas(); }

  // Clusters that are resident at once on the current device; the driver is queried once.
  static int resident_clusters() {
    static std::atomic<int> known[kMaxDevices];
    int device = 0;
    cudaGetDevice(&device);
    if (device < kMaxDevices && known[device] > 0) return known[device];
    Launch launch(dim3(Schedule::kCluster), StaticTraits::kThreads, shared_bytes<StaticTraits>(), nullptr, false, Schedule::kCluster);
    const int clusters = launch.resident_clusters(attend_static<StaticTraits, false>);
    if (device < kMaxDevices) known[device] = clusters;
    return clusters;
  }
};

}  // namespace kvgen
