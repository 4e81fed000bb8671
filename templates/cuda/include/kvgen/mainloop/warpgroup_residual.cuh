// The unquantized tokens of a sequence in a warpgroup: four tiles of sixteen at a time, one for each warp.
#pragma once
#include "kvgen/mainloop/residual.cuh"
#include "kvgen/mainloop/warpgroup_loop.cuh"

namespace kvgen {

// K of the warp's tile, and V of all four tiles in the warp's channels.
template <class Traits>
struct ResidualTile<Traits, true> {
  using KeyRuns = typename Traits::KeyRuns;
  using ValueRuns = typename Traits::ValueRuns;
  using Element = typename Traits::Format::Element;
  static constexpr int kTokens = 16, kTiles = Traits::kTeamWarps, kOwnRuns = ValueRuns::kCount / kTiles;
  int first[kTiles], valid[kTiles];
  uint4 keys[KeyRuns::kCount][2], values[kTiles][kOwnRuns][2];

  // Also clears what `fetch` leaves: products with weights of 0 must not be NaN.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (auto& vector : keys) vector[half] = make_uint4(0, 0, 0, 0);
      for (auto& tile : values)
        for (auto& vector : tile) vector[half] = make_uint4(0, 0, 0, 0);
    }
  }
  // Tiles are filled in order, so the first one has tokens if any has.
  __device__ __forceinline__ bool any() const { return valid[0] > 0; }

  // Loads the tiles of the team of which `number` is the warp's own.
  __device__ __forceinline__ void fetch(const Residual<Traits>& residual, int number, int lane) {
    clear();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      first[i] = residual.tile_token(number / kTiles * kTiles + i);
      const int limit = residual.tile_limit(first[i]);
      valid[i] = min(limit - first[i], kTokens);
      if (valid[i] <= 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = min(first[i] + 8 * half + lane / 4, limit - 1);
        if (i == number % kTiles) {
          const auto* k = residual.k_row(token);
#pragma unroll
          for (int x = 0; x < KeyRuns::kCount; ++x) keys[x][half] = load_run(KeyRuns::at(k, x, lane % 4), false);
        }
        const auto* v = residual.v_row(token) + team_warp<Traits>() * kOwnRuns * 32;
#pragma unroll
        for (int x = 0; x < kOwnRuns; ++x) values[i][x][half] = load_run(ValueRuns::at(v, x, lane % 4), false);
      }
    }
  }
  // Appends the step's tokens to the residual. No CTA reads these rows in this launch.
  __device__ __forceinline__ void append(const Residual<Traits>& residual, int lane) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 8 * half + lane / 4, token = first[i] + row;
        if (row >= valid[i] || token < residual.old) continue;
        const int64_t at = static_cast<int64_t>(residual.row_of(token)) * Traits::kHeadDim;
        if (i == team_warp<Traits>())
#pragma unroll
          for (int x = 0; x < KeyRuns::kCount; ++x) store_run(KeyRuns::at(residual.k_residual + at, x, lane % 4), keys[x][half], false);
        Element* v = residual.v_residual + at + team_warp<Traits>() * kOwnRuns * 32;
#pragma unroll
        for (int x = 0; x < kOwnRuns; ++x) store_run(ValueRuns::at(v, x, lane % 4), values[i][x][half], false);
      }
  }
};

// Products of q, unscaled, and K of the warp's tile.
template <class Traits>
__device__ __forceinline__ void multiply_residual_keys(const Team<Traits>& team, const ResidualTile<Traits>& rows,
                                                       float (&products)[Traits::kQTiles][4]) {
  using Memory = TeamMemory<Traits>;
  const typename Traits::Format::Element* type = nullptr;
  const auto sums = [&](int tile) -> float(&)[4] { return products[tile]; };
  uint32_t a[Traits::kSteps][4];
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& k = rows.keys[step / 2][half];
      a[step][half] = half2_from(step % 2 ? k.z : k.x, type), a[step][2 + half] = half2_from(step % 2 ? k.w : k.y, type);
    }
  ptx::wgmma_fence();
  const uint32_t matrix = ptx::matrix_descriptor(team.next_query());
  multiply_rows<Traits, false>(a[0], matrix, sums);
#pragma unroll
  for (int step = 1; step < Traits::kSteps; ++step)
    multiply_rows<Traits, true>(a[step], matrix + ptx::matrix_distance(step * Memory::kStepBytes), sums);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
}

// Starts adding weights * V of the four tiles. A lane's vectors of V, transposed as 8x8 matrices, are A fragments of V transposed.
template <class Traits>
__device__ __forceinline__ void multiply_residual_values(const Team<Traits>& team, const ResidualTile<Traits>& rows,
                                                         State<Traits> (&state)[Traits::kQTiles]) {
  const typename Traits::Format::Element* type = nullptr;
  const uint32_t matrix = ptx::matrix_descriptor(team.weights());
#pragma unroll
  for (int step = 0; step < Traits::kTeamWarps; ++step) {
    uint32_t a[Traits::kOwnRowTiles][4];
#pragma unroll
    for (int x = 0; x < ResidualTile<Traits>::kOwnRuns; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& v = rows.values[step][x][half];
        a[2 * x][2 * half] = ptx::transpose(half2_from(v.x, type)), a[2 * x][2 * half + 1] = ptx::transpose(half2_from(v.y, type));
        a[2 * x + 1][2 * half] = ptx::transpose(half2_from(v.z, type)), a[2 * x + 1][2 * half + 1] = ptx::transpose(half2_from(v.w, type));
      }
    ptx::wgmma_fence();
#pragma unroll
    for (int tile16 = 0; tile16 < Traits::kOwnRowTiles; ++tile16)
      multiply_rows<Traits, true>(a[tile16], matrix + ptx::matrix_distance(step * TeamMemory<Traits>::kStepBytes),
                                  [&](int tile) -> float(&)[4] { return state[tile].out[tile16]; });
  }
  ptx::wgmma_commit();
}

// Attends to the four tiles of a team.
template <class Traits>
__device__ __forceinline__ void attend_residual_tile(const ResidualTile<Traits, true>& rows, const SeqlenInfo& seqlen,
                                                     const Shared<Traits>& shared, int lane, State<Traits> (&state)[Traits::kQTiles]) {
  const Team<Traits> team(shared.memory);
  const int warp = team_warp<Traits>();
  sync_team<Traits>();  // no warp reads the operands of an earlier round any more
  write_query<Traits>(shared.query(), team.next_query(), lane);
  sync_team<Traits>();
  float products[Traits::kQTiles][4];
  multiply_residual_keys<Traits>(team, rows, products);
  ValueParams<Traits> params[1];
  no_params<Traits>(params[0]);
  Scores<Traits> x[Traits::kQTiles][1];
  int first = rows.first[0], valid = rows.valid[0];
#pragma unroll
  for (int i = 1; i < Traits::kTeamWarps; ++i)
    if (i == warp) first = rows.first[i], valid = rows.valid[i];
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[tile][0].product[0][i] = products[tile][i];
    to_residual_scores<Traits>(seqlen, first, valid, tile, shared.factors, lane, x[tile][0]);
  }
  add_tokens<Traits>(x, params, team, lane, state, [&] { multiply_residual_values<Traits>(team, rows, state); });
}

}  // namespace kvgen
