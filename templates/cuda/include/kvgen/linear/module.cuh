// The exported function of a module for products with packed weights: linear(x, packed, bias, residual, out) (docs/abi.md).
#pragma once
#include <algorithm>

#include "kvgen/host/checks.cuh"
#include "kvgen/linear/kernel.cuh"

namespace kvgen::linear {

template <class Schedule>
class Module {
  using T = Traits<Schedule>;
  static constexpr int kVector = 16, kQuad = 8;  // bytes that rows of x, and of other tensors, start at multiples of

 public:
  static int linear(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      constexpr int64_t kOutputs = Schedule::kEpilogue == Epilogue::silu_mul ? Schedule::kN / 2 : Schedule::kN;
      ffi::Args wide("linear", args, count, 5, {kDLCUDA, -1}, kVector);
      const auto x = wide.tensor<2>(0, "x", Schedule::kType, {ffi::kAny, Schedule::kK}, ffi::Memory::rows);
      const auto packed = wide.tensor<1>(1, "packed", ffi::kUint8, {T::Packed::kBytes}, ffi::Memory::blocks);
      ffi::Args call("linear", args, count, 5, wide.device, kQuad);
      if (x.size[0] > Schedule::kRows)
        ffi::fail("ValueError", "linear: x has %lld rows, and this kernel is compiled for %d", (long long)x.size[0], Schedule::kRows);
      if (call.given(2) != Schedule::kBias)
        ffi::fail("TypeError", "linear: %s", Schedule::kBias ? "bias is missing" : "this layer has no bias");
      constexpr bool kAdds = Schedule::kEpilogue == Epilogue::add;
      if (call.given(3) != kAdds) ffi::fail("TypeError", "linear: %s", kAdds ? "residual is missing" : "this layer adds no residual");
      ffi::View<1> bias;
      ffi::View<2> residual;
      if (Schedule::kBias) bias = call.tensor<1>(2, "bias", Schedule::kType, {Schedule::kN}, ffi::Memory::blocks);
      if (kAdds) residual = call.tensor<2>(3, "residual", Schedule::kType, {x.size[0], kOutputs}, ffi::Memory::rows);
      const auto out = call.tensor<2>(4, "out", Schedule::kType, {x.size[0], kOutputs}, ffi::Memory::rows);
      ffi::check_once("linear", "out", out, 2);
      ffi::check_apart("linear", "out", out, 2, "x", x, 2);
      ffi::check_apart("linear", "out", out, 2, "packed", packed, 1);
      if (x.size[0] == 0) return false;
      const detail::DeviceCall on(call);
      const Arguments a{bytes(x),
                        bytes(packed),
                        bytes(bias),
                        bytes(residual),
                        reinterpret_cast<uint8_t*>(out.data),
                        2 * x.stride[0],
                        2 * residual.stride[0],
                        2 * out.stride[0],
                        static_cast<int>(x.size[0])};
      on.check(launch(a, on.stream));
      return false;
    });
  }

 private:
  // A multiprocessor gets no more CTAs than the launch is made for: where there is room for another one, some get more than others.
  static int requested_bytes() {
    int device = 0, all = 0, reserved = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    return std::max(shared_bytes<Schedule>(), (all / (Schedule::kCtas + 1) - reserved) / 128 * 128 + 128);
  }
  static cudaError_t launch(const Arguments& a, cudaStream_t stream) {
    const int bytes = requested_bytes();
    const cudaError_t error = cudaFuncSetAttribute(linear_kernel<Schedule>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(T::kBlocks * Schedule::kSplit), config.blockDim = dim3(T::kThreads), config.dynamicSmemBytes = bytes;
    config.stream = stream, config.attrs = attributes;
    if (Schedule::kSplit * T::kShare > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {Schedule::kSplit * T::kShare, 1, 1};
    }
    if (Schedule::kOverlap) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, linear_kernel<Schedule>, a);
  }

  template <int N>
  static const uint8_t* bytes(const ffi::View<N>& view) {
    return reinterpret_cast<const uint8_t*>(view.data);
  }
};

}  // namespace kvgen::linear

#define KVGEN_EXPORT_LINEAR(Module) \
  KVGEN_EXPORT(linear) { return Module::linear(args, count, result); }
