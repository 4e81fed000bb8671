// A team: the warps of a CTA that share a ring and take its KV tiles together. It is one warp, or with Mma::warpgroup the four of a
// warpgroup. Teams have barriers of their own; barrier 0 is that of the CTA.
#pragma once
#include "kvgen/mainloop/traits.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

template <class Traits>
__device__ __forceinline__ int team_idx() {
  return Traits::kTeams == 1 ? 0 : static_cast<int>(threadIdx.x) / (32 * Traits::kTeamWarps);
}

// The warp's place in its team.
template <class Traits>
__device__ __forceinline__ int team_warp() {
  return static_cast<int>(threadIdx.x) / 32 % Traits::kTeamWarps;
}

// Waits for all warps of the team.
template <class Traits>
__device__ __forceinline__ void sync_team() {
  if constexpr (Traits::kTeamWarps == 1)
    __syncwarp();
  else
    ptx::barrier_sync(1 + team_idx<Traits>(), 32 * Traits::kTeamWarps);
}

// The same; also tells whether `mine` is true in a thread of the team.
template <class Traits>
__device__ __forceinline__ bool any_in_team(bool mine) {
  return ptx::barrier_or(1 + team_idx<Traits>(), 32 * Traits::kTeamWarps, mine);
}

}  // namespace kvgen
