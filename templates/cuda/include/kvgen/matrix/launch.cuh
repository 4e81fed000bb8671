// Launches of the matrix kernels. If vectors of kVector elements do not fit the rows, the same schedule accesses single elements.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "kvgen/matrix/kernels.cuh"

namespace kvgen::matrix {

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
