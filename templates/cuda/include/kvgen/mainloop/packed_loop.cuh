// The packed loop: it computes scores, softmax and P*V of a warp's packed KV tiles, kStepSubtiles sub-tiles at a time.
#pragma once
#include "kvgen/mainloop/keys.cuh"
#include "kvgen/mainloop/mask.cuh"
#include "kvgen/mainloop/score_modifier.cuh"
#include "kvgen/mainloop/softmax.cuh"
#include "kvgen/mainloop/values.cuh"

namespace kvgen {

// The arrays in a CTA's shared memory.
template <class Traits>
struct Shared {
  uint8_t* memory;
  uint8_t* fragments;  // of q
  float* factors;      // per query row: converts products to scores in log2 units
  float* query_sums;   // per K group and query row: sum of q; with static scales of K alone: of q * scale. Then packed_factors, if static
  float* merge;
  RowStats* warp_stats;
  WorkTile* work_tiles;  // of all warps
  int* pages;            // of all warps: entries of the block table
  int* flags;

  __device__ explicit Shared(uint8_t* memory_) : memory(memory_) {
    fragments = memory + Traits::Memory::kQuery;
    factors = reinterpret_cast<float*>(memory + Traits::Memory::kScalars);
    query_sums = factors + Traits::kQTiles * 8;
    warp_stats = reinterpret_cast<RowStats*>(query_sums + Traits::kQTiles * 8 * (Traits::kKeyGroups + kStatic<typename Traits::Key>));
    flags = reinterpret_cast<int*>(memory + Traits::Memory::kFlags);
    merge = reinterpret_cast<float*>(memory + Traits::Memory::kMerge);
    work_tiles = reinterpret_cast<WorkTile*>(memory + Traits::Memory::kWorkTiles);
    pages = reinterpret_cast<int*>(memory + Traits::Memory::kPages);
  }
  __device__ uint32_t ring() const { return ptx::shared_address(memory); }
  __device__ uint32_t query() const { return ptx::shared_address(fragments); }
  // The query of the packed loop, and its factors.
  __device__ uint32_t packed_query() const { return query() + (kStaticAlone<typename Traits::Key> ? Traits::kQueryPlainBytes : 0); }
  __device__ float* packed_factors() const {
    return kStatic<typename Traits::Key> ? query_sums + Traits::kQTiles * 8 * Traits::kKeyGroups : factors;
  }
};

// The query operands. K per channel: of the sub-tile's groups of tokens.
template <class Traits>
struct TileQuery {
  using Fragments = std::conditional_t<Traits::kIntegerKeys, IntegerQuery<Traits>, QueryFragments<Traits>>;
  Fragments fragments[Traits::kSubtileKeyGroups][Traits::kQTiles];
  BoostQuery<Traits> boost[Traits::kQTiles];
  float affine[Traits::kStepKeyGroups][Traits::kQTiles][2];  // sum of q * zero in log2 units, for the K groups of a softmax step
  float unit[Traits::kStepKeyGroups][Traits::kQTiles][2];    // of integer products, for the same groups
};

template <class Traits>
__device__ __forceinline__ void load_query(const Shared<Traits>& shared, int lane, TileQuery<Traits>& query) {
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
    query.fragments[0][tile].load(shared.packed_query(), tile, lane);
    if constexpr (kStaticAlone<typename Traits::Key>)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = q_row<Traits>(tile, lane, c);
        query.affine[0][tile][c] = -1.f * Traits::Key::Codec::kOffset * shared.query_sums[row] * shared.packed_factors()[row];
      }
  }
}

// Scales q for the K groups that begin in the sub-tile at `token` of its KV tile. `params`: the tile's channel params of K.
template <class Traits>
__device__ __forceinline__ void scale_query(const Shared<Traits>& shared, uint32_t params, int token, int lane, TileQuery<Traits>& query) {
  using Params = typename Traits::KeyChannelParams;
  if (token % Params::kTokens) return;
#pragma unroll
  for (int i = 0; i < Traits::kSubtileKeyGroups; ++i)
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile) {
      const int group = token / Params::kTokens + i;
      const int step_group = group % Traits::kStepKeyGroups;
      float(&affine)[2] = query.affine[step_group][tile];
      query.fragments[i][tile].load_scaled(shared.query(), params + group * Params::kSetBytes, tile, lane, affine);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        affine[c] *= (Traits::Key::kZero ? 1.f : -1.f * Traits::Key::Codec::kOffset) * shared.factors[q_row<Traits>(tile, lane, c)];
      if constexpr (Traits::kIntegerKeys)
#pragma unroll
        for (int c = 0; c < 2; ++c) query.unit[step_group][tile][c] = query.fragments[i][tile].unit[c];
    }
  if constexpr (Traits::Format::kBoosted > 0) {
    const BoostedChannels<Traits> channels(params, lane);
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile) query.boost[tile].gather(shared.query(), channels, tile, lane);
  }
}

