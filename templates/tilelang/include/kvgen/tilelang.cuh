// What the text that TileLang generates calls: kvgen's own definitions, so that it compiles and runs without TileLang.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>

#include "kvgen/ptx.cuh"

using uint = unsigned int;
using uchar = unsigned char;
using half_t = __half;

__device__ __forceinline__ unsigned __pack_half2(half_t low, half_t high) { return kvgen::ptx::as_u32(__halves2half2(low, high)); }

namespace tl {

enum class DataType { kFloat16, kBFloat16, kFloat32 };

template <DataType kA, DataType kB, DataType kC, int kM, int kN, int kK, bool kTransA, bool kTransB>
__device__ __forceinline__ void mma_sync(float* c, const unsigned* a, const unsigned* b) {
  static_assert(kA == kB && kC == DataType::kFloat32 && kM == 16 && kN == 8 && kK == 16 && !kTransA && kTransB, "the one shape in use");
  if constexpr (kA == DataType::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

template <int kBytes>
__device__ __forceinline__ void cp_async_gs(const void* shared, const void* global) {
  static_assert(kBytes == 16, "the one size in use");
  kvgen::ptx::copy_async16(kvgen::ptx::shared_address(shared), global);
}

// Four 8x8 matrices of halves, a row per lane, as fragments; transposed on the way.
__device__ __forceinline__ void ptx_ldmatrix_x4(const void* shared, void* fragments) {
  unsigned* to = static_cast<unsigned*>(fragments);
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(kvgen::ptx::shared_address(shared))
               : "memory");
}
__device__ __forceinline__ void ptx_ldmatrix_x4_trans(const void* shared, void* fragments) {
  unsigned* to = static_cast<unsigned*>(fragments);
  asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(kvgen::ptx::shared_address(shared))
               : "memory");
}
// Two of them, of the rows of the first 16 lanes.
__device__ __forceinline__ void ptx_ldmatrix_x2_trans(const void* shared, void* fragments) {
  unsigned* to = static_cast<unsigned*>(fragments);
  asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0,%1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(kvgen::ptx::shared_address(shared))
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { kvgen::ptx::copy_commit(); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  kvgen::ptx::copy_wait<kPending>();
}

}  // namespace tl

namespace kvgen {

template <int kLanes>
__device__ __forceinline__ void copy_async16_if(const void* shared, const void* global, int lane) {
  ptx::copy_async16_if<kLanes>(ptx::shared_address(shared), global, lane);
}

// Halves and bfloat16s of a word as floats.
__device__ __forceinline__ float half_low(uint32_t x) { return __low2float(ptx::as_half2(x)); }
__device__ __forceinline__ float half_high(uint32_t x) { return __high2float(ptx::as_half2(x)); }
__device__ __forceinline__ float bf16_low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// 1 / x to one unit in the last place; 0 for infinity.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads two neighbouring floats as one 64-bit word from L2, because another CTA wrote them.
__device__ __forceinline__ int64_t load_pair(const float* from) { return __ldcg(reinterpret_cast<const long long*>(from)); }

// Only SM90 has clusters; other compilation passes need the names to exist.
__device__ __forceinline__ void cluster_sync() {
#if KVGEN_SM90
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}
// From the same place in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ float load_cluster(const void* shared, int rank) {
#if KVGEN_SM90
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(ptx::cluster_address(ptx::shared_address(shared), rank)) : "memory");
  return v;
#else
  return 0.f;
#endif
}

__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
  return ptx::as_u32(__hmul2(ptx::as_half2(a), ptx::as_half2(b)));
}
// What rounding loses: a * b - product.
__device__ __forceinline__ uint32_t lost_half2(uint32_t a, uint32_t b, uint32_t product) {
  return ptx::as_u32(__hfma2(ptx::as_half2(a), ptx::as_half2(b), __hneg2(ptx::as_half2(product))));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace kvgen
