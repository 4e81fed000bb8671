// Online softmax with a lazy reference: probabilities are 2^(x - m), and m moves only when a weight p * scale_v would leave
// fp16. m is no maximum but a reference chosen so that weights lie near 2^10, whatever the scale of V.
#pragma once
#include "kvgen/ptx.cuh"
#include "kvgen/traits.cuh"

namespace kvgen {

constexpr float kWeightLimit = 60000.f;  // below fp16's largest
constexpr float kWeightAim = 10.f;       // log2 of the largest weight after the reference moved
constexpr float kSmallestScale = 9.1e-13f;  // a constant group weighs nothing, but its probabilities stay bounded

// What a warp knows of one column tile. Lane (g, t) holds columns 2t, 2t + 1; with halves, of four columns, t % 2 in place of t.
template <class Traits>
struct State {
  float reference[2];
  float sum[2];                            // of p
  float affine[Traits::kValueGroups][2];   // of p * zero_v
  float out[Traits::kRowTiles][4];         // of p * code: row g of columns c, then row g + 8

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      reference[c] = -1e30f, sum[c] = 0.f;
      for (int q = 0; q < Traits::kValueGroups; ++q) affine[q][c] = 0.f;
    }
#pragma unroll
    for (int u = 0; u < Traits::kRowTiles; ++u) out[u][0] = out[u][1] = out[u][2] = out[u][3] = 0.f;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[c] *= factor[c];
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) affine[q][c] *= factor[c];
#pragma unroll
      for (int u = 0; u < Traits::kRowTiles; ++u) out[u][c] *= factor[c], out[u][2 + c] *= factor[c];
    }
  }
};

// Scores of a lane for one sub-tile, in log2 units: x[part][2 * half + column] with rows g, g + 8 of 16-row part `part`.
template <class Traits>
using Scores = float[Traits::kParts][4];

// Scale and zero of V for the rows a lane scores: [part][group][half]. Scales may be negative.
template <class Traits>
struct ValueParams {
  float scale[Traits::kParts][Traits::kValueGroups][2];
  float zero[Traits::kParts][Traits::kValueGroups][2];
};

// B fragments of the weights p * scale_v: [group][16-token part][k half].
template <class Traits>
using Weights = uint32_t[Traits::kValueGroups][2][2];

namespace detail {

template <class Traits>
__device__ __forceinline__ float probabilities(const Scores<Traits>& x, const ValueParams<Traits>& v, const State<Traits>& state, Scores<Traits>& p,
                                               float (&y)[Traits::kValueGroups][Traits::kParts][4]) {
  float largest = 0.f;
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[part][i] = ptx::exp2(x[part][i] - state.reference[i % 2]);
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) {
        y[q][part][i] = p[part][i] * v.scale[part][q][i / 2];
        largest = fmaxf(largest, fabsf(y[q][part][i]));
      }
    }
  return largest;
}

// Rare: moves the reference so that the largest weight of this sub-tile is near 2^kWeightAim.
template <class Traits>
__device__ __forceinline__ void move_reference(const Scores<Traits>& x, const ValueParams<Traits>& v, State<Traits>& state) {
  float factor[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float best = -INFINITY;
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float scale = fabsf(v.scale[part][0][half]);
#pragma unroll
        for (int q = 1; q < Traits::kValueGroups; ++q) scale = fmaxf(scale, fabsf(v.scale[part][q][half]));
        best = fmaxf(best, x[part][2 * half + c] + __log2f(scale));
      }
#pragma unroll
    for (int lanes = Traits::kHalves ? 2 : 4; lanes < 32; lanes *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, lanes));
    const float moved = fmaxf(state.reference[c], best - kWeightAim);
    factor[c] = ptx::exp2(state.reference[c] - moved);
    state.reference[c] = moved;
  }
  state.rescale(factor);
}

}  // namespace detail

// Adds a sub-tile's probabilities to the sums and gives its weights as B fragments.
template <class Traits>
__device__ __forceinline__ void softmax_step(const Scores<Traits>& x, const ValueParams<Traits>& v, State<Traits>& state, Weights<Traits>& weights) {
  Scores<Traits> p;
  float y[Traits::kValueGroups][Traits::kParts][4];
  if (__any_sync(~0u, detail::probabilities<Traits>(x, v, state, p, y) > kWeightLimit)) {
    detail::move_reference<Traits>(x, v, state);
    detail::probabilities<Traits>(x, v, state, p, y);
  }
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.sum[i % 2] += p[part][i];
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) state.affine[q][i % 2] = fmaf(p[part][i], v.zero[part][q][i / 2], state.affine[q][i % 2]);
    }
#pragma unroll
  for (int q = 0; q < Traits::kValueGroups; ++q)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part)
        weights[q][part][half] = ptx::transpose(ptx::pack_half2(y[q][part][2 * half], y[q][part][2 * half + 1]));
      // With halves, columns 4..7 are the other part's: rubbish for part 0, which nobody reads, and the weights of part 1.
      if constexpr (Traits::kHalves) weights[q][1][half] = __shfl_xor_sync(~0u, weights[q][0][half], 16);
    }
}

}  // namespace kvgen
