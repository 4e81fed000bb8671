// q as a B operand of wgmma in shared memory, for K with scales per channel. Each warp of the team writes some runs of channels.
#pragma once
#include "kvgen/mainloop/query.cuh"
#include "kvgen/mainloop/warpgroup.cuh"

namespace kvgen {

template <class Traits>
struct OwnRuns {
  using Runs = typename Traits::KeyRuns;
  static_assert(Runs::kHalf == 0 && Runs::kCount % Traits::kTeamWarps == 0);
  static constexpr int kCount = Runs::kCount / Traits::kTeamWarps;
  __device__ __forceinline__ static int run(int i) { return team_warp<Traits>() * kCount + i; }
};

// Stores a lane's words of a k-step's B fragment.
template <class Traits>
__device__ __forceinline__ void store_query(uint32_t operand, int step, int tile, int lane, uint32_t b0, uint32_t b1) {
  const uint32_t at = operand + step * TeamMemory<Traits>::kStepBytes + tile * 256 + lane * 4;
  ptx::store_shared4(at, b0), ptx::store_shared4(at + 128, b1);
}

// Writes q as it is. The team may multiply with it after a barrier.
template <class Traits>
__device__ __forceinline__ void write_query(uint32_t fragments, uint32_t operand, int lane) {
#pragma unroll
  for (int i = 0; i < OwnRuns<Traits>::kCount; ++i)
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile) {
      const int x = OwnRuns<Traits>::run(i);
      const uint4 q = load_query<Traits>(fragments, tile, x, lane);
      store_query<Traits>(operand, 2 * x, tile, lane, q.x, q.y);
      store_query<Traits>(operand, 2 * x + 1, tile, lane, q.z, q.w);
    }
  ptx::wgmma_store_fence();
}

// Writes q times the scales of a K group, with kCarryError also the rounding error of the products, and sends the rows' sums of q * zero
// (symmetric codes: q * scale) over the warp's channels. A fence for wgmma and a barrier have to follow.
template <class Traits>
__device__ __forceinline__ void write_scaled_query(uint32_t fragments, uint32_t params, uint32_t operand, float* exchange, int lane) {
  constexpr int kRuns = OwnRuns<Traits>::kCount;
  float sums[Traits::kQTiles][4] = {};
  uint4 q[kRuns][Traits::kQTiles];
  uint32_t scale[kRuns][2][2], zero[kRuns][2][2];
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int x = OwnRuns<Traits>::run(i);
#pragma unroll
    for (int half = 0; half < 2; ++half) load_key_params<Traits>(params, 2 * x + half, lane, scale[i][half], zero[i][half]);
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile) q[i][tile] = load_query<Traits>(fragments, tile, x, lane);
  }
#pragma unroll
  for (int i = 0; i < kRuns; ++i)
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * OwnRuns<Traits>::run(i) + half;
        const uint32_t words[2] = {half ? q[i][tile].z : q[i][tile].x, half ? q[i][tile].w : q[i][tile].y};
        const uint32_t(&s)[2] = scale[i][half], (&z)[2] = zero[i][half];
        uint32_t error[2];
        ptx::mma(sums[tile], z[0], s[0], z[1], s[1], words[0], words[1]);  // as in QueryFragments::load_scaled
        const uint32_t b0 = scaled_pair<Traits>(words[0], 0, s[0], &error[0]), b1 = scaled_pair<Traits>(words[1], 0, s[1], &error[1]);
        store_query<Traits>(operand, step, tile, lane, b0, b1);
        if constexpr (Traits::kCarryError) store_query<Traits>(operand + TeamMemory<Traits>::kErrorBytes, step, tile, lane, error[0], error[1]);
      }
  float own[Traits::kQTiles][2];
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) own[tile][0] = sums[tile][0], own[tile][1] = sums[tile][1];
  send_rows<Traits>(exchange, lane, own);
}

}  // namespace kvgen
