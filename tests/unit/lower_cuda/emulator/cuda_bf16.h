#pragma once
#include "cuda_emulator.hpp"

struct __nv_bfloat16 {
  uint16_t x;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    x = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};
struct KVGEN_VECTOR(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.x) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 smaller_bf16(__nv_bfloat16 a, __nv_bfloat16 b) { return __bfloat162float(b) < __bfloat162float(a) ? b : a; }
inline __nv_bfloat16 larger_bf16(__nv_bfloat16 a, __nv_bfloat16 b) { return __bfloat162float(a) < __bfloat162float(b) ? b : a; }
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) { return {smaller_bf16(a.x, b.x), smaller_bf16(a.y, b.y)}; }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return {larger_bf16(a.x, b.x), larger_bf16(a.y, b.y)}; }
inline __nv_bfloat162 __habs2(__nv_bfloat162 a) { return emulator::bits<__nv_bfloat162>(emulator::bits<unsigned>(a) & 0x7fff7fffu); }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(__bfloat162float(a.x) - __bfloat162float(b.x)), __nv_bfloat16(__bfloat162float(a.y) - __bfloat162float(b.y))};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(__bfloat162float(a.x) * __bfloat162float(b.x)), __nv_bfloat16(__bfloat162float(a.y) * __bfloat162float(b.y))};
}
