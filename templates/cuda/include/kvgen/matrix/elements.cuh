// Elements of a matrix [tokens, channels]: codes, vectors of elements, and the tiles of CTAs and threads.
#pragma once
#include <cstring>
#include <type_traits>

#include "kvgen/format/elements.cuh"

namespace kvgen::matrix {

// Symmetric 8-bit codes: q = clamp(rne(x / scale), -127, 127), read back as q * scale; a scale of 0 makes every code 0.

constexpr float kLevels = 127.f;

enum class Quotient {
  divide,  // IEEE division for every element
  refine,  // a reciprocal per scale, and two Newton steps for every element: the same quotient
};

__device__ __forceinline__ int8_t clamp_code(float quotient) {
  const int code = __float2int_rn(quotient);
  return static_cast<int8_t>(max(-127, min(127, code)));
}

__device__ __forceinline__ int8_t divided(float x, float scale) { return clamp_code(scale == 0.f ? 0.f : __fdiv_rn(x, scale)); }

template <Quotient kHow>
class Divisor;

template <>
class Divisor<Quotient::divide> {
 public:
  __device__ __forceinline__ void set(float scale) { scale_ = scale; }
  __device__ __forceinline__ int8_t code(float x) const { return divided(x, scale_); }

 private:
  float scale_;
};

// With r = RN(1 / s), q' = q + r * (x - s * q) by fused multiply-adds is RN(x / s) once q is within one unit in the last place (Markstein,
// 1990). The first estimate may be off by two, so the step is taken twice. It needs remainders that do not underflow: scales outside
// 2^-100 .. 2^100 are divided by. A quotient beyond 256 keeps its estimate, because its remainder may overflow and its code is 127 anyway.
template <>
class Divisor<Quotient::refine> {
 public:
  __device__ __forceinline__ void set(float scale) {
    scale_ = scale, reciprocal_ = scale >= 0x1p-100f && scale <= 0x1p100f ? __frcp_rn(scale) : 0.f;
  }
  __device__ __forceinline__ int8_t code(float x) const {
    if (reciprocal_ == 0.f) return divided(x, scale_);
    const float estimate = x * reciprocal_;
    const float once = step(x, estimate);
    const float twice = step(x, once);
    return clamp_code(fabsf(estimate) < 256.f ? twice : estimate);
  }

 private:
  __device__ __forceinline__ float step(float x, float q) const { return __fmaf_rn(__fmaf_rn(-scale_, q, x), reciprocal_, q); }

  float scale_, reciprocal_;
};

__device__ __forceinline__ float to_float(float x) { return x; }
using kvgen::to_float;

template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, Half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<Element, Bfloat>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// Accesses of 16 bytes at most to N elements.
template <class Element, int N>
struct Accesses {
  static constexpr int kBytes = N * static_cast<int>(sizeof(Element));
  static constexpr int kSize = kBytes < 16 ? kBytes : 16;
  static constexpr int kCount = kBytes / kSize;
  template <int kOf, class T, class Else>
  using If = std::conditional_t<kSize == kOf, T, Else>;
  using Type = If<16, uint4, If<8, uint2, If<4, uint32_t, If<2, uint16_t, uint8_t>>>>;
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

// How a matrix is divided among CTAs and threads: tiles of kRows rows for each of Schedule::kThreadsY rows of threads, and kVector channels
// for each of Schedule::kThreadsX threads. Tiles are numbered along the channels first, so that CTAs which run together share DRAM pages.

// Row-major, with `stride` elements from one row to the next.
template <class Element>
struct Matrix {
  Element* data;
  int64_t stride;

  __device__ Element* at(int64_t row, int64_t channel) const { return data + row * stride + channel; }
};

struct Extent {
  int64_t tokens, channels;
  int channel_tiles;
};

template <class Schedule, int kVector>
struct Place {
  int64_t tile;     // along the tokens
  int64_t channel;  // the thread's first
  int column, row;  // of the thread

  __device__ explicit Place(const Extent& extent) {
    tile = blockIdx.x / extent.channel_tiles;
    column = static_cast<int>(threadIdx.x) % Schedule::kThreadsX, row = static_cast<int>(threadIdx.x) / Schedule::kThreadsX;
    const int64_t first = static_cast<int64_t>(blockIdx.x % extent.channel_tiles) * Schedule::kThreadsX * kVector;
    channel = first + static_cast<int64_t>(column) * kVector;
  }
};

// The scales of a thread's channels. Where `kShared`, the first row of threads loads those of the CTA's channels into shared memory.
template <class Schedule, int kVector>
__device__ __forceinline__ void load_scales(float (&to)[kVector], const float* scales, const Place<Schedule, kVector>& place,
                                            const Extent& extent) {
  const bool inside = place.channel < extent.channels;
  if constexpr (Schedule::kSharedScales) {
    __shared__ float staged[Schedule::kThreadsX * kVector];
    float* mine = staged + place.column * kVector;
    if (place.row == 0 && inside)
      for (int i = 0; i < kVector; ++i) mine[i] = scales[place.channel + i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = mine[i];
  } else if (inside) {
    load<false>(to, scales + place.channel);
  }
}

}  // namespace kvgen::matrix
