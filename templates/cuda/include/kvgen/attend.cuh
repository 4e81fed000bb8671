// Decode attention over a packed cache, one launch: each warp streams its own units. The host's side of it.
#pragma once
#include <algorithm>
#include <atomic>
#include <climits>

#include "kvgen/even.cuh"
#include "kvgen/ranges.cuh"
#include "kvgen/splits.cuh"

namespace kvgen {

// The host's side of a variant.
template <class Format, class Schedule>
struct Attend {
  using Variant = Traits<Format, Schedule>;
  using Ranges = Traits<Format, InRanges<Schedule>>;
  static constexpr int kSharedBytes = std::max(Variant::kSharedBytes + Scratch<Variant>::kExtra, Ranges::kSharedBytes + Scratch<Ranges>::kExtra);
  static constexpr int kMostParts = 256, kMostDevices = 64;

  // CTAs that run at once on the current device.
  static int most_ctas() {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return processors * Schedule::kCtasPerSm;
  }

  // The CTAs for a batch: a part of a head each, in as many parts as are cheapest; or ranges, as many as run at once, of whole heads where
  // that costs little.
  static Grid grid(int batch, int kv_heads, int max_len) {
    const int heads = batch * kv_heads, most = most_ctas(), units = std::max(1, Variant::packed_units(max_len));
    if constexpr (Variant::kEven) {
      const int parts = Schedule::kCombine == Combine::cluster ? cluster_parts(heads, units) : model(heads).cheapest(units, model(heads).most(kMostParts));
      return {heads * parts, parts};
    }
    int whole = most;
    while (heads > most && heads % whole != 0) --whole;
    const bool fits = heads > most && whole >= most * 0.93f;
    return {fits ? whole : static_cast<int>(std::min<int64_t>(most, static_cast<int64_t>(units) * heads)), 0};
  }

  static int64_t workspace_bytes(int batch, int kv_heads, int, int) {
    const int heads = batch * kv_heads;
    return Workspace<Variant>::bytes(heads, Variant::kEven ? heads * std::max(Schedule::kCluster, model(heads).most(kMostParts)) : most_ctas());
  }

  template <bool kAppend>
  static cudaError_t launch_kernel(const AttendArgs& args, cudaStream_t stream) {
    const auto kernel = entry<kAppend>();
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    Grid grid_ = grid(args.cache.batch, args.cache.kv_heads, args.max_len);
    grid_.ranges = std::min(grid_.ctas, most_ctas());
    grid_.by_ranges = Divisor(grid_.ranges), grid_.by_heads = Divisor(args.cache.kv_heads), grid_.by_splits = Divisor(std::max(1, grid_.splits));
    const dim3 ctas = grid_.splits ? dim3(grid_.splits, args.cache.kv_heads, args.cache.batch) : dim3(grid_.ctas);
    Launch launch(ctas, stream);
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
  static auto entry() {
    if constexpr (Variant::kEven)
      return attend_even<Variant, Ranges, kAppend>;
    else
      return attend_ranges<Variant, kAppend>;
  }

  static SplitModel model(int heads) { return {heads, most_ctas(), Variant::kUnitBytes}; }

  // As many clusters per head as run at once with those of all others, and have a unit for every CTA; one at least.
  static int cluster_parts(int heads, int units) {
    return Schedule::kCluster * std::clamp(std::min(most_clusters() / heads, units / Schedule::kCluster), 1, kMostParts / Schedule::kCluster);
  }
  // Clusters that run at once on the current device; it is asked once.
  static int most_clusters() {
    static std::atomic<int> known[kMostDevices];
    int device = 0, clusters = 0;
    cudaGetDevice(&device);
    if (device < kMostDevices && (clusters = known[device]) > 0) return clusters;
    Launch launch(dim3(Schedule::kCluster), nullptr);
    launch.config.numAttrs = 1;  // the cluster
    const auto kernel = entry<false>();
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) return 1;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) return 1;
    if (device < kMostDevices) known[device] = clusters;
    return clusters;
  }
};

}  // namespace kvgen
