// Launches kernels with their attributes.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kvgen/format/elements.cuh"
#include "kvgen/schedule/plan_kernel.cuh"

namespace kvgen {

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return std::max(1, count);  // where CUDA does not answer, the launch that follows tells why
}

// The shared memory of a multiprocessor, and the part that the driver reserves for each CTA.
struct SharedMemory {
  int all, reserved;

  static SharedMemory of_device() {
    int device = 0;
    SharedMemory memory = {0, 0};
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&memory.all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&memory.reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    return memory;
  }
  // The shared memory to request for a CTA that needs `bytes`: so much that a multiprocessor has no room for more than `ctas` of them.
  // Where there is room for another one, some multiprocessors get more CTAs than others, and the launch takes as long as these.
  int of_one_in(int ctas, int bytes) const {
    constexpr int kGranularity = 128;
    return std::max(bytes, (all / (ctas + 1) - reserved) / kGranularity * kGranularity + kGranularity);
  }
};

class Launch {
 public:
  // `overlap`: programmatic dependent launch: the kernel may start before earlier launches of the stream end.
  Launch(dim3 grid, int threads, int shared_bytes, cudaStream_t stream, bool overlap, int cluster = 1) : bytes_(shared_bytes) {
    config_.gridDim = grid, config_.blockDim = dim3(threads), config_.dynamicSmemBytes = shared_bytes, config_.stream = stream;
    config_.attrs = attributes_;
    if (cluster > 1) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    if (overlap) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization, attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  Launch(const Launch&) = delete;  // config_ points to attributes_

  template <class... Parameters, class... Arguments>
  cudaError_t run(void (*kernel)(Parameters...), const Arguments&... arguments) {
    const cudaError_t error = allow_memory(kernel);
    return error == cudaSuccess ? cudaLaunchKernelEx(&config_, kernel, static_cast<Parameters>(arguments)...) : error;
  }
  // Clusters that are resident at once; 1 if the driver does not answer.
  template <class Kernel>
  int resident_clusters(Kernel kernel) {
    int clusters = 0;
    cudaError_t error = allow_memory(kernel);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config_);
    if (error == cudaSuccess) return clusters;
    cudaGetLastError();  // the next call is not to be told of this error
    return 1;
  }

 private:
  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[2];
  int bytes_;

  template <class Kernel>
  cudaError_t allow_memory(Kernel kernel) const {
    if (bytes_ <= 48 * 1024) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_);
  }
};

// Enqueues the plan of a step, with one thread per sequence or, if there are more, per head.
inline cudaError_t launch_plan(const PlanArgs& args, cudaStream_t stream, bool overlap) {
  const int threads = std::clamp((args.shape.batch + 31) / 32 * 32, 256, kMaxPlanThreads);
  const int ctas = std::clamp(args.shape.batch * args.shape.heads / threads, 1, 16);
  return Launch(dim3(ctas), threads, 0, stream, overlap).run(plan_kernel, args);
}

// Enqueue the kernels that advance lengths at the end of a step, and that take tokens back.
inline cudaError_t launch_advance(const AdvanceArgs& args, cudaStream_t stream, bool overlap) {
  return Launch(dim3(1), 256, 0, stream, overlap).run(advance_kernel, args);
}
inline cudaError_t launch_crop(const CropArgs& args, cudaStream_t stream, bool overlap) {
  return Launch(dim3(1), 256, 0, stream, overlap).run(crop_kernel, args);
}

// The host's model of time: how many splits a head gets where all heads get the same number, and the cost of a head's start in a plan.

// Bytes that a CTA with a plan could read, at its share of the SM's rate, while it goes from one head to the next. Its rings are among
// them, because they are refilled.
constexpr int start_bytes(int ctas_per_sm, int ring_bytes) { return 48 * 1024 / ctas_per_sm + ring_bytes; }

// Unquantized tokens that have as many bytes as a KV tile.
constexpr int tile_residual(int tile_bytes, int head_dim) { return std::max(1, tile_bytes / (2 * head_dim * 2)); }

// A launch of `heads` heads (or runs of their query rows), `resident` CTAs at a time, over KV tiles of `tile_bytes`. An SM could read
// `wave_bytes` while the CTAs of a wave start and end.
struct SplitModel {
  static constexpr int kMostWaves = 8;
  static constexpr int kWaveBytes = 160 * 1024;  // of the CUDA kernels
  static constexpr int kReduceBytes = 3 * 1024;  // which a CTA could read while it reduces one more split
  int heads, resident, ctas_per_sm, tile_bytes, wave_bytes = kWaveBytes;

  // Upper bound over all lengths.
  int most(int limit) const { return std::clamp(kMostWaves * resident / std::max(heads, 1), 1, limit); }
  // Upper bound of the splits of all heads, over all lengths and over as many heads or fewer.
  int64_t most_results(int limit) const {
    return std::max<int64_t>(heads, std::min<int64_t>(int64_t{heads} * limit, kMostWaves * resident));
  }

  // The cheapest number of splits for heads of `tiles` tiles. CTAs run in waves of equal duration. More splits may fill the last wave.
  int cheapest(int tiles, int limit) const {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int splits = 1; splits <= std::min(most(limit), std::max(1, tiles)); ++splits) {
      const int64_t waves = ceil_div(heads * splits, resident);
      const int64_t wave = ceil_div(tiles, splits) * int64_t{tile_bytes} + wave_bytes / ctas_per_sm;
      const int64_t cost = waves * wave + splits * int64_t{kReduceBytes};
      if (cost < least) least = cost, best = splits;
    }
    return best;
  }
};

}  // namespace kvgen
