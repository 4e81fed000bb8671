// Merges the warps' states of a head through shared memory into the result of the CTA.
#pragma once
#include "kvgen/epilogue/workspace.cuh"
#include "kvgen/mainloop/softmax.cuh"

namespace kvgen {

// The result of a CTA for a tile of query rows. A thread has every kStride-th channel of one row, so it computes each warp's rescaling
// factor once.
template <class Traits>
struct CtaResult {
  static constexpr int kElements = Traits::kTileQRows * Traits::kHeadDim;
  static constexpr int per_thread(int least) { return Traits::kHeadDim % least ? per_thread(least + 1) : least; }
  static constexpr int kPerThread = per_thread(ceil_div(kElements, Traits::kThreads)), kStride = Traits::kHeadDim / kPerThread;
  PartialSum<kPerThread> sum;

  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / kStride; }
  __device__ __forceinline__ static int channel() { return static_cast<int>(threadIdx.x) % kStride; }
  // Whether this thread has elements of the result.
  __device__ __forceinline__ static bool any() { return row() < Traits::kTileQRows; }
};

// Writes a warp's state of a tile of query rows to shared memory, in the order of channels.
template <class Traits>
__device__ __forceinline__ void publish_state(State<Traits>& state, float* buffer, RowStats* stats, int warp, int lane) {
#pragma unroll
  for (int lanes = Traits::kQueryTwice ? 2 : 4; lanes < 32; lanes *= 2)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.row_sum[c] += __shfl_xor_sync(~0u, state.row_sum[c], lanes);
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) state.affine[q][c] += __shfl_xor_sync(~0u, state.affine[q][c], lanes);
    }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 2 * (lane % 4) + c, g = lane / 4;
    if (row >= Traits::kTileQRows) continue;
    if (g == 0) stats[warp * 8 + row] = RowStats{state.row_max[c], state.row_sum[c]};
    float* to = buffer + (warp * Traits::kTileQRows + row) * Traits::kMergeStride;
#pragma unroll
    for (int u = 0; u < Traits::kRowTiles; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[Traits::ValueRuns::tile_channel(u, g / 2) + g % 2 + 2 * half] =
            state.out[u][2 * half + c] + state.affine[u * Traits::kValueGroups / Traits::kRowTiles][c];
  }
}

// Merges the published states. A CTA barrier must precede the call.
template <class Traits>
__device__ __forceinline__ void merge_warps(const float* buffer, const RowStats* stats, CtaResult<Traits>& result) {
  if (!result.any()) return;
  const int row = result.row();
  const float* from = buffer + row * Traits::kMergeStride + result.channel();
  result.sum.template add<Traits::kWarps>(
      [&](int warp) { return stats[warp * 8 + row]; },
      [&](int warp, int i) { return from[warp * Traits::kTileQRows * Traits::kMergeStride + i * result.kStride]; });
}

}  // namespace kvgen
