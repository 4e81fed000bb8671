// What the text that TileLang generates calls, in the shapes that are in use, so that it compiles without TileLang.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>

#include "kvgen/ptx.cuh"
#include "kvgen/tilelang_mma.cuh"

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

namespace kvgen {

// Operands of T.gemm in registers: codes, the query times K's scales, and rows of the residual.
//
// A B operand of depth k and n columns is held as 16x16 matrices, those of a depth one after another. Of each a lane has four words:
// columns 0 to 7 with depths 0 to 7 and 8 to 15, then columns 8 to 15. An A operand has rows 0 to 7 and 8 to 15 in turn instead.

// The codes in a word of packed memory: a matrix of 16 rows (tokens of K, channels of V), half of one for 8 bits, two for 2 bits. They
// become denormals, code * 2^-24. Codes in the upper fields of a byte stay there, and are multiples of that. With `complement` those of
// depths 0 to 7 are less by the largest code, so that sums over many tokens stay near zero: tensor cores truncate when they accumulate
// (docs/design.md).
template <int kBits>
struct PackedMatrix {
  static constexpr int kWords = kBits == 8 ? 2 : 1, kMatrices = kBits == 2 ? 2 : 1;

  static __device__ __forceinline__ void expand(const uint32_t* words, int matrix, bool complement, uint32_t* to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = words[kBits == 8 ? half : 0];
      const uint32_t mask = ((1u << kBits) - 1) * 0x00010001u << (kBits == 8 ? 0 : (matrix * 2 + half) * kBits);
      to[2 * half] = complement ? ptx::not_and_or(word, mask, 0x80008000u) : word & mask;
      to[2 * half + 1] = ptx::odd_bytes(word) & mask;
    }
  }
};

// Starts to copy fewer rows of 16 bytes than there are lanes.
template <int kRows>
__device__ __forceinline__ void copy_rows(void* to, const void* from) {
  const int lane = threadIdx.x % 32;
  if (lane < kRows) ptx::copy_async16(ptx::shared_address(static_cast<char*>(to) + lane * 16), static_cast<const char*>(from) + lane * 16);
}

// A lane's words of a sub-tile's codes.
template <int kWords>
__device__ __forceinline__ void load_words(const void* codes, uint32_t (&words)[kWords]) {
  constexpr int kVector = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;
  struct alignas(4 * kVector) Vector {
    uint32_t words[kVector];
  };
#pragma unroll
  for (int i = 0; i < kWords; i += kVector) {
    const Vector vector = static_cast<const Vector*>(codes)[i / kVector * 32 + threadIdx.x % 32];
#pragma unroll
    for (int j = 0; j < kVector; ++j) words[i + j] = vector.words[j];
  }
}

// The B operand of kTokens tokens of K (columns are tokens) or V (columns are channels), whose sub-tiles lie kStride bytes apart.
template <int kBits, int kDim, int kTokens, int kStride, bool kKey>
__device__ __forceinline__ void expand(void* operand, const void* codes) {
  using Packed = PackedMatrix<kBits>;
  constexpr int kColumns = kKey ? 32 : kDim, kDepth = kKey ? kDim : 32;  // of a sub-tile
  constexpr int kTiles = kColumns / 16 / Packed::kMatrices, kSteps = kDepth / 16, kRow = (kKey ? kTokens : kDim) / 16;
  uint32_t* to = static_cast<uint32_t*>(operand);
#pragma unroll
  for (int subtile = 0; subtile < kTokens / 32; ++subtile) {
    uint32_t words[kTiles * kSteps * Packed::kWords];
    load_words(static_cast<const char*>(codes) + subtile * kStride, words);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < kTiles * Packed::kMatrices; ++i) {
        const int tile = i / Packed::kMatrices, at = kKey ? tile * kSteps + step : step * kTiles + tile;
        const int depth = kKey ? step : subtile * 2 + step, column = kKey ? subtile * 2 + i : i;
        Packed::expand(words + at * Packed::kWords, i % Packed::kMatrices, !kKey, to + (depth * kRow + column) * 4);
      }
  }
}
template <int kBits, int kDim, int kTokens, int kStride>
__device__ __forceinline__ void expand_keys(void* operand, const void* codes) {
  expand<kBits, kDim, kTokens, kStride, true>(operand, codes);
}
template <int kBits, int kDim, int kTokens, int kStride>
__device__ __forceinline__ void expand_values(void* operand, const void* codes) {
  expand<kBits, kDim, kTokens, kStride, false>(operand, codes);
}

