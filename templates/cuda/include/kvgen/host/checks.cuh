// One call of an exported function on its device.
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "kvgen/ffi.hpp"
#include "kvgen/host/args.cuh"

namespace kvgen::detail {

inline void check(cudaError_t error, const char* function) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next call is not to be told of this error
  ffi::fail("RuntimeError", "%s: CUDA reports %s: %s", function, cudaGetErrorName(error), cudaGetErrorString(error));
}

// Makes the tensors' device current for one call, whose stream is torch's.
class DeviceCall {
 public:
  const char* function;
  cudaStream_t stream;

  DeviceCall(int device, const char* function_)
      : function(function_), stream(static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device))) {
    check(cudaGetDevice(&before_));
    if (device != before_) check(cudaSetDevice(device));
    changed_ = device != before_;
  }
  explicit DeviceCall(const ffi::Args& call) : DeviceCall(call.device.device_id, call.function) {}
  ~DeviceCall() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  void check(cudaError_t error) const { detail::check(error, function); }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace kvgen::detail
