// The exported function expand(packed, out) of a module for products with packed weights (docs/abi.md).
#pragma once
#include "kvgen/host/checks.cuh"
#include "kvgen/linear/expand.cuh"

namespace kvgen::linear {

template <class Schedule>
int expand(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return ffi::guard(result, [&](TVMFFIAny&) {
    using E = Expand<Schedule>;
    ffi::Args call("expand", args, count, 2, {kDLCUDA, -1}, 16);
    const auto packed = call.tensor<1>(0, "packed", ffi::kUint8, {Layout<Schedule>::kBytes}, ffi::Memory::blocks);
    const auto out = call.tensor<2>(1, "out", Schedule::kType, {Schedule::kN, Schedule::kK}, ffi::Memory::rows);
    ffi::check_once("expand", "out", out, 2);
    ffi::check_apart("expand", "out", out, 2, "packed", packed, 1);
    const detail::DeviceCall on(call);
    expand_kernel<Schedule><<<E::kBlocks, E::kThreads, 0, on.stream>>>(reinterpret_cast<const uint8_t*>(packed.data),
                                                                       reinterpret_cast<uint8_t*>(out.data), 2 * out.stride[0]);
    on.check(cudaGetLastError());
    return false;
  });
}

}  // namespace kvgen::linear

#define KVGEN_EXPORT_EXPAND(Schedule) \
  KVGEN_EXPORT(expand) { return kvgen::linear::expand<Schedule>(args, count, result); }
