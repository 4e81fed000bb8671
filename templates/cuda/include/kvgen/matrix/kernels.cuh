// Kernels of operations on a matrix, and their launches.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kvgen/format/elements.cuh"

namespace kvgen::matrix {

// Elements of a matrix [tokens, channels]: codes, vectors of elements, and the tiles of CTAs and threads.

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

template <class Schedule, int kVector>
struct ToCode {
  Divisor<Schedule::kQuotient> divisor[kVector];

  __device__ __forceinline__ explicit ToCode(const float (&scale)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) divisor[i].set(scale[i]);
  }
  __device__ __forceinline__ int8_t operator()(typename Schedule::Element x, int i) const { return divisor[i].code(to_float(x)); }
};

template <class Schedule, int kVector>
struct FromCode {
  const float (&scale)[kVector];

  __device__ __forceinline__ explicit FromCode(const float (&scale)[kVector]) : scale(scale) {}
  __device__ __forceinline__ typename Schedule::Element operator()(int8_t code, int i) const {
    return from_float<typename Schedule::Element>(static_cast<float>(code) * scale[i]);
  }
};

// Maps every element of `from` to one of `to`. A thread loads all of its rows before it stores the first.
template <template <class, int> class Map, class Schedule, int kVector, class From, class To>
__global__ void __launch_bounds__(Schedule::kThreads)
    map_kernel(Matrix<const From> from, Matrix<To> to, const float* scales, Extent extent) {
  constexpr int kRows = Schedule::kRows, kStep = Schedule::kThreadsY;
  const Place<Schedule, kVector> place(extent);
  float scale[kVector];
  load_scales<Schedule, kVector>(scale, scales, place, extent);
  if (place.channel >= extent.channels) return;
  const int64_t first = place.tile * (kRows * kStep) + place.row;
  From x[kRows][kVector];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (first + i * kStep < extent.tokens) load<Schedule::kStreaming>(x[i], from.at(first + i * kStep, place.channel));
  const Map<Schedule, kVector> map(scale);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i * kStep >= extent.tokens) return;
    To y[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) y[j] = map(x[i][j], j);
    store<Schedule::kStreaming>(to.at(first + i * kStep, place.channel), y);
  }
}

constexpr int kRowsInFlight = 4;  // of a thread that looks for maxima

// Raises `maxima` [channels], zero before, to the largest |x|: magnitudes compare as their bits do, and a maximum does not depend on order.
// The CTAs of one tile of channels take its rows round-robin.
template <class Schedule, int kVector>
__global__ void __launch_bounds__(Schedule::kThreads)
    maxima_kernel(Matrix<const typename Schedule::Element> x, int* maxima, Extent extent, int slices) {
  __shared__ int joined[Schedule::kThreadsX * kVector];
  const Place<Schedule, kVector> place(extent);
  for (int i = static_cast<int>(threadIdx.x); i < Schedule::kThreadsX * kVector; i += Schedule::kThreads) joined[i] = 0;
  __syncthreads();
  const bool inside = place.channel < extent.channels;
  const int64_t step = static_cast<int64_t>(slices) * Schedule::kThreadsY;
  float top[kVector] = {};
  for (int64_t row = place.tile * Schedule::kThreadsY + place.row; inside && row < extent.tokens; row += step * kRowsInFlight) {
    typename Schedule::Element values[kRowsInFlight][kVector];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i)
      load<false>(values[i], x.at(row + i * step < extent.tokens ? row + i * step : row, place.channel));
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i)
#pragma unroll
      for (int j = 0; j < kVector; ++j) top[j] = fmaxf(top[j], fabsf(to_float(values[i][j])));
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    if (inside) atomicMax(joined + place.column * kVector + j, __float_as_int(top[j]));
  __syncthreads();
  if (place.row == 0 && inside)
    for (int j = 0; j < kVector; ++j) atomicMax(maxima + place.channel + j, joined[place.column * kVector + j]);
}

// In place: the bits of a maximum become the scale.
static __global__ void scales_kernel(float* scales, int64_t channels) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < channels) scales[i] = __fdiv_rn(scales[i], kLevels);
}

// Launches of the matrix kernels. If vectors of kVector elements do not fit the rows, the same schedule accesses single elements.

constexpr int64_t kMostCtas = INT32_MAX;
constexpr int kScaleCtasPerSm = 8;  // CTAs that look for maxima, at least, where there are rows enough
constexpr int kScaleThreads = 256;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Schedule, int kVector>
Extent extent_of(int64_t tokens, int64_t channels) {
  return {tokens, channels, static_cast<int>(ceil_div(channels, Schedule::kThreadsX * kVector))};
}

// CTAs of a launch over a matrix; more than kMostCtas cannot be launched.
template <class Schedule, int kVector>
int64_t ctas_of(int64_t tokens, int64_t channels) {
  return extent_of<Schedule, kVector>(tokens, channels).channel_tiles * ceil_div(tokens, Schedule::kThreadsY * Schedule::kRows);
}

template <template <class, int> class Map, class Schedule, int kVector, class From, class To>
void launch_map(const Matrix<const From>& from, const Matrix<To>& to, const float* scales, int64_t tokens, int64_t channels,
                cudaStream_t stream) {
  const Extent extent = extent_of<Schedule, kVector>(tokens, channels);
  const auto ctas = static_cast<unsigned>(ctas_of<Schedule, kVector>(tokens, channels));
  map_kernel<Map, Schedule, kVector, From, To><<<dim3(ctas), Schedule::kThreads, 0, stream>>>(from, to, scales, extent);
}

// `scales` [channels] of a matrix: zeroed, raised to the maxima, divided.
template <class Schedule, int kVector>
void launch_scales(const Matrix<const typename Schedule::Element>& x, float* scales, int64_t tokens, int64_t channels, int sms,
                   cudaStream_t stream) {
  cudaMemsetAsync(scales, 0, channels * sizeof(float), stream);
  const Extent extent = extent_of<Schedule, kVector>(tokens, channels);
  const int64_t most = ceil_div(tokens, Schedule::kThreadsY * kRowsInFlight);
  const int64_t wanted = ceil_div(static_cast<int64_t>(sms) * kScaleCtasPerSm, extent.channel_tiles);
  const int slices = static_cast<int>(std::max<int64_t>(1, std::min(most, wanted)));
  int* maxima = reinterpret_cast<int*>(scales);
  const unsigned ctas = static_cast<unsigned>(extent.channel_tiles) * slices;
  maxima_kernel<Schedule, kVector><<<dim3(ctas), Schedule::kThreads, 0, stream>>>(x, maxima, extent, slices);
  const auto groups = static_cast<unsigned>(ceil_div(channels, kScaleThreads));
  scales_kernel<<<dim3(groups), kScaleThreads, 0, stream>>>(scales, channels);
}

}  // namespace kvgen::matrix