// The sum of q * zero for the `s`-th sub-tile of a softmax step, in the MMA tile of 16 tokens to which a lane's scores belong.
template <class Traits>
__device__ __forceinline__ float key_offset(const TileQuery<Traits>& query, int s, int tile, int m_tile, int lane, int c) {
  if constexpr (!Traits::kKeyPerChannel && !kStatic<typename Traits::Key>) return 0.f;
  if constexpr (Traits::kSubtileKeyGroups == 1) return query.affine[s * Traits::kStepKeyGroups / Traits::kStepSubtiles][tile][c];
  const float first = query.affine[2 * s][tile][c], second = query.affine[2 * s + 1][tile][c];
  return (Traits::kQueryTwice ? lane % 4 / 2 : m_tile) ? second : first;
}

// Combines the products of all channel groups with the scales and zeros that K has per token.
template <class Traits>
__device__ __forceinline__ void scale_by_token(const Shared<Traits>& shared, const Products<Traits>& products, uint32_t params, int tile,
                                               int lane, Scores<Traits>& x) {
  float scale[Traits::kMTiles][Traits::kKeyGroups][2], zero[Traits::kMTiles][Traits::kKeyGroups][2];
  load_row_params<Traits, typename Traits::Key, Traits::kKeyGroups>(params, lane, scale, zero);
#pragma unroll
  for (int q = 0; q < Traits::kKeyGroups; ++q) {
    LaneValues<Traits> own;
    own_products<Traits>(products[q][0], products[q][1], lane, own);
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = q_row<Traits>(tile, lane, i);
        const float sum = shared.query_sums[q * Traits::kQTiles * 8 + row] * shared.factors[row];
        x.product[m_tile][i] = fmaf(own[m_tile][i], scale[m_tile][q][i / 2], q ? x.product[m_tile][i] : 0.f);
        if constexpr (is_shifted<typename Traits::Key>())
          x.offset[m_tile][i] = fmaf(zero[m_tile][q][i / 2], sum, q ? x.offset[m_tile][i] : 0.f);
        else
          x.offset[m_tile][i] = 0.f;
      }
  }
}

// Converts products to scores in log2 units, for one tile of query rows and the sub-tiles from `subtile` on.
template <class Traits, int kStepSubtiles>
__device__ __forceinline__ void to_scores(const Shared<Traits>& shared, const Products<Traits> (&products)[kStepSubtiles][Traits::kQTiles],
                                          const TileQuery<Traits>& query, const LaneValues<Traits>& factors, uint32_t subtile, int tile,
                                          int lane, Scores<Traits> (&x)[kStepSubtiles]) {
  if constexpr (Traits::kErrorInCopy) own_sums<Traits>(subtile + Traits::Key::kCodes, products, lane, x);
  if constexpr (Traits::kIntegerKeys) own_integer_sums<Traits>(subtile + Traits::Key::kCodes, products, lane, x);
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s) {
    if constexpr (Traits::kKeyPerToken)
      scale_by_token<Traits>(shared, products[s][tile], subtile + s * Traits::kSubtileStride + Traits::Key::kTokenParams, tile, lane, x[s]);
    else if constexpr (!Traits::kErrorInCopy && !Traits::kIntegerKeys)
      own_products<Traits>(products[s][tile][0][0], products[s][tile][0][1], lane, x[s].product);
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[s].factor[m_tile][i] = factors[m_tile][i];
        if constexpr (Traits::kIntegerKeys) x[s].factor[m_tile][i] *= query.unit[s * Traits::kStepKeyGroups / kStepSubtiles][tile][i % 2];
        if constexpr (!Traits::kKeyPerToken) x[s].offset[m_tile][i] = key_offset<Traits>(query, s, tile, m_tile, lane, i % 2);
      }
  }
}

// The query operands that a warp keeps for all KV tiles of a head.
template <class Traits>
struct LoopQuery {
  LaneValues<Traits> factors[Traits::kQTiles];
  TileQuery<Traits> tile;
};

