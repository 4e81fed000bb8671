// Decode attention over a packed cache, one launch: each warp streams its own units. The host's side of it.
#pragma once
#include <algorithm>
#include <atomic>

#include "kvgen/attend_part.cuh"
#include "kvgen/splits.cuh"

namespace kvgen {

// The host's side of a variant.
template <class Format, class Schedule>
struct Attend {
  using Variant = Traits<Format, Schedule>;
  static constexpr int kSharedBytes = Variant::kSharedBytes + Scratch<Variant>::kExtra;
  static constexpr int kMostParts = Part::kMostParts, kMostDevices = 64;
  // A wrong guess costs a launch three times what a right one saves: that is little, but much of a short one.
  static constexpr int kGuessBytes = 64 << 20;

  // Parts that run at once on the current device.
  static int resident() {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return Schedule::kCombine == Combine::cluster ? most_clusters() : processors * Schedule::kCtasPerSm;
  }

  // A launch for a batch: as many parts of every head as are cheapest.
  static Grid grid(int batch, int kv_heads, int max_len) {
    const int heads = batch * kv_heads, units = std::max(1, Variant::packed_units(max_len)), at_once = resident();
    const int parts = Schedule::kCombine == Combine::cluster
                          ? std::clamp(std::min(at_once / heads, units / Schedule::kCluster), 1, kMostParts)
                          : model(heads, at_once).cheapest(units, most_parts(heads, at_once));
    const bool guess = batch == 1 || static_cast<int64_t>(heads) * units * Variant::kUnitBytes < kGuessBytes;
    const int slots_ = slots(batch, kv_heads, parts, at_once);
    const int sharing = std::max(1, Variant::kAlwaysShares ? at_once : std::min(slots_ * kv_heads, at_once) * Variant::kTogether);
    return {slots_, Divisor(parts), guess, Divisor(sharing), places(slots_, at_once, heads, kv_heads), heads * parts <= at_once};
  }

  static int64_t workspace_bytes(int batch, int kv_heads, int, int) {
    const int heads = batch * kv_heads, at_once = resident();
    const int most = slots(batch, kv_heads, most_parts(heads, at_once), at_once);
    return Workspace<Variant>::bytes(heads, places(most, at_once, heads, kv_heads));
  }

  // Tokens of a split where all lengths are `max_len`; 0 where sequences are not split. What verification takes its lengths from.
  static int64_t split_tokens(int batch, int kv_heads, int max_len, int) {
    if (batch == 0) return 0;
    const Grid launch = grid(batch, kv_heads, max_len);
    const int64_t units = std::max(1, Variant::packed_units(max_len)), heads = static_cast<int64_t>(batch) * kv_heads;
    const int64_t ctas = Variant::kAlwaysShares ? launch.shares.number : heads * launch.parts() * Variant::kTogether;
    const int64_t each = (units * heads + ctas - 1) / ctas;
    return each >= units ? 0 : each * max_len / units;
  }

  // Whether an int holds what is added up of lengths, as long as they can be: tokens of all sequences; in shares, units of all heads.
  static bool countable(const AttendArgs& args) {
    const int64_t blocks = std::min<int64_t>(args.max_len / Format::kTokens, args.cache.blocks), batch = args.cache.batch;
    if (batch * (blocks + 1) * Format::kTokens / 8 * 9 > INT32_MAX) return false;
    if constexpr (Variant::kShares) {
      const int64_t units = Share<typename Variant::Alone>::kStart + Variant::Alone::packed_units(blocks * Format::kTokens);
      return batch * args.cache.kv_heads * units <= INT32_MAX / 2;
    }
    return true;
  }

  template <bool kAppend>
  static cudaError_t launch_kernel(const AttendArgs& args, cudaStream_t stream) {
    const auto kernel = kernel_of<kAppend>();
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    const Grid grid_ = grid(args.cache.batch, args.cache.kv_heads, args.max_len);
    Launch launch(Variant::kAlwaysShares ? dim3(grid_.shares.number) : dim3(args.cache.kv_heads * Variant::kTogether, grid_.slots), stream);
    return cudaLaunchKernelEx(&launch.config, kernel, args, grid_);
  }

  // Enqueues one attend (or, with `append`, decode) step. The caller has checked shapes; batch is at most kMaxBatch.
  static cudaError_t launch(const AttendArgs& args, bool append, cudaStream_t stream) {
    return append ? launch_kernel<true>(args, stream) : launch_kernel<false>(args, stream);
  }

 private:
  struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[2];

    Launch(dim3 ctas, cudaStream_t stream) {
      config.gridDim = ctas, config.blockDim = dim3(Variant::kThreads), config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
      config.attrs = attributes;
      if constexpr (Schedule::kCombine == Combine::cluster) {
        cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = Schedule::kCluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
      }
      if constexpr (Schedule::kOverlap) {
        cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization, overlap.val.programmaticStreamSerializationAllowed = 1;
      }
    }
    Launch(const Launch&) = delete;  // the configuration points into it
  };

  template <bool kAppend>
  static auto kernel_of() {
    if constexpr (Variant::kAlwaysShares)
      return attend_all<Variant, kAppend>;
    else
      return attend_part<Variant, kAppend>;
  }

  // For partial results.
  static int places(int slots, int at_once, int heads, int kv_heads) {
    return std::max(slots * kv_heads, Variant::kShares ? Share<typename Variant::Alone>::places(at_once * Variant::kTogether, heads) : 0);
  }

  static SplitModel model(int heads, int at_once) { return {heads, at_once, Variant::kUnitBytes}; }
  static int most_parts(int heads, int at_once) { return model(heads, at_once).most(kMostParts); }

  // For each KV head: the parts of every sequence, and as many as run at once; and, unless there are shares, more where a batch has fewer
  // than two to a sequence, so that one that is long can have them. A slot that nobody needs costs a look at the lengths, on a
  // multiprocessor that is free.
  static int slots(int batch, int kv_heads, int parts, int at_once) {
    if (batch == 1) return parts;
    const int fitting = std::max(batch * parts, at_once / kv_heads);
    return Variant::kShares || fitting >= 2 * batch ? fitting : std::max(fitting, batch + at_once / kv_heads / 2);
  }

  // Clusters that run at once on the current device; it is asked once.
  static int most_clusters() {
    static std::atomic<int> known[kMostDevices];
    int device = 0, clusters = 0;
    cudaGetDevice(&device);
    if (device < kMostDevices && (clusters = known[device]) > 0) return clusters;
    Launch launch(dim3(Schedule::kCluster), nullptr);
    launch.config.numAttrs = 1;  // the cluster
    const auto kernel = kernel_of<false>();
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) return 1;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) return 1;
    if (device < kMostDevices) known[device] = clusters;
    return clusters;
  }
};

}  // namespace kvgen
