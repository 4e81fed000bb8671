// Wrappers of single instructions. Instructions of SM90 are compiled for SM90 only, since a module that contains one does not load on other
// GPUs.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVGEN_SM90 1
#else
#define KVGEN_SM90 0
#endif

namespace kvgen::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// D[16x8] += A[16x16] * B[16x8], fp16 operands, fp32 sums. Denormal operands are exact.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same of bfloat16 operands.
__device__ __forceinline__ void mma_bfloat(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D[16x8] += A[16x32] * B[32x8] of unsigned and signed bytes, 32-bit sums; and of 16 columns of A.
__device__ __forceinline__ void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Transposes an 8x8 matrix of 16-bit elements held by the warp.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Converts {lo, hi} to two halves, rounded to nearest.
__device__ __forceinline__ uint32_t pack_half2(float lo, float hi) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ uint32_t as_u32(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __half2 as_half2(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Returns x. The compiler cannot recompute the result, so it stays in its register.
template <class T>
__device__ __forceinline__ T pinned(T x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(x));
  else
    asm volatile("" : "+r"(x));
  return x;
}

// (~x & mask) | set
__device__ __forceinline__ uint32_t not_and_or(uint32_t x, uint32_t mask, uint32_t set) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(y) : "r"(x), "r"(mask), "r"(set));
  return y;
}

// (x & mask) | (y & ~mask). The compiler would join the mask with a later one, which takes an instruction more.
__device__ __forceinline__ uint32_t select(uint32_t mask, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(z) : "r"(mask), "r"(x), "r"(y));
  return z;
}

// Bytes 1 and 3 of a word as two 16-bit fields.
__device__ __forceinline__ uint32_t odd_bytes(uint32_t x) { return __byte_perm(x, 0, 0x4341); }

// --- shared memory ---------------------------------------------------------------------------------------------------

// `volatile` with a memory clobber, because asynchronous copies write the data that these functions read.
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared16(uint32_t address, const int (&v)[4]) {
  asm volatile("st.shared.v4.s32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// --- asynchronous copies ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// The same by the first kLanes lanes, predicated instead of branched.
template <int kLanes>
__device__ __forceinline__ void copy_async16_if(uint32_t shared, const void* global, int lane) {
  asm volatile("{\n.reg .pred mine;\nsetp.lt.s32 mine, %2, %3;\n@mine cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared),
               "l"(global), "r"(lane), "n"(kLanes)
               : "memory");
}
template <int kBytes>  // 4 or 8
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes) : "memory");
}
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

#if KVGEN_SM90
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra finish;\nbra retry;\nfinish:\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
// Orders this thread's stores before later bulk copies to the same addresses.
__device__ __forceinline__ void copy_bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// Prefetches bytes into L2; addresses and sizes are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// --- clusters --------------------------------------------------------------------------------------------------------

// A cluster barrier in two steps: stores before the arrival are visible after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// An arrival that releases no stores, and so does not wait for them.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// Stores to another CTA that count their bytes on its mbarrier.
__device__ __forceinline__ void send_cluster(uint32_t address, float v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(v), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send_cluster(uint32_t address, float2 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(address), "f"(v.x), "f"(v.y),
               "r"(barrier)
               : "memory");
}
#endif

// --- order between CTAs, and between launches ------------------------------------------------------------------------

// Lets the next launch of the stream start on free resources.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if KVGEN_SM90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the launch before this one has ended and its writes are visible. Since every kernel of a step waits, this holds for all
// earlier launches of the stream.
__device__ __forceinline__ void griddepcontrol_wait() {
#if KVGEN_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads the current value, past the L1 cache.
__device__ __forceinline__ int load_relaxed(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Adds one and returns the previous value. Writes that this thread has seen are visible to the threads that read the sum.
__device__ __forceinline__ int arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace kvgen::ptx
