// Converts and checks the arguments of exported functions.
#pragma once
#include <cuda_runtime.h>

#include "kvgen/ffi.hpp"
#include "kvgen/host/args.cuh"

namespace kvgen::detail {

inline void check(cudaError_t error, const char* function) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the next call is not to be told of this error
  ffi::fail("RuntimeError", "%s: CUDA reports %s: %s", function, cudaGetErrorName(error), cudaGetErrorString(error));
}

// Makes the tensors' device current for one call.
class DeviceScope {
 public:
  DeviceScope(int device, const char* function) {
    check(cudaGetDevice(&before_), function);
    if (device != before_) check(cudaSetDevice(device), function);
    changed_ = device != before_;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline Rows rows(const ffi::View<4>& view) { return {view.data, view.stride[0], view.stride[1], view.stride[2]}; }

inline int to_int(const char* function, const char* name, int64_t value) {
  if (value > INT32_MAX) ffi::fail("ValueError", "%s: %s is %lld, more than 2^31 - 1", function, name, static_cast<long long>(value));
  return static_cast<int>(value);
}

}  // namespace kvgen::detail
