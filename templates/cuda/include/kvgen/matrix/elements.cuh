// Elements of a matrix [tokens, channels]: their types, and loads and stores of several that lie side by side.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace kvgen::matrix {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The type of one access of kBytes, 16 at most.
template <int kBytes>
struct Access;
template <>
struct Access<16> {
  using Type = uint4;
};
template <>
struct Access<8> {
  using Type = uint2;
};
template <>
struct Access<4> {
  using Type = uint32_t;
};
template <>
struct Access<2> {
  using Type = uint16_t;
};
template <>
struct Access<1> {
  using Type = uint8_t;
};

template <class Element, int N>
struct Accesses {
  static constexpr int kBytes = N * static_cast<int>(sizeof(Element));
  static constexpr int kSize = kBytes < 16 ? kBytes : 16;
  static constexpr int kCount = kBytes / kSize;
  using Type = typename Access<kSize>::Type;
};

// Loads N elements. `from` is a multiple of their bytes, or of 16 where they are more. `kStreaming`: evict them first from the caches.
template <bool kStreaming, class Element, int N>
__device__ __forceinline__ void load(Element (&to)[N], const Element* from) {
  using A = Accesses<Element, N>;
  const auto* words = reinterpret_cast<const typename A::Type*>(from);
#pragma unroll
  for (int i = 0; i < A::kCount; ++i) {
    const typename A::Type word = kStreaming ? __ldcs(words + i) : words[i];
    std::memcpy(reinterpret_cast<char*>(to) + i * A::kSize, &word, A::kSize);
  }
}

template <bool kStreaming, class Element, int N>
__device__ __forceinline__ void store(Element* to, const Element (&from)[N]) {
  using A = Accesses<Element, N>;
  auto* words = reinterpret_cast<typename A::Type*>(to);
#pragma unroll
  for (int i = 0; i < A::kCount; ++i) {
    typename A::Type word;
    std::memcpy(&word, reinterpret_cast<const char*>(from) + i * A::kSize, A::kSize);
    if constexpr (kStreaming)
      __stcs(words + i, word);
    else
      words[i] = word;
  }
}

}  // namespace kvgen::matrix
