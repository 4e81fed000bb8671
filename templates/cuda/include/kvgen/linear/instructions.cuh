// Instructions that products with packed weights take beside those of ptx.cuh.
#pragma once
#include <cuda_bf16.h>

#include "kvgen/format/elements.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen::linear {

// D[16x8] += A[16x16] * B[16x8], operands of 16 bits, fp32 sums.
template <class Element>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, Half>)
    ptx::mma(d, a[0], a[1], a[2], a[3], b0, b1);
  else
    ptx::mma_bfloat(d, a[0], a[1], a[2], a[3], b0, b1);
}

// Four 8x8 matrices of 16-bit elements from shared memory; lanes 8i to 8i + 7 have the addresses of matrix i's rows.
__device__ __forceinline__ void load_matrices(uint32_t* to, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// (x & mask) | set
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t set) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(set));
  return y;
}

template <class Element>
__device__ __forceinline__ uint32_t as_word(Pair<Element> x) {
  return reinterpret_cast<uint32_t&>(x);
}
template <class Element>
__device__ __forceinline__ uint32_t subtract(uint32_t x, uint32_t y) {
  return as_word<Element>(__hsub2(as_pair<Element>(x), as_pair<Element>(y)));
}
template <class Element>
__device__ __forceinline__ uint32_t multiply(uint32_t x, uint32_t y) {
  return as_word<Element>(__hmul2(as_pair<Element>(x), as_pair<Element>(y)));
}

// Waits for the warps of a group, `threads` in all; groups have numbers from 0 to 14.
__device__ __forceinline__ void group_sync(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

__device__ __forceinline__ float4 load_shared_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_float(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
#if KVGEN_SM90
__device__ __forceinline__ float4 load_cluster_floats(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
// A bulk copy to the same place in every CTA of the cluster that has a bit in `ctas`, and its bytes to the mbarrier of each.
__device__ __forceinline__ void copy_bulk_to(uint16_t ctas, uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(ctas)
      : "memory");
}
#endif

#if KVGEN_SM90
// --- products of a warp group: D[64xN] += A[64x16] * B[16xN], A from registers, B from shared memory ------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Describes B in shared memory: rows of 64 elements whose 16-byte vectors are exchanged by the row modulo 8 (128-byte swizzle).
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

#define KVGEN_D(c) "+f"(d[c][0]), "+f"(d[c][1]), "+f"(d[c][2]), "+f"(d[c][3])
#define KVGEN_D2(c) KVGEN_D(c), KVGEN_D(c + 1)
#define KVGEN_D4(c) KVGEN_D2(c), KVGEN_D2(c + 2)
#define KVGEN_D8(c) KVGEN_D4(c), KVGEN_D4(c + 4)
#define KVGEN_WGMMA(n, type, registers, a0, a1, a2, a3, b, ...)                                                                          \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, {" a0 "," a1 "," a2 "," a3 "}, " b ", add, 1, 1, 0;\n}"                                                               \
               : __VA_ARGS__                                                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix))
#define KVGEN_WGMMA_OF(n, registers, a0, a1, a2, a3, b, ...)          \
  if constexpr (std::is_same_v<Element, Half>)                        \
    KVGEN_WGMMA(n, "f16", registers, a0, a1, a2, a3, b, __VA_ARGS__); \
  else                                                                \
    KVGEN_WGMMA(n, "bf16", registers, a0, a1, a2, a3, b, __VA_ARGS__)
template <class Element>
__device__ __forceinline__ void wgmma(float (&d)[2][4], const uint32_t (&a)[4], uint64_t matrix) {
  KVGEN_WGMMA_OF("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", "%12", KVGEN_D2(0));
}
template <class Element>
__device__ __forceinline__ void wgmma(float (&d)[4][4], const uint32_t (&a)[4], uint64_t matrix) {
  KVGEN_WGMMA_OF("32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", "%20", KVGEN_D4(0));
}
template <class Element>
__device__ __forceinline__ void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t matrix) {
  KVGEN_WGMMA_OF("64",
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31",
                 "%32", "%33", "%34", "%35", "%36", KVGEN_D8(0));
}
template <class Element>
__device__ __forceinline__ void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t matrix) {
  KVGEN_WGMMA_OF(
      "128",
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63",
      "%64", "%65", "%66", "%67", "%68", KVGEN_D8(0), KVGEN_D8(8));
}
#undef KVGEN_D
#undef KVGEN_D2
#undef KVGEN_D4
#undef KVGEN_D8
#undef KVGEN_WGMMA
#undef KVGEN_WGMMA_OF
#endif

}  // namespace kvgen::linear
