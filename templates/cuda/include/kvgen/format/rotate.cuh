// Rotates rows whose channels lie in the lanes of a warp. All lanes of the warp take part.
#pragma once
#include "kvgen/format/elements.cuh"
#include "kvgen/rotation.hpp"

namespace kvgen {

// Butterflies and the factor. A lane has kLow neighbouring channels, the next kLanes lanes have the next ones, and its further registers
// follow behind these.
template <class Rotation, int kLow, int kLanes, int kCount>
__device__ __forceinline__ void mix_channels(float (&x)[kCount], int lane) {
#pragma unroll
  for (int stride = 1; stride < Rotation::kBlock; stride *= 2) {
    if (stride >= kLow && stride < kLow * kLanes) {
      const float sign = lane & (stride / kLow) ? -1.f : 1.f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(~0u, x[i], stride / kLow));
    } else {
      const int apart = stride < kLow ? stride : stride / kLanes;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if ((i & apart) == 0) {
          const float a = x[i], b = x[i + apart];
          x[i] = a + b, x[i + apart] = a - b;
        }
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= Rotation::kFactor;
}

// Negates the channels whose sign is -1. `first` is the first channel of lane 0, a multiple of kLow * kLanes or, with 8 * 32, the lane's
// own.
template <class Rotation, int kLow, int kLanes, int kCount>
__device__ __forceinline__ void negate_channels(float (&x)[kCount], int first, int lane) {
  if constexpr (Rotation::kSigns) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int base = first + i / kLow * (kLow * kLanes);
      const uint32_t signs = Rotation::sign_word(base / 32) >> (base % 32 + kLow * (lane % kLanes));
      x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (signs >> i % kLow & 1) << 31);
    }
  }
}

template <class Element>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  const Element x[2] = {from_float<Element>(low), from_float<Element>(high)};
  uint32_t word;
  memcpy(&word, x, 4);
  return word;
}

// Rotates kRuns runs of channels of a row that a quad of lanes holds, the first of which begins at channel `first`.
template <class Rotation, class Element, int kLow, int kRuns>
__device__ __forceinline__ void rotate_quad(uint4* runs, int first, int lane) {
  float x[kRuns * kLow];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const uint32_t words[4] = {runs[r].x, runs[r].y, runs[r].z, runs[r].w};
#pragma unroll
    for (int i = 0; i < kLow / 2; ++i) {
      const float2 pair = to_floats<Element>(words[i]);
      x[r * kLow + 2 * i] = pair.x, x[r * kLow + 2 * i + 1] = pair.y;
    }
  }
  negate_channels<Rotation, kLow, 4>(x, first, lane);
  mix_channels<Rotation, kLow, 4>(x, lane);
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const auto word = [&](int i) { return pair_of<Element>(x[r * kLow + 2 * i], x[r * kLow + 2 * i + 1]); };
    runs[r].x = word(0), runs[r].y = word(1);
    runs[r].z = kLow == 8 ? word(2) : runs[r].x, runs[r].w = kLow == 8 ? word(3) : runs[r].y;  // a half run is there twice (load_run)
  }
}

// Rotates a row of which a lane has its vectors of every run (`ChannelRuns`).
template <class Rotation, class Runs, class Element>
__device__ __forceinline__ void rotate_runs(uint4 (&runs)[Runs::kCount], int lane) {
  if constexpr (Runs::kFull > 0) rotate_quad<Rotation, Element, 8, Runs::kFull>(runs, 0, lane);
  if constexpr (Runs::kHalf > 0) rotate_quad<Rotation, Element, 4, Runs::kHalf>(runs + Runs::kFull, Runs::kFull * 32, lane);
}

// Rotates rows of which every lane has eight channels from `channel` on, one vector after the other.
template <class Rotation, class Element>
__device__ __forceinline__ uint4 rotate_vector(const uint4& v, int channel, int lane) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float x[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats<Element>(words[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
  negate_channels<Rotation, 8, 1>(x, channel, lane);
  mix_channels<Rotation, 8, 32>(x, lane);
  return make_uint4(pair_of<Element>(x[0], x[1]), pair_of<Element>(x[2], x[3]), pair_of<Element>(x[4], x[5]), pair_of<Element>(x[6], x[7]));
}

// Copies `rows` rows of kHeadDim channels of K or V from from(i) to to(i), rotated if that operand is, and if i >= held. All kThreads
// threads call it.
template <class Quant, int kHeadDim, int kThreads, class From, class To>
__device__ __forceinline__ void copy_rotated(int rows, int held, From&& from, To&& to) {
  using Element = std::remove_const_t<std::remove_pointer_t<decltype(to(0))>>;
  constexpr int kVectors = kHeadDim / 8;
#pragma unroll 1
  for (int at = threadIdx.x; at < align_up(rows * kVectors, 32); at += kThreads) {
    const int row = min(at / kVectors, rows - 1), channel = at % kVectors * 8;
    const uint4 given = *reinterpret_cast<const uint4*>(from(row) + channel);
    uint4 v = given;
    if constexpr (kRotated<Quant>) v = rotate_vector<Rotation<Quant>, Element>(given, channel, threadIdx.x % 32);
    if (row < held) v = given;
    if (at < rows * kVectors) *reinterpret_cast<uint4*>(to(row) + channel) = v;
  }
}

}  // namespace kvgen
