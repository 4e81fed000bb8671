// B fragments of q in shared memory, for CTAs with more query rows than registers hold beside the accumulators.
#pragma once
#include "kvgen/mainloop/query.cuh"

namespace kvgen {

// A lane's fragments of all tiles of query rows. K per channel: q times the scales of a K group, in the warp's own part of shared memory.
// A lane loads only what it stored itself, so nothing has to wait. Other K: q itself, which the whole CTA shares.
template <class Traits>
struct StoredQuery {
  using Runs = typename Traits::KeyRuns;
  static constexpr bool kLow = Traits::kCarryError;  // the rounding errors of scaled q follow it
  uint32_t fragments;

  // The fragments of a run of channels. `set`: which K group of the sub-tile.
  __device__ __forceinline__ uint4 high(int set, int tile, int x, int lane) const {
    return load_query<Traits>(fragments + set * (kLow ? 2 : 1) * Traits::kQueryPlainBytes, tile, x, lane);
  }
  __device__ __forceinline__ uint4 low(int set, int tile, int x, int lane) const {
    return load_query<Traits>(fragments + (2 * set + 1) * Traits::kQueryPlainBytes, tile, x, lane);
  }

  // Stores q times the scales of a K group. Also computes the rows' sums of q * zero (symmetric codes: q * scale).
  __device__ __forceinline__ void store_scaled(uint32_t plain, uint32_t params, int set, int tile, int lane, float (&affine)[2]) const {
    const uint32_t to = fragments + set * (kLow ? 2 : 1) * Traits::kQueryPlainBytes;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int x = 0; x < Runs::kCount; ++x) {
      const uint4 q = load_query<Traits>(plain, tile, x, lane);
      const int step = Runs::tile(x);
      uint32_t high[2][2] = {}, low[2][2] = {};
      scale_step<Traits>({q.x, q.y}, {0, 0}, params, step, lane, high[0], low[0], even);
      if (!Runs::is_half(x)) scale_step<Traits>({q.z, q.w}, {0, 0}, params, step + 1, lane, high[1], low[1], odd);
      store_query<Traits>(to, tile, x, lane, make_uint4(high[0][0], high[0][1], high[1][0], high[1][1]));
      if constexpr (kLow)
        store_query<Traits>(to + Traits::kQueryPlainBytes, tile, x, lane, make_uint4(low[0][0], low[0][1], low[1][0], low[1][1]));
    }
    affine[0] = even[0] + odd[0], affine[1] = even[1] + odd[1];
  }
};

}  // namespace kvgen
