// Rotary embedding of q and K at their positions, and K's rotation of both. A thread has eight channels of a row.
#pragma once
#include <cuda_runtime.h>

#include "kvgen/format/rotate.cuh"

namespace kvgen {

// Rows [tokens, heads, head_dim] of one of q and K.
struct RotaryRows {
  const void* from;
  void* to;
  int64_t from_token, from_head, to_token, to_head;  // strides, in elements
};

struct RotaryArgs {
  RotaryRows q, k;
  int q_heads, k_heads;
  int64_t tokens;
  const int64_t* positions;
  const float *cos, *sin;  // [positions, half]
  int half;                // pairs of channels that are turned, a multiple of 8
  bool interleaved;        // whether a pair is 2i and 2i + 1, or i and i + half
};

// The turned channels of a row from `channel` on.
template <class Element>
__device__ __forceinline__ void turn(float (&x)[8], const Element* row, int channel, const RotaryArgs& a, int64_t position) {
  const bool upper = !a.interleaved && channel >= a.half;
  const int64_t first = position * a.half + (a.interleaved ? channel / 2 : channel - (upper ? a.half : 0));
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_float(row[channel + i]);
  if (channel >= 2 * a.half) return;
  float other[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) other[i] = a.interleaved ? x[i ^ 1] : to_float(row[channel + i + (upper ? -a.half : a.half)]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t at = first + (a.interleaved ? i / 2 : i);
    const bool high = a.interleaved ? i & 1 : upper;
    x[i] = x[i] * a.cos[at] + (high ? other[i] : -other[i]) * a.sin[at];
  }
}

template <class Element, class Rotation, int kHeadDim, int kThreads>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryArgs a) {
  constexpr int kVectors = kHeadDim / 8;
  const int heads = a.q_heads + a.k_heads, lane = threadIdx.x % 32;
  const int64_t count = a.tokens * heads * kVectors, mine = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t at = mine < count ? mine : count - 1;  // every lane takes part in shuffles
  const int64_t token = at / kVectors / heads;
  const int head = static_cast<int>(at / kVectors % heads), channel = static_cast<int>(mine % kVectors) * 8;
  const bool of_q = head < a.q_heads;
  const RotaryRows& rows = of_q ? a.q : a.k;
  const int own = of_q ? head : head - a.q_heads;
  float x[8];
  turn(x, static_cast<const Element*>(rows.from) + token * rows.from_token + own * rows.from_head, channel, a, a.positions[token]);
  if constexpr (Rotation::kBlock > 0) {
    negate_channels<Rotation, 8, 1>(x, channel, lane);
    mix_channels<Rotation, 8, 32>(x, lane);
  }
  if (mine >= count) return;
  uint4* to = reinterpret_cast<uint4*>(static_cast<Element*>(rows.to) + token * rows.to_token + own * rows.to_head + channel);
  *to = make_uint4(pair_of<Element>(x[0], x[1]), pair_of<Element>(x[2], x[3]), pair_of<Element>(x[4], x[5]), pair_of<Element>(x[6], x[7]));
}

template <class Element, class Rotation, int kHeadDim>
void launch_rotary(const RotaryArgs& a, cudaStream_t stream) {
  constexpr int kThreads = 128;
  const int64_t ctas = (a.tokens * (a.q_heads + a.k_heads) * (kHeadDim / 8) + kThreads - 1) / kThreads;
  rotary_kernel<Element, Rotation, kHeadDim, kThreads><<<static_cast<int>(ctas), kThreads, 0, stream>>>(a);
}

}  // namespace kvgen
