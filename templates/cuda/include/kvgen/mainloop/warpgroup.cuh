// What the warps of a warpgroup share: the operands that wgmma reads from shared memory, and sums over their tokens.
//
// With Mma::warpgroup four warps take a KV tile together, 64 tokens at a time, and all packed-GQA rows of the CTA are columns of one wgmma.
// So each code is expanded once for up to 64 rows, and one instruction does the work of many mma.sync. Warp w has tokens 16w to 16w + 15 of
// q * K, and a quarter of V's channels in the product with the softmax weights, which cross between the warps in shared memory.
#pragma once
#include "kvgen/mainloop/softmax.cuh"
#include "kvgen/pipeline/team.cuh"
#include "kvgen/wgmma.cuh"

namespace kvgen {

// Offsets in bytes, from the operands of a team. B operands are in the order of ptx::matrix_descriptor, one k-step after the other. There
// are two buffers of q and of the weights: one is written while wgmma may read the other.
template <class Traits>
struct TeamMemory {
  static constexpr int kStepBytes = Traits::kQTiles * 256;  // B of a k-step
  static constexpr int kErrorBytes = Traits::kSteps * kStepBytes;  // from q to its rounding error
  static constexpr int kQueryBytes = (Traits::kCarryError ? 2 : 1) * kErrorBytes;  // q, times the scales of a K group
  static constexpr int kWeightsBytes = 4 * kStepBytes;                             // softmax weights of 64 tokens
  static constexpr int kRowsBytes = 4 * Traits::kQTiles * 8 * 4;                   // a float per warp and query row
  static constexpr int kWeights = 2 * kQueryBytes;
  static constexpr int kSums = kWeights + 2 * kWeightsBytes;  // what the warps tell each other: sums of q * zero,
  static constexpr int kLargest = kSums + kRowsBytes;         // and the largest weights
  static constexpr int kBytes = kLargest + kRowsBytes;
};

// Adds A times B to the sums of all tiles of query rows; `sums(tile)` returns those of one.
template <class Traits, bool kAdd, class Sums>
__device__ __forceinline__ void multiply_rows(const uint32_t (&a)[4], uint32_t matrix, Sums&& sums) {
  if constexpr (Traits::kQTiles == 2)
    ptx::wgmma<kAdd>(a, matrix, sums(0), sums(1));
  else if constexpr (Traits::kQTiles == 4)
    ptx::wgmma<kAdd>(a, matrix, sums(0), sums(1), sums(2), sums(3));
  else
    ptx::wgmma<kAdd>(a, matrix, sums(0), sums(1), sums(2), sums(3), sums(4), sums(5), sums(6), sums(7));
}

// Writes a warp's values of its lanes' rows for the team; lanes of the same t have the same values.
template <class Traits>
__device__ __forceinline__ void send_rows(float* exchange, int lane, const float (&values)[Traits::kQTiles][2]) {
  if (lane >= 4) return;
  float2* pairs = reinterpret_cast<float2*>(exchange) + team_warp<Traits>() * Traits::kQTiles * 4 + lane;
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) pairs[tile * 4] = make_float2(values[tile][0], values[tile][1]);
}

// Reads all warps' values of the lanes' rows, and joins them in the order of the warps.
template <class Traits, class Join>
__device__ __forceinline__ void join_rows(const float* exchange, int lane, float (&values)[Traits::kQTiles][2], Join&& join) {
  const float2* pairs = reinterpret_cast<const float2*>(exchange) + lane % 4;
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
    float2 all = pairs[tile * 4];
#pragma unroll
    for (int warp = 1; warp < 4; ++warp) {
      const float2 other = pairs[(warp * Traits::kQTiles + tile) * 4];
      all = make_float2(join(all.x, other.x), join(all.y, other.y));
    }
    values[tile][0] = all.x, values[tile][1] = all.y;
  }
}

// Adds the sums over tokens, which are each warp's own, at the end of a head.
template <class Traits>
__device__ __forceinline__ void add_sums_of_team(State<Traits> (&state)[Traits::kQTiles], float* exchange, int lane) {
  float sums[Traits::kQTiles][2];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        sums[tile][c] = which ? state[tile].affine[0][c] : state[tile].row_sum[c];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sums[tile][c] += __shfl_xor_sync(~0u, sums[tile][c], lanes);
      }
    sync_team<Traits>();
    send_rows<Traits>(exchange, lane, sums);
    sync_team<Traits>();
    join_rows<Traits>(exchange, lane, sums, [](float a, float b) { return a + b; });
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
      for (int c = 0; c < 2; ++c) (which ? state[tile].affine[0][c] : state[tile].row_sum[c]) = sums[tile][c];
  }
}

}  // namespace kvgen
