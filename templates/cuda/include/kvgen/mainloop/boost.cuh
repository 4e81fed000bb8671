// Boosted channels of K (Kitty): x = scale * (low + 4 * high) + zero. The upper bits `high` are a second stream of codes, and every 16
// boosted channels are one more k-step of the MMA, whose B operand is q * 4 scale of these channels.
#pragma once
#include "kvgen/format/places.cuh"
#include "kvgen/mainloop/query.cuh"

namespace kvgen {

// Products of K's codes and q for one tile of query rows: [group][16-token MMA tile][2 * half + c].
template <class Traits>
using Products = std::conditional_t<Traits::kIntegerKeys, int, float>[Traits::kKeyGroups][2][4];

// The boosted channels of a KV tile, distributed over the lanes: lane i has the channels i, i + 32, ... of the boost index.
template <class Traits>
struct BoostedChannels {
  using Places = kvgen::Places<typename Traits::Format, Which::key>;
  static constexpr int kCount = Traits::Format::kBoosted;
  static constexpr int kRounds = ceil_div(kCount, 32);
  uint32_t words[kRounds];  // low half: 4 * scale; high half: the channel's offset in row 0 of q, in bytes

  // `header`: the tile's K channel params, and behind them its boost index.
  __device__ __forceinline__ BoostedChannels(uint32_t header, int lane) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int position = round * 32 + (kCount - round * 32 < 32 ? lane % 16 : lane);
      const int channel = static_cast<int>(ptx::load_shared1(header + Traits::kTileParamBytes + position));
      __builtin_assume(channel >= 0 && channel < Traits::kHeadDim);
      const uint32_t scale = ptx::load_shared2(header + Places::param_offset(0, 0, channel));
      words[round] =
          static_cast<uint32_t>(query_offset<Traits>(channel)) << 16 | ptx::as_u32(__hmul2(ptx::as_half2(scale), __float2half2_rn(4.f)));
    }
  }
  // The word of a channel. Warp-collective.
  __device__ __forceinline__ uint32_t operator()(int round, int lane) const { return __shfl_sync(~0u, words[round], lane); }
};

// B fragments of the boosted channels, for a tile of query rows. Empty without boost.
template <class Traits, bool kBoosted = (Traits::Format::kBoosted > 0)>
struct BoostQuery {};

template <class Traits>
struct BoostQuery<Traits, true> {
  static constexpr int kBoostSteps = Traits::Format::kBoosted / 16;
  static constexpr bool kLow = QueryFragments<Traits>::kLow;
  uint32_t high[kBoostSteps][2];
  uint32_t low[kLow ? kBoostSteps : 1][2];

  // Gathers q from the fragments in shared memory. It runs once per KV tile.
  __device__ __forceinline__ void gather(uint32_t fragments, const BoostedChannels<Traits>& channels, int tile, int lane) {
    lane = ptx::pinned(lane);  // shuffle indices are computed again for every tile, which keeps them out of the loop's registers
    const uint32_t row = fragments + tile * (Traits::kHeadDim * 16) + lane / 4 * 64;
    const auto load = [&](uint32_t word) { return ptx::load_shared2(query_address<Traits>(row, lane / 4, word >> 16)); };
    const __half2 negate = ptx::as_half2(lane < 16 ? 0u : 0xbc00bc00u);  // 0 or -1
#pragma unroll
    for (int step = 0; step < kBoostSteps; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from = k_slot_channel(step, 2 * (lane % 4) + 8 * half, Traits::Format::kBoosted) % 32;
        const uint32_t a = channels(step / 2, from), b = channels(step / 2, from + 1);
        const uint32_t q = __byte_perm(load(a), load(b), 0x5410);
        const uint32_t negated = Traits::kErrorInCopy ? ptx::as_u32(__hmul2(ptx::as_half2(q), negate)) : 0;
        high[step][half] = scaled_pair<Traits>(q, negated, __byte_perm(a, b, 0x5410), &low[kLow ? step : 0][half]);
      }
  }
};

// Adds the products of the upper bits to those of the lower bits, in mixed form like them.
template <class Traits>
__device__ __forceinline__ void multiply_boost(uint32_t codes, int lane, const BoostQuery<Traits> (&query)[Traits::kQTiles],
                                               Products<Traits> (&products)[Traits::kQTiles]) {
  using Query = BoostQuery<Traits>;
  visit_words<typename Traits::Key::Codec, Query::kBoostSteps>(codes, lane, [&](int step, const uint32_t* words) {
    Traits::Key::Codec::template expand<false>(words, 0, [&](int rows, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
      for (int tile = 0; tile < Traits::kQTiles; ++tile) {
        float(&sum)[4] = products[tile][0][rows];
        ptx::mma(sum, a0, a1, a2, a3, query[tile].high[step][0], query[tile].high[step][1]);
        if constexpr (Query::kLow) ptx::mma(sum, a0, a1, a2, a3, query[tile].low[step][0], query[tile].low[step][1]);
      }
    });
  });
}

}  // namespace kvgen
