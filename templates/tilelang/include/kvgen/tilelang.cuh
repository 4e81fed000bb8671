// What the text that TileLang generates calls, in the shapes that are in use, so that it compiles without TileLang.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>

#include "kvgen/ptx.cuh"
#include "kvgen/tilelang_mma.cuh"
#include "kvgen/tilelang_operands.cuh"

using uint = unsigned int;
using uchar = unsigned char;
using half_t = __half;
using bfloat16_t = __nv_bfloat16;

__device__ __forceinline__ unsigned __pack_half2(half_t low, half_t high) { return kvgen::ptx::as_u32(__halves2half2(low, high)); }

__device__ __forceinline__ unsigned __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) {
  const __nv_bfloat162 pair{low, high};
  return *reinterpret_cast<const unsigned*>(&pair);
}

namespace tl {

enum class DataType { kFloat16, kBFloat16, kFloat32 };

template <DataType kA, DataType kB, DataType kC, int kM, int kN, int kK, bool kTransA, bool kTransB>
__device__ __forceinline__ void mma_sync(float* c, const unsigned* a, const unsigned* b) {
  static_assert(kA == kB && kC == DataType::kFloat32 && kM == 16 && kN == 8 && kK == 16 && !kTransA && kTransB, "the one shape in use");
  auto& sums = *reinterpret_cast<float(*)[4]>(c);
  if constexpr (kA == DataType::kFloat16)
    kvgen::ptx::mma(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
  else
    kvgen::ptx::mma_bf16(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
}

template <int kBytes>
__device__ __forceinline__ void cp_async_gs(const void* shared, const void* global) {
  if constexpr (kBytes == 16)
    kvgen::ptx::copy_async16(kvgen::ptx::shared_address(shared), global);
  else
    kvgen::ptx::copy_async<kBytes>(kvgen::ptx::shared_address(shared), global);
}
// The condition is that the address lies within `packed_rows`, as all do.
template <int kBytes>
__device__ __forceinline__ void cp_async_gs_conditional(const void* shared, const void* global, bool) {
  cp_async_gs<kBytes>(shared, global);
}
__device__ __forceinline__ void cp_async_commit() { kvgen::ptx::copy_commit(); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  kvgen::ptx::copy_wait<kPending>();
}

struct MaxOp {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOp {
  __device__ float operator()(float a, float b) const { return a + b; }
};
template <int>
struct NamedBarrier {};
template <class Reduce, int kThreads, int kScale, int kOffset, class Barrier>
struct AllReduce {
  static_assert(kThreads <= 32 && kScale == 1 && kOffset == 0, "within a warp");
  static __device__ __forceinline__ float run(float x) {
#pragma unroll
    for (int lanes = kThreads / 2; lanes > 0; lanes /= 2) x = Reduce()(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
  }
};

}  // namespace tl
