// Kernels of operations on a matrix, and their launches.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "kvgen/matrix/elements.cuh"

namespace kvgen::matrix {

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
