// Into how many parts to cut heads that all have as many: the host's choice.
#pragma once
#include <algorithm>

#include "kvgen/format/packed_format.cuh"

namespace kvgen {

// What a multiprocessor could read while a CTA starts, merges and combines.
constexpr int kStartBytes = 96 * 1024;

// A launch of `cells` heads (or runs of their columns), `resident` CTAs at a time, over units of `unit_bytes`.
struct SplitModel {
  int heads, resident, tile_bytes;

  // No length gets more: what a workspace must hold.
  int most(int limit) const { return std::clamp(2 * resident / heads, 1, limit); }

  // The cheapest for heads of `units`: CTAs run in waves, each as long as a part and a start; results of more parts take longer to add.
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
