// How a matrix is divided among CTAs and threads: tiles of kRows rows for each of Schedule::kThreadsY rows of threads, and kVector channels
// for each of Schedule::kThreadsX threads. Tiles are numbered along the channels first, so that CTAs which run together share DRAM pages.
#pragma once
#include <cstdint>

#include "kvgen/matrix/elements.cuh"

namespace kvgen::matrix {

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
