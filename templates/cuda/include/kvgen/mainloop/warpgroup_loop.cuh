// The packed loop of warpgroups (mainloop/warpgroup.cuh): scores, softmax and P*V of 64 packed tokens at a time.
#pragma once
#include "kvgen/format/fragments.cuh"
#include "kvgen/mainloop/keys.cuh"
#include "kvgen/mainloop/mask.cuh"
#include "kvgen/mainloop/score_modifier.cuh"
#include "kvgen/mainloop/shared.cuh"
#include "kvgen/mainloop/token_params.cuh"
#include "kvgen/mainloop/warpgroup_query.cuh"

namespace kvgen {

// The operands of a team.
template <class Traits>
struct Team {
  using Memory = TeamMemory<Traits>;
  uint32_t memory;
  float *sums, *largest;
  uint32_t query_buffer = 0, weights_buffer = 0;  // of the two, the offset of the next one that is written

  Team() = default;
  __device__ explicit Team(uint8_t* shared) {
    uint8_t* mine = shared + Traits::Memory::kTeams + team_idx<Traits>() * Memory::kBytes;
    memory = ptx::shared_address(mine);
    sums = reinterpret_cast<float*>(mine + Memory::kSums), largest = reinterpret_cast<float*>(mine + Memory::kLargest);
  }
  __device__ uint32_t next_query() const { return memory + query_buffer; }
  __device__ uint32_t query() const { return memory + (query_buffer ^ Memory::kQueryBytes); }
  __device__ uint32_t weights() const { return memory + Memory::kWeights + weights_buffer; }
};

// Products of q and K's codes of the warp's 16 tokens, in mixed form if the codes have 4 bits. `codes`: of the tokens' sub-tile.
template <class Traits>
__device__ __forceinline__ void multiply_team_keys(const Team<Traits>& team, uint32_t codes, int lane,
                                                   float (&products)[Traits::kQTiles][4]) {
  using Memory = TeamMemory<Traits>;
  constexpr int kBits = Traits::Key::kBits, kWords = Fragment<kBits>::kWords;
  constexpr int kBatch = 4;  // k-steps whose operands are expanded before the MMAs with them begin
  static_assert(Traits::kSteps % kBatch == 0);
  const int m_tile = team_warp<Traits>() % 2;
  if constexpr (kBits != 2) codes += m_tile * (Traits::kSteps * kWords * 128);
  const uint32_t matrix = ptx::matrix_descriptor(team.query());
  uint32_t a[kBatch][4];
  visit_words<kBits, Traits::kSteps>(codes, lane, [&](int step, const uint32_t* words) {
    uint32_t mine[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) mine[i] = kBits == 2 ? words[i] >> 4 * m_tile : words[i];  // a byte of 2-bit codes has both MMA tiles
    expand<kBits, typename Traits::Format::Element, false>(mine, 0, [&](int rows, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
      if (rows == 0) a[step % kBatch][0] = a0, a[step % kBatch][1] = a1, a[step % kBatch][2] = a2, a[step % kBatch][3] = a3;
    });
    if (step % kBatch < kBatch - 1) return;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = step + 1 - kBatch; i <= step; ++i) {
      const uint32_t(&operand)[4] = a[i % kBatch];
      const auto sums = [&](int tile) -> float(&)[4] { return products[tile]; };
      const uint32_t b = matrix + ptx::matrix_distance(i * Memory::kStepBytes);
      if (i == 0)
        multiply_rows<Traits, false>(operand, b, sums);
      else
        multiply_rows<Traits, true>(operand, b, sums);
      if constexpr (Traits::kCarryError) multiply_rows<Traits, true>(operand, b + ptx::matrix_distance(Memory::kErrorBytes), sums);
    }
  });
  ptx::wgmma_commit();
}

// V's codes of 64 tokens in the warp's channels: [k-step][word].
template <class Traits>
struct TeamValues {
  static constexpr int kBits = Traits::Value::kBits;
  static constexpr int kTileWords = Traits::kOwnRowTiles * Fragment<kBits>::kWords * 16 / Fragment<kBits>::kRows;
  uint32_t words[4][kTileWords];

