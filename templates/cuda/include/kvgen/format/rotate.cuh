// Rotates rows whose channels lie in the lanes of a warp. All lanes of the warp take part.
#pragma once
#include <algorithm>

#include "kvgen/format/elements.cuh"
#include "kvgen/ptx.cuh"
#include "kvgen/rotation.hpp"

namespace kvgen {

__device__ __forceinline__ void butterfly(float& x, float& y) {
  const float a = x, b = y;
  x = a + b, y = a - b;
}

// Butterflies from a stride on. A lane has kLow neighbouring channels, the next kLanes lanes have the next ones, and its further registers
// follow behind these. Of few registers, two butterflies between lanes take one latency of shuffles: every lane gets all four channels.
template <class Rotation, int kLow, int kLanes, int kStride, int kCount>
__device__ __forceinline__ void mix_from(float (&x)[kCount], int lane) {
  if constexpr (kStride < Rotation::kBlock) {
    constexpr auto between = [](int stride) { return stride < Rotation::kBlock && stride >= kLow && stride < kLow * kLanes; };
    constexpr bool kBoth = kCount <= 4 && between(kStride) && between(2 * kStride);
    constexpr int kApart = kStride < kLow ? kStride : kStride / kLanes, kStep = kStride / kLow;
    const float sign = lane & kStep ? -1.f : 1.f, further = lane & 2 * kStep ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if constexpr (kBoth) {
        const float next = __shfl_xor_sync(~0u, x[i], kStep), other = __shfl_xor_sync(~0u, x[i], 2 * kStep),
                    last = __shfl_xor_sync(~0u, x[i], 3 * kStep);
        x[i] = __fmaf_rn(further, __fmaf_rn(sign, x[i], next), __fmaf_rn(sign, other, last));
      } else if constexpr (between(kStride)) {
        x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(~0u, x[i], kStep));
      } else if ((i & kApart) == 0) {
        butterfly(x[i], x[i + kApart]);
      }
    mix_from<Rotation, kLow, kLanes, kStride*(kBoth ? 4 : 2)>(x, lane);
  }
}

// All butterflies, and the factor.
template <class Rotation, int kLow, int kLanes, int kCount>
__device__ __forceinline__ void mix_channels(float (&x)[kCount], int lane) {
  mix_from<Rotation, kLow, kLanes, 1>(x, lane);
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

// Powers of two of the factor that the matrix of `rotate_query` has.
template <class Rotation>
constexpr int kHalvings = Rotation::kBlock < 64    ? 2
                          : Rotation::kBlock < 256 ? 3
                                                   : 4;
// What it leaves for the scores, 1 or 2^(-1/2).
template <class Rotation>
constexpr float score_factor() {
  if constexpr (Rotation::kBlock > 0)
    return Rotation::kFactor * (1 << kHalvings<Rotation>);
  else
    return 1.f;
}

// Rotates eight rows of q, of each of which a quad of lanes has the vectors of every run (`ChannelRuns`): B fragments of k-steps. Products
// with a matrix of +-1 are the butterflies within a k-step; they take half of the instructions that shuffles do. Their fp32 sums have an
// order of their own, so only q, whose bits nothing keeps, is rotated like this.
template <class Rotation, class Runs, class Element>
__device__ __forceinline__ void rotate_query(uint4 (&runs)[Runs::kCount], int lane) {
  constexpr bool kHalf = std::is_same_v<Element, Half>;
  constexpr uint32_t kOnes = kHalf ? 0x3c003c00u - kHalvings<Rotation> * 0x04000400u : 0x3f803f80u - kHalvings<Rotation> * 0x00800080u;
  // The lane's two columns of the matrix in row g, of which the second one is odd; rows g + 8 and columns 8 further on differ in the sign
  // of their product. A k-step of a full run has k-slots of two blocks of 16 channels.
  const int g = lane / 4, column = lane % 4 * 2;
  const auto ones = [&](int mixed) { return kOnes ^ (__popc(g & column & mixed) % 2 ? 0x80008000u : 0u) ^ (g % 2 ? 0x80000000u : 0u); };
  const uint32_t of_half = ones(6), of_full = Rotation::kBlock > 16 ? of_half : (g ^ column) & 4 ? 0u : ones(2);
  float sums[2 * Runs::kFull + Runs::kHalf][4] = {};
#pragma unroll
  for (int r = 0; r < Runs::kCount; ++r) {
    uint32_t words[4] = {runs[r].x, runs[r].y, runs[r].z, runs[r].w};
    if constexpr (Rotation::kSigns) {
      const int base = Runs::channel(r);
      const uint32_t signs = Rotation::sign_word(base / 32) >> (base % 32 + Runs::lane_channels(r) * (lane % 4)) & 0xffu;
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] ^= (signs >> 2 * i) * 0x40008000u & 0x80008000u;  // bits 0 and 1 to the signs of a pair
    }
    const uint32_t a = Runs::is_half(r) ? of_half : of_full, negated = a ? a ^ 0x80008000u : 0u;
#pragma unroll
    for (int step = 0; step < Runs::lane_channels(r) / 4; ++step)
      if constexpr (kHalf)
        ptx::mma(sums[Runs::tile(r) + step], a, a, a, negated, words[2 * step], words[2 * step + 1]);
      else
        ptx::mma_bfloat(sums[Runs::tile(r) + step], a, a, a, negated, words[2 * step], words[2 * step + 1]);
  }
  // The two k-steps of a full run are of the same blocks; further ones are those of further channels.
  constexpr int kSteps = Runs::kFull ? 2 * Runs::kFull : Runs::kHalf, kMixed = std::max(Runs::kFull ? 2 : 1, Rotation::kBlock / 16);
#pragma unroll
  for (int apart = 1; apart < kMixed; apart *= 2)
#pragma unroll
    for (int at = 0; at < kSteps * 4; ++at)
      if ((at / 4 & apart) == 0) butterfly(sums[at / 4][at % 4], sums[at / 4 + apart][at % 4]);
  // Sums are in rows of channels. Transposed as 8x8 matrices, they are B fragments again.
#pragma unroll
  for (int r = 0; r < Runs::kCount; ++r) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &sums[Runs::tile(r) + (Runs::is_half(r) ? 0 : i / 2)][i % 2 * 2];  // a half run is there twice (load_run)
      words[i] = ptx::transpose(pair_of<Element>(pair[0], pair[1]));
    }
    runs[r] = make_uint4(words[0], words[1], words[2], words[3]);
  }
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
