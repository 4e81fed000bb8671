#pragma once
#include "cuda_emulator.hpp"

struct __half { _Float16 x; };
struct __half2 { __half x, y; };

inline float __half2float(__half x) { return static_cast<float>(x.x); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __hmin2(__half2 a, __half2 b) { return {{std::min(a.x.x, b.x.x)}, {std::min(a.y.x, b.y.x)}}; }
inline __half2 __hmax2(__half2 a, __half2 b) { return {{std::max(a.x.x, b.x.x)}, {std::max(a.y.x, b.y.x)}}; }