// The query, an A operand, times K's scales per channel, in `scaled`: rows 0 to 7 rounded, and in rows 8 to 15 what that took from them.
// `zeros` becomes a B operand of 8 columns that all hold the zeros or, without zeros, the scales.
template <int kDim, bool kZero>
__device__ __forceinline__ void scale_query(void* scaled, void* zeros, const void* query, const void* params) {
  constexpr int kKinds = kZero ? 2 : 1;
  const __half2* q = static_cast<const __half2*>(query);
  __half2 *to = static_cast<__half2*>(scaled), *z = static_cast<__half2*>(zeros);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const void* of_step = static_cast<const char*>(params) + step * 32 * kKinds;
    struct alignas(8 * kKinds) Vector {
      uint32_t words[2 * kKinds];
    };
    const Vector vector = static_cast<const Vector*>(of_step)[threadIdx.x % 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __half2 zero = ptx::as_half2(vector.words[half * kKinds]), scale = ptx::as_half2(vector.words[half * kKinds + kKinds - 1]);
      const __half2 high = q[step * 4 + half * 2], low = q[step * 4 + half * 2 + 1], product = __hmul2(high, scale);
      to[step * 4 + half * 2] = product;
      to[step * 4 + half * 2 + 1] = __hfma2(low, scale, __hfma2(high, scale, __hneg2(product)));
      z[step * 2 + half] = zero;
    }
  }
}

// A lane's part of 8 rows of kDim elements of 16 bits as A operand, whose rows 8 to 15 are zero: of its row, if that is `valid`, the quad's
// lanes load 8 neighbouring elements of every 32 each.
template <int kDim>
__device__ __forceinline__ void load_query(void* operand, const void* row, bool valid) {
  uint32_t* to = static_cast<uint32_t*>(operand);
#pragma unroll
  for (int chunk = 0; chunk < kDim / 32; ++chunk) {
    const uint4 v = valid ? static_cast<const uint4*>(row)[chunk * 4] : make_uint4(0, 0, 0, 0);
    uint32_t* words = to + chunk * 8;
    words[0] = v.x, words[2] = v.y, words[4] = v.z, words[6] = v.w;
    words[1] = words[3] = words[5] = words[7] = 0;
  }
}

// A lane's part of 16 rows of kDim elements of 16 bits as B operand whose columns are the rows: of two rows, 8 apart, the quad's lanes load
// 8 neighbouring elements of every 32 each.
template <int kDim>
__device__ __forceinline__ void load_rows(void* operand, const void* row, const void* row_8_below) {
  uint32_t* to = static_cast<uint32_t*>(operand);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int chunk = 0; chunk < kDim / 32; ++chunk) {
      const uint4 v = static_cast<const uint4*>(half ? row_8_below : row)[chunk * 4];
      uint32_t* words = to + chunk * 8 + half * 2;
      words[0] = v.x, words[1] = v.y, words[4] = v.z, words[5] = v.w;
    }
  }
}

// The same with the rows as depth.
template <int kDim>
__device__ __forceinline__ void transpose_rows(void* operand) {
  uint32_t* words = static_cast<uint32_t*>(operand);
#pragma unroll
  for (int i = 0; i < kDim / 4; i += 4) {
    const uint32_t low = ptx::transpose(words[i + 1]), high = ptx::transpose(words[i + 2]);
    words[i] = ptx::transpose(words[i]), words[i + 1] = high, words[i + 2] = low, words[i + 3] = ptx::transpose(words[i + 3]);
  }
}

}  // namespace kvgen