// Attends to kStepSubtiles sub-tiles of the pipeline's oldest KV tile, from the `sub`-th on, which is at `position`.
template <class Traits, bool kMasked, class Pipeline>
__device__ __forceinline__ void attend_subtiles(const Shared<Traits>& shared, Pipeline& pipeline, int sub, LoopQuery<Traits>& query,
                                                int position, const PackedMask<Traits>& mask, int lane,
                                                State<Traits> (&state)[Traits::kQTiles]) {
  constexpr int kStepSubtiles = Traits::kStepSubtiles;
  const uint32_t slot = pipeline.ring.slot(pipeline.slot);
  const uint32_t subtile = slot + Traits::kTileHeaderBytes + sub * Traits::kSubtileStride;
  Products<Traits> products[kStepSubtiles][Traits::kQTiles];
  ValueParams<Traits> params[kStepSubtiles];
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s) {
    const uint32_t at = subtile + s * Traits::kSubtileStride;
    pipeline.wait(sub + s);
    if constexpr (Traits::kKeyPerChannel) scale_query<Traits>(shared, slot, (sub + s) * 32, lane, query.tile);
    if constexpr (Traits::kIntegerKeys)
      multiply_integer_keys<Traits>(at, lane, query.tile.fragments[0][0], products[s][0]);
    else
      multiply_keys<Traits>(at, lane, query.tile.fragments, query.tile.boost, products[s]);
    load_value_params<Traits>(at + Traits::Value::kTokenParams, lane, params[s]);
    if constexpr (kMasked) mask.clean(position + s * 32, lane, params[s]);
  }
  Weights<Traits> weights[Traits::kQTiles][kStepSubtiles];
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
    Scores<Traits> x[kStepSubtiles];
    to_scores<Traits>(shared, products, query.tile, query.factors[tile], subtile, tile, lane, x);
#pragma unroll
    for (int s = 0; s < kStepSubtiles; ++s) {
      modify_scores<Traits>(mask.seqlen, position + s * 32, tile, lane, x[s]);
      if constexpr (kMasked) mask.apply(position + s * 32, tile, lane, x[s]);
    }
    softmax_step<Traits>(x, params, state[tile], weights[tile]);
  }
#pragma unroll
  for (int s = 0; s < kStepSubtiles; ++s) {
    multiply_values<Traits>(subtile + s * Traits::kSubtileStride + Traits::Value::kCodes, slot + Traits::KeyChannelParams::kBytes,
                            (sub + s) * 32, lane, weights, s, state,
                            ValueTokens<Traits, kMasked>{mask.seqlen.packed_end - position - s * 32});
    pipeline.release(sub + s);
  }
}

// Runs over every `stride`-th KV tile from `tile` to `stop`. Returns the first tile beyond.
template <class Traits, bool kMasked, class Pipeline>
__device__ __forceinline__ int run_tiles(const Shared<Traits>& shared, Pipeline& pipeline, int tile, int stop, int stride,
                                         const PackedMask<Traits>& mask, LoopQuery<Traits>& query, int lane,
                                         State<Traits> (&state)[Traits::kQTiles]) {
  for (; tile < stop; tile += stride) {
#pragma unroll
    for (int sub = 0; sub < Traits::kTileSubtiles; sub += Traits::kStepSubtiles) {
      const int position = Traits::Format::ResidualRows::kSink + tile * Traits::kTileTokens + sub * 32;
      attend_subtiles<Traits, kMasked>(shared, pipeline, sub, query, position, mask, lane, state);
    }
    pipeline.step();
  }
  return tile;
}

// Attends to this warp's packed tiles: every `stride`-th from `tile` to `stop`. Tiles that need a mask have loops of their own, because
// they are few and a branch in the main loop would keep the compiler from interleaving its instructions. The accumulators stay in mixed
// form (codec/integers.cuh).
template <class Traits, class Pipeline>
__device__ __forceinline__ void attend_packed(const Shared<Traits>& shared, Pipeline& pipeline, int tile, int stop, int stride,
                                              const PackedMask<Traits>& mask, int lane, State<Traits> (&state)[Traits::kQTiles]) {
  using Mask = PackedMask<Traits>;
  constexpr bool kMaskedEnd = Mask::kCausal || Mask::kOpenEnd;
  LoopQuery<Traits> query;
#pragma unroll
  for (int i = 0; i < Traits::kQTiles; ++i) row_factors<Traits>(shared.packed_factors(), i, lane, query.factors[i]);
  lane = ptx::pinned(lane);
  __builtin_assume(lane >= 0 && lane < 32);
  if constexpr (!Traits::kKeyPerChannel) load_query<Traits>(shared, lane, query.tile);
  if constexpr (Mask::kWindowed)
    tile = run_tiles<Traits, true>(shared, pipeline, tile, min(stop, mask.first_clear_tile()), stride, mask, query, lane, state);
  if constexpr (kMaskedEnd)
    tile = run_tiles<Traits, false>(shared, pipeline, tile, min(stop, mask.end_clear_tile()), stride, mask, query, lane, state);
  run_tiles<Traits, kMaskedEnd>(shared, pipeline, tile, stop, stride, mask, query, lane, state);
}

}  // namespace kvgen
