// Stands for the header of the same name, with the functions that the kernels use.
#pragma once
#include "cuda_emulator.hpp"

struct __half {
  _Float16 x;
  __half() = default;
  __half(_Float16 value) : x(value) {}
  explicit __half(float value) : x(static_cast<_Float16>(value)) {}
  explicit operator float() const { return static_cast<float>(x); }
};
struct KVGEN_VECTOR(4) __half2 { __half x, y; };

inline float __half2float(__half x) { return static_cast<float>(x.x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __hmin2(__half2 a, __half2 b) { return {{std::min(a.x.x, b.x.x)}, {std::min(a.y.x, b.y.x)}}; }
inline __half2 __hmax2(__half2 a, __half2 b) { return {{std::max(a.x.x, b.x.x)}, {std::max(a.y.x, b.y.x)}}; }
inline __half2 __habs2(__half2 a) { return {{a.x.x < 0 ? -a.x.x : a.x.x}, {a.y.x < 0 ? -a.y.x : a.y.x}}; }
inline __half2 __hneg2(__half2 a) { return {{-a.x.x}, {-a.y.x}}; }
inline __half __hadd(__half a, __half b) { return {static_cast<_Float16>(a.x + b.x)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {{static_cast<_Float16>(a.x.x - b.x.x)}, {static_cast<_Float16>(a.y.x - b.y.x)}}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {{static_cast<_Float16>(a.x.x * b.x.x)}, {static_cast<_Float16>(a.y.x * b.y.x)}}; }
inline _Float16 fma_half(__half a, __half b, __half c) {
  return static_cast<_Float16>(static_cast<double>(a.x) * static_cast<double>(b.x) + static_cast<double>(c.x));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {{fma_half(a.x, b.x, c.x)}, {fma_half(a.y, b.y, c.y)}}; }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
inline float __low2float(__half2 a) { return __half2float(a.x); }
inline __half2 __hge2(__half2 a, __half2 b) { return {__half(a.x.x >= b.x.x ? 1.f : 0.f), __half(a.y.x >= b.y.x ? 1.f : 0.f)}; }
inline bool __hgt(__half a, __half b) { return a.x > b.x; }
inline bool __hle(__half a, __half b) { return a.x <= b.x; }
