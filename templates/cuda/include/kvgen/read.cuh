// A pure read at memory speed: the yardstick of the attention kernels. SM90 reads by 1-D bulk copies, older ones by plain loads.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include "kvgen/ffi.hpp"
#include "kvgen/ptx.cuh"

namespace kvgen {

constexpr int kReadPiece = 4096;  // buffers are whole pieces

// Every thread keeps several 16-byte loads in flight.
struct PlainRead {
  static constexpr int kThreads = 512, kCtasPerSm = 4, kSharedBytes = 0, kLoads = 4;

  __device__ static void run(const uint8_t* data, size_t bytes, uint4* sink) {
    const uint4* vectors = reinterpret_cast<const uint4*>(data);
    const size_t count = bytes / 16, stride = static_cast<size_t>(gridDim.x) * kThreads;
    uint4 sum{};
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += kLoads * stride) {
      uint4 v[kLoads] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        if (i + j * stride < count) v[j] = __ldcs(vectors + i + j * stride);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) sum.x ^= v[j].x, sum.y ^= v[j].y, sum.z ^= v[j].z, sum.w ^= v[j].w;
    }
    if (sum.x == 0x12345678u && sum.y == 0x9abcdef0u) *sink = sum;
  }
};

// One thread per CTA refills a ring in shared memory; nobody looks at what arrives.
struct BulkRead {
  static constexpr int kThreads = 32, kCtasPerSm = 2, kStages = 6, kSlotBytes = 16384, kBarriers = kStages * kSlotBytes;
  static constexpr int kSharedBytes = kBarriers + kStages * 8;

  __device__ static void run(const uint8_t* data, size_t bytes, uint4*) {
#if KVGEN_SM90
    extern __shared__ __align__(128) uint8_t ring[];
    if (threadIdx.x != 0) return;
    const uint32_t slots = ptx::shared_address(ring), barriers = slots + kBarriers;
    for (int stage = 0; stage < kStages; ++stage) ptx::barrier_init(barriers + stage * 8, 1);
    ptx::barrier_init_fence();

    // Short buffers are cut finer, so that every CTA has its share.
    const size_t even = bytes / gridDim.x / kReadPiece * kReadPiece;
    const size_t chunk = even < kReadPiece ? kReadPiece : even > kSlotBytes ? kSlotBytes : even;
    const size_t chunks = (bytes + chunk - 1) / chunk;
    const size_t mine = chunks > blockIdx.x ? (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const auto fill = [&](size_t turn) {
      const size_t at = (blockIdx.x + turn * gridDim.x) * chunk;
      const int size = static_cast<int>(bytes - at < chunk ? bytes - at : chunk), stage = static_cast<int>(turn % kStages);
      ptx::barrier_expect(barriers + stage * 8, size);
      ptx::copy_bulk(slots + stage * kSlotBytes, data + at, size, barriers + stage * 8);
    };
    for (size_t turn = 0; turn < kStages && turn < mine; ++turn) fill(turn);
    for (size_t turn = 0; turn < mine; ++turn) {
      ptx::barrier_wait(barriers + static_cast<int>(turn % kStages) * 8, static_cast<uint32_t>(turn / kStages & 1));
      if (turn + kStages < mine) fill(turn + kStages);
    }
#endif
  }
};

template <class Read>
__global__ void __launch_bounds__(Read::kThreads) read_kernel(const uint8_t* data, size_t bytes, uint4* sink) {
  Read::run(data, bytes, sink);
}

inline void read_check(cudaError_t error) {
  if (error != cudaSuccess) ffi::fail("RuntimeError", "read: CUDA reports %s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

// read(buffer, sink): uint8 [n] of whole pieces, uint8 [16 or more].
template <class Read>
int read_module(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return ffi::guard(result, [&](TVMFFIAny&) {
    ffi::Args a("read", args, count, 2, {kDLCUDA, -1}, 16);
    const auto data = a.tensor<1>(0, "buffer", ffi::kUint8, {ffi::kAny}, ffi::Memory::contiguous);
    const auto sink = a.tensor<1>(1, "sink", ffi::kUint8, {ffi::kAny}, ffi::Memory::contiguous);
    if (data.size[0] % kReadPiece) ffi::fail("ValueError", "read: buffer must be a multiple of %d bytes", kReadPiece);
    const int device = a.device().device_id;
    int sms = 0;
    read_check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    if (Read::kSharedBytes > 0)
      read_check(cudaFuncSetAttribute(read_kernel<Read>, cudaFuncAttributeMaxDynamicSharedMemorySize, Read::kSharedBytes));
    const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    read_kernel<Read><<<sms * Read::kCtasPerSm, Read::kThreads, Read::kSharedBytes, stream>>>(
        data.as<uint8_t>(), static_cast<size_t>(data.size[0]), sink.as<uint4>());
    read_check(cudaGetLastError());
    return false;
  });
}

}  // namespace kvgen
