// The read roofline: pure reads and a copy at memory speed. The fastest read depends on GPU and size, so several are offered.
#pragma once
#include "kvgen/host/checks.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

constexpr int kReadChunk = 4096;  // a buffer's size is a multiple of it

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

// One thread per CTA refills a ring in shared memory by 1-D bulk copies; no thread reads the data.
template <int kSlotBytes>
struct BulkRead {
  static constexpr int kThreads = 32, kCtasPerSm = 2, kStages = 98304 / kSlotBytes, kBarriers = kStages * kSlotBytes;
  static constexpr int kSharedBytes = kBarriers + kStages * 8;

  __device__ static void run(const uint8_t* data, size_t bytes, uint4*) {
#if KVGEN_SM90
    extern __shared__ __align__(128) uint8_t ring[];
    if (threadIdx.x != 0) return;
    const uint32_t slots = ptx::shared_address(ring), barriers = slots + kBarriers;
    for (int stage = 0; stage < kStages; ++stage) ptx::barrier_init(barriers + stage * 8, 1);
    ptx::barrier_init_fence();

    // Short buffers have smaller chunks, so that every CTA reads about as much.
    const size_t even = bytes / gridDim.x / kReadChunk * kReadChunk;
    const size_t chunk = even < kReadChunk ? kReadChunk : even > kSlotBytes ? kSlotBytes : even;
    const size_t chunks = (bytes + chunk - 1) / chunk;
    const size_t mine = chunks > blockIdx.x ? (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const auto fill = [&](size_t i) {
      const size_t at = (blockIdx.x + i * gridDim.x) * chunk;
      const int size = static_cast<int>(bytes - at < chunk ? bytes - at : chunk), stage = static_cast<int>(i % kStages);
      ptx::barrier_expect(barriers + stage * 8, size);
      ptx::copy_bulk(slots + stage * kSlotBytes, data + at, size, barriers + stage * 8);
    };
    for (size_t i = 0; i < kStages && i < mine; ++i) fill(i);
    for (size_t i = 0; i < mine; ++i) {
      ptx::barrier_wait(barriers + static_cast<int>(i % kStages) * 8, static_cast<uint32_t>(i / kStages & 1));
      if (i + kStages < mine) fill(i + kStages);
    }
#endif
  }
};

template <class Read>
__global__ void __launch_bounds__(Read::kThreads) read_kernel(const uint8_t* data, size_t bytes, uint4* sink) {
  Read::run(data, bytes, sink);
}

static __global__ void __launch_bounds__(512) copy_kernel(const uint4* from, uint4* to, size_t count) {
  constexpr int kLoads = 4;
  const size_t stride = static_cast<size_t>(gridDim.x) * 512;
  for (size_t i = static_cast<size_t>(blockIdx.x) * 512 + threadIdx.x; i < count; i += kLoads * stride) {
    uint4 v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      if (i + j * stride < count) v[j] = __ldcs(from + i + j * stride);
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      if (i + j * stride < count) __stcs(to + i + j * stride, v[j]);
  }
}

// The arguments of both functions: uint8 [n], n a multiple of kReadChunk, and a second tensor.
struct ReadArgs : ffi::Args {
  const char* first;
  ffi::View<1> data = tensor<1>(0, first, ffi::kUint8, {ffi::kAny}, ffi::Memory::blocks), other;

  ReadArgs(const char* function, const TVMFFIAny* args, int32_t count, const char* first_, const char* second)
      : Args(function, args, count, 2, {kDLCUDA, -1}, 16), first(first_) {
    other = tensor<1>(1, second, ffi::kUint8, {ffi::kAny}, ffi::Memory::blocks);
    if (data.size[0] % kReadChunk) ffi::fail("ValueError", "%s: %s must be a multiple of %d bytes", function, first, kReadChunk);
  }
  // CTAs of a launch with `each` per multiprocessor.
  int ctas(const detail::DeviceCall& on, int each) const {
    int sms = 0;
    on.check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device.device_id));
    return sms * each;
  }
};

// read(buffer, sink): uint8 [n], uint8 [16 or more].
template <class Read>
int read_module(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return ffi::guard(result, [&](TVMFFIAny&) {
    const ReadArgs call("read", args, count, "buffer", "sink");
    const detail::DeviceCall on(call);
    if (Read::kSharedBytes > 0)
      on.check(cudaFuncSetAttribute(read_kernel<Read>, cudaFuncAttributeMaxDynamicSharedMemorySize, Read::kSharedBytes));
    read_kernel<Read><<<call.ctas(on, Read::kCtasPerSm), Read::kThreads, Read::kSharedBytes, on.stream>>>(
        call.data.as<uint8_t>(), static_cast<size_t>(call.data.size[0]), call.other.as<uint4>());
    on.check(cudaGetLastError());
    return false;
  });
}

// copy(from, to): both uint8 [n].
inline int copy_module(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return ffi::guard(result, [&](TVMFFIAny&) {
    const ReadArgs call("copy", args, count, "from", "to");
    const detail::DeviceCall on(call);
    if (call.other.size[0] != call.data.size[0]) ffi::fail("ValueError", "copy: from and to must have the same size");
    copy_kernel<<<call.ctas(on, 4), 512, 0, on.stream>>>(call.data.as<uint4>(), call.other.as<uint4>(),
                                                         static_cast<size_t>(call.data.size[0]) / 16);
    on.check(cudaGetLastError());
    return false;
  });
}

}  // namespace kvgen
