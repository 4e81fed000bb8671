// Minimum and maximum of many 16-bit elements, two to a word.
#pragma once
#include "kvgen/pack/scaler.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen::packing {

__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b, __half) {
  return ptx::as_u32(__hmin2(ptx::as_half2(a), ptx::as_half2(b)));
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __half) {
  return ptx::as_u32(__hmax2(ptx::as_half2(a), ptx::as_half2(b)));
}
__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 y = __hmin2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 y = __hmax2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}

__device__ __forceinline__ float2 to_floats(uint32_t x, __half) { return __half22float2(ptx::as_half2(x)); }
__device__ __forceinline__ float2 to_floats(uint32_t x, __nv_bfloat16) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

// Extremes of two interleaved series of 16-bit elements.
template <class Element>
struct Range {
  uint32_t low, high;

  __device__ __forceinline__ void include(uint32_t other_low, uint32_t other_high) {
    low = smaller(low, other_low, Element());
    high = larger(high, other_high, Element());
  }
  __device__ __forceinline__ void include(uint32_t pair) { include(pair, pair); }
  __device__ __forceinline__ void include_lane(int mask) { include(__shfl_xor_sync(~0u, low, mask), __shfl_xor_sync(~0u, high, mask)); }
  __device__ __forceinline__ float lowest() const {
    const float2 x = to_floats(low, Element());
    return fminf(x.x, x.y);
  }
  __device__ __forceinline__ float highest() const {
    const float2 x = to_floats(high, Element());
    return fmaxf(x.x, x.y);
  }
};

template <class Element>
__device__ __forceinline__ uint4 load16(const Element* address) {
  return *reinterpret_cast<const uint4*>(address);
}
__device__ __forceinline__ uint32_t component(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

}  // namespace kvgen::packing