  // `codes`: of the first sub-tile.
  __device__ __forceinline__ void load(uint32_t codes, int lane) {
    constexpr int kAll = Traits::kTeamWarps * kTileWords;  // of a k-step, in all warps
    constexpr int kVector = vector_words(2 * kAll), kLoad = kTileWords < kVector ? kTileWords : kVector;
    static_assert(kVector % kLoad == 0 && kTileWords % kLoad == 0);
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < kTileWords; i += kLoad) {
        const int at = step % 2 * kAll + team_warp<Traits>() * kTileWords + i;
        uint32_t part[kLoad];
        load_words<kLoad>(part, codes + step / 2 * Traits::kSubtileStride + (at / kVector * 32 + lane) * kVector * 4 + at % kVector * 4);
#pragma unroll
        for (int j = 0; j < kLoad; ++j) words[step][i + j] = part[j];
      }
  }
};

// Starts adding weights * V's codes to the accumulators.
template <class Traits>
__device__ __forceinline__ void multiply_team_values(const Team<Traits>& team, const TeamValues<Traits>& values,
                                                     State<Traits> (&state)[Traits::kQTiles]) {
  constexpr int kBits = Traits::Value::kBits;
  const uint32_t matrix = ptx::matrix_descriptor(team.weights());
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t a[Traits::kOwnRowTiles][4];
#pragma unroll
    for (int i = 0; i < Traits::kOwnRowTiles * 16 / Fragment<kBits>::kRows; ++i)
      expand<kBits, typename Traits::Format::Element, true>(
          values.words[step] + i * Fragment<kBits>::kWords, i, [&](int rows, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
            a[rows][0] = a0, a[rows][1] = a1, a[rows][2] = a2, a[rows][3] = a3;
          });
    ptx::wgmma_fence();
#pragma unroll
    for (int rows = 0; rows < Traits::kOwnRowTiles; ++rows)
      multiply_rows<Traits, true>(a[rows], matrix + ptx::matrix_distance(step * TeamMemory<Traits>::kStepBytes),
                                  [&](int tile) -> float(&)[4] { return state[tile].out[rows]; });
  }
  ptx::wgmma_commit();
}

// A warp's weights: fragments of tokens g and g + 8 in a tile of query rows.
template <class Traits>
using TeamWeights = uint32_t[1][1][1][2];

// Stores the weights of the warp's tokens as its k-step of B.
template <class Traits>
__device__ __forceinline__ void store_weights(uint32_t weights, int lane, const TeamWeights<Traits> (&y)[Traits::kQTiles]) {
  const uint32_t at = weights + team_warp<Traits>() * TeamMemory<Traits>::kStepBytes + lane * 16;
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; tile += 2)
    ptx::store_transposed(at + tile * 256, y[tile][0][0][0][0], y[tile][0][0][0][1], y[tile + 1][0][0][0][0], y[tile + 1][0][0][0][1]);
}

// Computes the probabilities of 64 tokens, and stores their weights for the team. On return all warps have stored theirs. As with single
// warps row_max moves rarely; then it does so in all warps alike.
template <class Traits>
__device__ __forceinline__ void weights_of_team(const Scores<Traits> (&x)[Traits::kQTiles][1], const ValueParams<Traits> (&v)[1],
                                                const Team<Traits>& team, int lane, LaneValues<Traits> (&p)[Traits::kQTiles][1],
                                                TeamWeights<Traits> (&y)[Traits::kQTiles], State<Traits> (&state)[Traits::kQTiles]) {
  bool over = false;
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) over |= detail::compute_weights<Traits>(x[tile], v, state[tile], p[tile], y[tile]);
  store_weights<Traits>(team.weights(), lane, y);
  ptx::wgmma_store_fence();
  if (!any_in_team<Traits>(over)) return;
  float largest[Traits::kQTiles][2];
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) detail::largest_weights<Traits>(x[tile], v, largest[tile]);
  send_rows<Traits>(team.largest, lane, largest);
  sync_team<Traits>();
  join_rows<Traits>(team.largest, lane, largest, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
    detail::raise_row_max<Traits>(largest[tile], state[tile]);
    detail::compute_weights<Traits>(x[tile], v, state[tile], p[tile], y[tile]);
  }
  store_weights<Traits>(team.weights(), lane, y);
  ptx::wgmma_store_fence();
  sync_team<Traits>();
}

