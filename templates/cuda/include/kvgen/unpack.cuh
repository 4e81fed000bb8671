// Dequantizes a whole cache, element by element: for tests and for conversion between layouts.
#pragma once
#include "kvgen/args.cuh"
#include "kvgen/places.cuh"
#include "kvgen/scaler.cuh"

namespace kvgen {
namespace unpacking {

constexpr int kThreads = 256;

template <class Element>
__device__ __forceinline__ Element rounded(float x) {
  if constexpr (std::is_same_v<Element, __half>) return __float2half_rn(x);
  else return __float2bfloat16_rn(x);
}

template <class Places, class Element>
__device__ __forceinline__ Element element(const uint8_t* block, int token, int channel) {
  using Quant = typename Places::Quant;
  const int64_t bit = Places::code_bit(token, channel);
  if constexpr (!Quant::kQuantized) {
    return *reinterpret_cast<const Element*>(block + bit / 8);
  } else {
    const int code = (block[bit / 8] >> (bit % 8) & ((1 << Quant::kBits) - 1)) - Quant::kOffset;
    const float scale = __half2float(*reinterpret_cast<const __half*>(block + Places::param_offset(0, token, channel)));
    float zero = 0.f;
    if constexpr (Quant::kZero) zero = __half2float(*reinterpret_cast<const __half*>(block + Places::param_offset(1, token, channel)));
    return rounded<Element>(__fmaf_rn(static_cast<float>(code), scale, zero));
  }
}

// Eight neighbouring channels of one token.
template <class Places, class Element>
__device__ __forceinline__ void write8(const uint8_t* block, int token, int channel, Element* out) {
  Element values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = element<Places, Element>(block, token, channel + i);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = values[i];
}

// A CTA per (head, block, sequence); the last block of a sequence may be the residual.
template <class Format, bool kPaged>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const UnpackArgs args) {
  using Element = typename Format::Element;
  constexpr int kPieces = Format::kHeadDim / 8;
  const CacheArgs& cache = args.cache;
  const int sequence = blockIdx.y, head = blockIdx.x % cache.kv_heads, block = blockIdx.x / cache.kv_heads;
  const int length = cache.lengths[sequence], start = block * Format::kTokens;
  const int tokens = min(min(length, args.tokens) - start, Format::kTokens);
  if (tokens <= 0) return;
  const bool packed = block < length / Format::kTokens;
  const uint8_t* bytes = packed ? cache.block<kPaged>(sequence, head, block, Format::kBlockBytes) : nullptr;
  const int64_t slots = (static_cast<int64_t>(sequence) * cache.kv_heads + head) * Format::kTokens * Format::kHeadDim;
  for (int i = threadIdx.x; i < tokens * kPieces; i += kThreads) {
    const int token = i / kPieces, channel = i % kPieces * 8;
    Element* k = args.k.row<Element>(sequence, start + token, head) + channel;
    Element* v = args.v.row<Element>(sequence, start + token, head) + channel;
    if (packed) {
      write8<Places<Format, Which::key>>(bytes, token, channel, k);
      write8<Places<Format, Which::value>>(bytes, token, channel, v);
    } else {
      const int64_t slot = slots + token * Format::kHeadDim + channel;
      *reinterpret_cast<uint4*>(k) = *reinterpret_cast<const uint4*>(static_cast<const Element*>(cache.k_residual) + slot);
      *reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(static_cast<const Element*>(cache.v_residual) + slot);
    }
  }
}

}  // namespace unpacking

template <class Format, bool kPaged>
cudaError_t launch_unpack(const UnpackArgs& args, cudaStream_t stream) {
  if (args.cache.batch == 0 || args.cache.kv_heads == 0 || args.tokens == 0) return cudaSuccess;
  const dim3 grid(args.cache.kv_heads * ceil_div(args.tokens, Format::kTokens), args.cache.batch);
  unpacking::unpack_kernel<Format, kPaged><<<grid, unpacking::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvgen
