// Spans of packed sub-tiles: scores, softmax, values of the tokens that a warp weighs together.
#pragma once
#include "kvgen/subtile.cuh"

namespace kvgen {

// A CTA's shared memory by name.
template <class Traits>
struct Shared {
  uint8_t* memory;
  uint8_t* fragments;  // of q
  float* factors;      // per column: from products to log2 units
  float* query_sums;   // per K group and column: sum of q
  float* merge;
  Total* warp_totals;
  int* lengths;
  int* flags;

  __device__ explicit Shared(uint8_t* memory_) : memory(memory_) {
    fragments = memory + Traits::kQuery;
    factors = reinterpret_cast<float*>(memory + Traits::kSmall);
    query_sums = factors + Traits::kColumnTiles * 8;
    warp_totals = reinterpret_cast<Total*>(query_sums + Traits::kColumnTiles * 8 * Traits::kKeyGroups);
    flags = reinterpret_cast<int*>(memory + Traits::kSmall) + Traits::kSmallFloats;
    merge = reinterpret_cast<float*>(memory + Traits::kMerge);
    lengths = reinterpret_cast<int*>(memory + Traits::kLengths);
  }
  __device__ uint32_t ring() const { return ptx::shared_address(memory); }
  __device__ uint32_t query() const { return ptx::shared_address(fragments); }
};

// What a unit's scores need besides its codes.
template <class Traits>
struct UnitQuery {
  QueryFragments<Traits> fragments[Traits::kColumnTiles];
  float affine[Traits::kColumnTiles][2];  // of q * zero, in log2 units (K per channel)
};

template <class Traits>
__device__ __forceinline__ void prepare_query(const Shared<Traits>& shared, uint32_t params, int lane, UnitQuery<Traits>& query) {
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    if constexpr (Traits::kKeyPerChannel) {
      query.fragments[tile].load_scaled(shared.query(), params, tile, lane, query.affine[tile]);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        query.affine[tile][c] *= (Traits::Key::kZero ? 1.f : -1.f * Traits::Key::kOffset) *
                                 shared.factors[tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + c];
    } else {
      query.fragments[tile].load(shared.query(), tile, lane);
    }
  }
}

// Products and offsets where K has scales per token: [group] of products, joined by their scales.
template <class Traits>
__device__ __forceinline__ void scale_by_token(const Shared<Traits>& shared, const Products<Traits>& products, uint32_t params, int tile,
                                               int lane, Scores<Traits>& x) {
  float scale[Traits::kParts][Traits::kKeyGroups][2], zero[Traits::kParts][Traits::kKeyGroups][2];
  load_row_params<Traits, typename Traits::Key, Traits::kKeyGroups>(params, lane, scale, zero);
#pragma unroll
  for (int q = 0; q < Traits::kKeyGroups; ++q) {
    Rows16<Traits> own;
    own_products<Traits>(products[q][0], products[q][1], lane, own);
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + i % 2;
        const float sum = shared.query_sums[q * Traits::kColumnTiles * 8 + column] * shared.factors[column];
        x.product[part][i] = fmaf(own[part][i], scale[part][q][i / 2], q ? x.product[part][i] : 0.f);
        x.offset[part][i] = fmaf(zero[part][q][i / 2], sum, q ? x.offset[part][i] : 0.f);
      }
  }
}

// From products to scores in log2 units, of one column tile, for the sub-tiles from `subtile` on.
template <class Traits, int kSpan>
__device__ __forceinline__ void to_scores(const Shared<Traits>& shared, const Products<Traits> (&products)[kSpan][Traits::kColumnTiles],
                                          const UnitQuery<Traits>& query, const Rows16<Traits>& factors, uint32_t subtile, int tile,
                                          int lane, Scores<Traits> (&x)[kSpan]) {
  if constexpr (Traits::kResidualHalves) own_sums<Traits>(subtile + Traits::Format::kKeyCodes, products, lane, x);
#pragma unroll
  for (int s = 0; s < kSpan; ++s) {
    if constexpr (Traits::kKeyPerToken)
      scale_by_token<Traits>(shared, products[s][tile], subtile + s * Traits::kTileBytes + Traits::Format::kKeyTokenParams, tile, lane,
                             x[s]);
    else if constexpr (!Traits::kResidualHalves)
      own_products<Traits>(products[s][tile][0][0], products[s][tile][0][1], lane, x[s].product);
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[s].factor[part][i] = factors[part][i];
        if constexpr (!Traits::kKeyPerToken) x[s].offset[part][i] = Traits::kKeyPerChannel ? query.affine[tile][i % 2] : 0.f;
      }
  }
}

// Which packed tokens queries may see: those before their own position, and none that are not there.
template <class Traits>
struct Sight {
  static constexpr bool kLimited = Traits::kQueries > 1 || Traits::kGathered;
  int length;  // of the sequence
  int q_len;   // its last tokens are the queries'
  int kept;    // packed tokens: of a gathered unit, some blocks may be missing