// The softmax step of 64 tokens: adds their probabilities to the sums, and weights * V to the accumulators. `multiply` starts the MMAs.
template <class Traits, class Multiply>
__device__ __forceinline__ void add_tokens(const Scores<Traits> (&x)[Traits::kQTiles][1], const ValueParams<Traits> (&v)[1],
                                           const Team<Traits>& team, int lane, State<Traits> (&state)[Traits::kQTiles],
                                           Multiply&& multiply) {
  LaneValues<Traits> p[Traits::kQTiles][1];
  TeamWeights<Traits> y[Traits::kQTiles];
  weights_of_team<Traits>(x, v, team, lane, p, y, state);
  multiply();
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) detail::add_to_sums<Traits>(p[tile], y[tile], v, state[tile]);
  ptx::wgmma_wait();  // here, because the compiler does not let MMAs with registers of A run across a loop's end
}

// What a warp keeps for all KV tiles of a head.
template <class Traits>
struct TeamQuery {
  Team<Traits> team;
  LaneValues<Traits> factors[Traits::kQTiles];
  float affine[Traits::kQTiles][2];  // sum of q * zero in log2 units, of the current K group

  // Starts with the K group whose params are at `params`. `publish` comes after a barrier, and makes it the current one.
  __device__ __forceinline__ void scale(const Shared<Traits>& shared, uint32_t params, int lane) {
    write_scaled_query<Traits>(shared.query(), params, team.next_query(), team.sums, lane);
  }
  __device__ __forceinline__ void publish(const Shared<Traits>& shared, int lane) {
    join_rows<Traits>(team.sums, lane, affine, [](float a, float b) { return a + b; });
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        affine[tile][c] *= (Traits::Key::kZero ? 1.f : -1.f * Traits::Key::kOffset) * shared.factors[q_row<Traits>(tile, lane, c)];
    team.query_buffer ^= TeamMemory<Traits>::kQueryBytes;
  }
};

// Attends to the 64 tokens at `position`, from the `sub`-th sub-tile of the KV tile in `slot` on. While wgmma multiplies keys, `prepare`
// scales q for the next K group, if these are the last tokens of one; it returns whether there is a next one. `release` refills the stage.
template <class Traits, bool kMasked, class Prepare, class Release>
__device__ __forceinline__ void attend_team(const Shared<Traits>& shared, uint32_t slot, int sub, TeamQuery<Traits>& query, int position,
                                            const PackedMask<Traits>& mask, int lane, State<Traits> (&state)[Traits::kQTiles],
                                            Prepare&& prepare, Release&& release) {
  using Format = typename Traits::Format;
  constexpr int kRowBytes = Traits::Value::kZero ? 4 : 2;  // V's params of a token
  Team<Traits>& team = query.team;
  const int warp = team_warp<Traits>(), m_tile = warp % 2;
  const uint32_t first = slot + Traits::kTileHeaderBytes + sub * Traits::kSubtileStride, mine = first + warp / 2 * Traits::kSubtileStride;
  position += 16 * warp;
  float products[Traits::kQTiles][4];
  multiply_team_keys<Traits>(team, mine + Format::kKeyCodes, lane, products);
  TeamValues<Traits> values;
  values.load(first + Format::kValueCodes, lane);
  ValueParams<Traits> params[1];
  load_value_params<Traits>(mine + Format::kValueTokenParams + 2 * m_tile * kRowBytes, lane, params[0]);
  const bool next_group = prepare();
  ptx::wgmma_wait();
  Scores<Traits> x[Traits::kQTiles][1];
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[tile][0].product[0][i] = products[tile][i] - (Traits::Key::kBits == 4 && i >= 2 ? products[tile][i - 2] : 0.f);
      x[tile][0].factor[0][i] = query.factors[tile][0][i], x[tile][0].offset[0][i] = query.affine[tile][i % 2];
    }
    modify_scores<Traits>(mask.seqlen, position, tile, lane, x[tile][0]);
    if constexpr (kMasked) mask.apply(position, tile, lane, x[tile][0]);
  }
  add_tokens<Traits>(x, params, team, lane, state, [&] {
    multiply_team_values<Traits>(team, values, state);
    release();
    if (next_group) query.publish(shared, lane);
  });
  team.weights_buffer ^= TeamMemory<Traits>::kWeightsBytes;
}

}  // namespace kvgen
