// The host's model of how many splits a head gets, where all heads get the same number.
#pragma once
#include <algorithm>

#include "kvgen/format/packed_format.cuh"

namespace kvgen {

// Bytes that an SM could read while a CTA starts, merges and reduces.
constexpr int kStartBytes = 96 * 1024;

// A launch of `heads` heads (or runs of their query rows), `resident` CTAs at a time, over KV tiles of `tile_bytes`.
struct SplitModel {
  int heads, resident, tile_bytes;

  // Upper bound over all lengths, for the size of the workspace.
  int most(int limit) const { return std::clamp(2 * resident / heads, 1, limit); }

  // The cheapest number of splits for heads of `tiles` tiles. CTAs run in waves; a wave lasts as long as a split and a CTA's start.
  // Reducing more splits takes longer.
  int cheapest(int tiles, int limit) const {
    const double start = static_cast<double>(kStartBytes) / tile_bytes;
    int best = 1;
    double least = 1e300;
    for (int splits = 1; splits <= std::min(limit, std::max(1, tiles)); ++splits) {
      const int waves = ceil_div(heads * splits, resident);
      const double cost = waves * (ceil_div(tiles, splits) + start) + 0.125 * start * splits / 4;
      if (cost < least) least = cost, best = splits;
    }
    return best;
  }
};

}  // namespace kvgen