  // Units that every query sees whole.
  __device__ __forceinline__ int clear_units() const {
    int tokens = Traits::kQueries > 1 ? max(length - q_len + 1, 0) : kept;
    if (Traits::kGathered) tokens = min(tokens, kept);
    return tokens / Traits::kUnitTokens;
  }
  // Scores of what is not seen become minus infinity. `first` is the sub-tile's position.
  __device__ __forceinline__ void mask(int first, int tile, int lane, Scores<Traits>& x) const {
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + i % 2,
                  token = first + first_row<Traits>(part, lane) + i / 2 * 8;
        if (Traits::kQueries > 1 && token > length - q_len + column / Traits::kGroup) x.offset[part][i] = -INFINITY;
        if (Traits::kGathered && token >= kept) x.offset[part][i] = -INFINITY;
      }
  }
};

// What a warp needs of a head for all its units.
template <class Traits>
struct HeadQuery {
  Rows16<Traits> factors[Traits::kColumnTiles];
  UnitQuery<Traits> unit;  // K per channel: of the present unit
};

// kSpan sub-tiles from `subtile` on, the first at `position`. `before(s)` waits for sub-tile s, `after(s)` has seen it for the last time.
template <class Traits, bool kMasked, class Before, class After>
__device__ __forceinline__ void attend_span(const Shared<Traits>& shared, uint32_t subtile, const HeadQuery<Traits>& query, int position,
                                            const Sight<Traits>& sight, int lane, State<Traits> (&state)[Traits::kColumnTiles],
                                            Before&& before, After&& after) {
  using Format = typename Traits::Format;
  constexpr int kSpan = Traits::kSpan;
  Products<Traits> products[kSpan][Traits::kColumnTiles];
  ValueParams<Traits> params[kSpan];
#pragma unroll
  for (int s = 0; s < kSpan; ++s) {
    before(s);
    multiply_keys<Traits>(subtile + s * Traits::kTileBytes + Format::kKeyCodes, lane, query.unit.fragments, products[s]);
    load_value_params<Traits>(subtile + s * Traits::kTileBytes + Format::kValueTokenParams, lane, params[s]);
  }
  Weights<Traits> weights[Traits::kColumnTiles][kSpan];
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    Scores<Traits> x[kSpan];
    to_scores<Traits>(shared, products, query.unit, query.factors[tile], subtile, tile, lane, x);
    if constexpr (kMasked)
#pragma unroll
      for (int s = 0; s < kSpan; ++s) sight.mask(position + s * 32, tile, lane, x[s]);
    softmax_step<Traits>(x, params, state[tile], weights[tile]);
  }
#pragma unroll
  for (int s = 0; s < kSpan; ++s) {
    multiply_values<Traits>(subtile + s * Traits::kTileBytes + Format::kValueCodes, lane, weights, s, state);
    after(s);
  }
}

// The packed loop: every `stride`-th unit from `unit` to `stop`; gives the first that is not.
template <class Traits, bool kMasked, class Walk>
__device__ __forceinline__ int run_units(const Shared<Traits>& shared, Walk& walk, int unit, int stop, int stride,
                                         const Sight<Traits>& sight, HeadQuery<Traits>& query, int lane,
                                         State<Traits> (&state)[Traits::kColumnTiles]) {
  for (; unit < stop; unit += stride) {
    const uint32_t slot = walk.ring.slot(walk.depth);
#pragma unroll
    for (int sub = 0; sub < Traits::kUnit; sub += Traits::kSpan) {
      const auto before = [&](int s) {
        if ((sub + s) % Traits::kStageSubtiles == 0) walk.ring.wait(walk.depth, (sub + s) / Traits::kStageSubtiles);
        if (Traits::kKeyPerChannel && sub + s == 0) prepare_query<Traits>(shared, slot, lane, query.unit);
      };
      const auto after = [&](int s) {
        if ((sub + s + 1) % Traits::kStageSubtiles == 0) walk.release((sub + s) / Traits::kStageSubtiles);
      };
      const int position = unit * Traits::kUnitTokens + sub * 32;
      attend_span<Traits, kMasked>(shared, slot + Traits::kUnitParams + sub * Traits::kTileBytes, query, position, sight, lane, state,
                                   before, after);
    }
    walk.step();
  }
  return unit;
}

// This warp's packed units: every `stride`-th from `unit` to `stop`. Those that some query may not see whole have a loop of their own: they
// are few, and a branch in the loop would part its instructions. The state's sums are mixed, as codes are.
template <class Traits, class Walk>
__device__ __forceinline__ void attend_units(const Shared<Traits>& shared, Walk& walk, int unit, int stop, int stride,
                                             const Sight<Traits>& sight, int lane, State<Traits> (&state)[Traits::kColumnTiles]) {
  HeadQuery<Traits> query;
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) row_factors<Traits>(shared.factors, tile, lane, query.factors[tile]);
  lane = ptx::pinned(lane);
  __builtin_assume(lane >= 0 && lane < 32);
  if constexpr (!Traits::kKeyPerChannel) prepare_query<Traits>(shared, 0, lane, query.unit);
  if constexpr (Sight<Traits>::kLimited)
    unit = run_units<Traits, false>(shared, walk, unit, min(stop, sight.clear_units()), stride, sight, query, lane, state);
  run_units<Traits, Sight<Traits>::kLimited>(shared, walk, unit, stop, stride, sight, query, lane, state);
}

}  // namespace kvgen
