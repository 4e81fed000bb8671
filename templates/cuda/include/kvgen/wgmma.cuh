// Wrappers of wgmma, the asynchronous MMA of a warpgroup, and of what goes with it. SM90 only: nothing else instantiates
// the code that calls them.
#pragma once
#include <cstdint>

#include "kvgen/ptx.cuh"

namespace kvgen::ptx {

// Describes B in shared memory as 8x8 matrices of fp16: for each tile of eight columns the matrix of k-slots 0..7, then that of 8..15. A
// matrix is 128 bytes; a row of it has eight k-slots of one column. The descriptor's lower word has the address, a multiple of 16, and the
// distance of the two matrices; the upper word has that of tiles. All are in units of 16 bytes, so that a distance may be added to the
// lower word.
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address) { return address >> 4 | 128 / 16 << 16; }
__device__ __forceinline__ constexpr uint32_t matrix_distance(int bytes) { return static_cast<uint32_t>(bytes) / 16; }

// The accumulators of eight columns are those of mma.sync: rows g and g + 8 of the warp's 16, columns 2t and 2t + 1.
#define KVGEN_SUMS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])

// D[64 x 8n] = A[64 x 16] * B[16 x 8n], plus D with kAdd, for n arrays of sums. A is in registers: a warp's fragment is that of mma.sync for
// its 16 rows. Until `wgmma_wait` nothing may touch the registers of A and D.
template <bool kAdd>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint32_t b, float (&d0)[4], float (&d1)[4]) {
  asm volatile(
      "{\n.reg .b64 matrix;\nmov.b64 matrix, {%12, 16};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, matrix, %13, 1, 1, 0;\n}"
      : KVGEN_SUMS(d0), KVGEN_SUMS(d1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint32_t b, float (&d0)[4], float (&d1)[4], float (&d2)[4], float (&d3)[4]) {
  asm volatile(
      "{\n.reg .b64 matrix;\nmov.b64 matrix, {%20, 16};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, "
      "matrix, %21, 1, 1, 0;\n}"
      : KVGEN_SUMS(d0), KVGEN_SUMS(d1), KVGEN_SUMS(d2), KVGEN_SUMS(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint32_t b, float (&d0)[4], float (&d1)[4], float (&d2)[4], float (&d3)[4],
                                      float (&d4)[4], float (&d5)[4], float (&d6)[4], float (&d7)[4]) {
  asm volatile(
      "{\n.reg .b64 matrix;\nmov.b64 matrix, {%36, 16};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
      "%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, matrix, %37, 1, 1, 0;\n}"
      : KVGEN_SUMS(d0), KVGEN_SUMS(d1), KVGEN_SUMS(d2), KVGEN_SUMS(d3), KVGEN_SUMS(d4), KVGEN_SUMS(d5), KVGEN_SUMS(d6), KVGEN_SUMS(d7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kAdd));
}
#undef KVGEN_SUMS

// Orders earlier accesses to the registers of A and D before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all committed groups.
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Stores four 8x8 matrices of 16-bit elements, transposed. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
// Makes this thread's stores to shared memory visible to wgmma, after a barrier.
__device__ __forceinline__ void wgmma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace kvgen::ptx
