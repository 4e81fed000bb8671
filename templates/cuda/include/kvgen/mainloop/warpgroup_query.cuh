// q as a B operand of wgmma in shared memory, for K with scales per channel. Each warp of the team writes some runs of channels.
#pragma once
#include "kvgen/mainloop/query.cuh"
#include "kvgen/mainloop/warpgroup.cuh"

namespace kvgen {

// The runs of channels that a warp writes: `use(x, tile, q)` with its fragments of run x, of two k-steps.
template <class Traits, class Use>
__device__ __forceinline__ void visit_own_runs(uint32_t fragments, int lane, Use&& use) {
  using Runs = typename Traits::KeyRuns;
  static_assert(Runs::kHalf == 0 && Runs::kCount % Traits::kTeamWarps == 0);
  constexpr int kOwn = Runs::kCount / Traits::kTeamWarps;
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile) {
      const int x = team_warp<Traits>() * kOwn + i;
      use(x, tile, load_query<Traits>(fragments, tile, x, lane));
    }
}

// Stores a lane's words of a k-step's B fragment.
template <class Traits>
__device__ __forceinline__ void store_query(uint32_t operand, int step, int tile, int lane, uint32_t b0, uint32_t b1) {
  const uint32_t at = operand + step * TeamMemory<Traits>::kStepBytes + tile * 256 + lane * 4;
  ptx::store_shared4(at, b0), ptx::store_shared4(at + 128, b1);
}

// Writes q as it is. The team may multiply with it afterwards.
template <class Traits>
__device__ __forceinline__ void write_query(uint32_t fragments, uint32_t operand, int lane) {
  visit_own_runs<Traits>(fragments, lane, [&](int x, int tile, const uint4& q) {
    store_query<Traits>(operand, 2 * x, tile, lane, q.x, q.y);
    store_query<Traits>(operand, 2 * x + 1, tile, lane, q.z, q.w);
  });
  ptx::wgmma_store_fence();
  sync_team<Traits>();
}

// Writes q times the scales of a K group, with kCarryError also the rounding error of the products. Gives the rows' sums of q * zero
// (symmetric codes: q * scale) in units of the products, for the rows of a lane's accumulators.
template <class Traits>
__device__ __forceinline__ void write_scaled_query(uint32_t fragments, uint32_t params, uint32_t operand, float* exchange, int lane,
                                                   float (&affine)[Traits::kQTiles][2]) {
  using Memory = TeamMemory<Traits>;
  float sums[Traits::kQTiles][4] = {};
  visit_own_runs<Traits>(fragments, lane, [&](int x, int tile, const uint4& q) {
    const uint32_t words[2][2] = {{q.x, q.y}, {q.z, q.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * x + i;
      uint32_t scale[2], zero[2], error[2];
      load_key_params<Traits>(params, step, lane, scale, zero);
      ptx::mma(sums[tile], zero[0], scale[0], zero[1], scale[1], words[i][0], words[i][1]);  // as in QueryFragments::load_scaled
      const uint32_t b0 = scaled_pair<Traits>(words[i][0], 0, scale[0], &error[0]);
      const uint32_t b1 = scaled_pair<Traits>(words[i][1], 0, scale[1], &error[1]);
      store_query<Traits>(operand, step, tile, lane, b0, b1);
      if constexpr (Traits::kCarryError) store_query<Traits>(operand + Memory::kQueryBytes, step, tile, lane, error[0], error[1]);
    }
  });
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) affine[tile][0] = sums[tile][0], affine[tile][1] = sums[tile][1];
  ptx::wgmma_store_fence();
  exchange_rows<Traits>(exchange, lane, affine, [](float a, float b) { return a + b; });
}

}  // namespace kvgen
