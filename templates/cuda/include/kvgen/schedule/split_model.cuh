// The host's model of time: how many splits a head gets where all heads get the same number, and the cost of a head's start in a plan.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kvgen/format/elements.cuh"

namespace kvgen {

// Bytes that a CTA with a plan could read, at its share of the SM's rate, while it goes from one head to the next. Its rings are among
// them, because they are refilled.
constexpr int start_bytes(int ctas_per_sm, int ring_bytes) { return 48 * 1024 / ctas_per_sm + ring_bytes; }

// Unquantized tokens that have as many bytes as a KV tile.
constexpr int tile_residual(int tile_bytes, int head_dim) { return std::max(1, tile_bytes / (2 * head_dim * 2)); }

// A launch of `heads` heads (or runs of their query rows), `resident` CTAs at a time, over KV tiles of `tile_bytes`. An SM could read
// `wave_bytes` while the CTAs of a wave start and end.
struct SplitModel {
  static constexpr int kMostWaves = 8;
  static constexpr int kWaveBytes = 160 * 1024;  // of the CUDA kernels
  static constexpr int kReduceBytes = 3 * 1024;  // which a CTA could read while it reduces one more split
  int heads, resident, ctas_per_sm, tile_bytes, wave_bytes = kWaveBytes;

  // Upper bound over all lengths, for the size of the workspace.
  int most(int limit) const { return std::clamp(kMostWaves * resident / std::max(heads, 1), 1, limit); }

  // The cheapest number of splits for heads of `tiles` tiles. CTAs run in waves of equal duration. More splits may fill the last wave.
  int cheapest(int tiles, int limit) const {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int splits = 1; splits <= std::min(most(limit), std::max(1, tiles)); ++splits) {
      const int64_t waves = ceil_div(heads * splits, resident);
      const int64_t wave = ceil_div(tiles, splits) * int64_t{tile_bytes} + wave_bytes / ctas_per_sm;
      const int64_t cost = waves * wave + splits * int64_t{kReduceBytes};
      if (cost < least) least = cost, best = splits;
    }
    return best;
  }
};

}  // namespace kvgen
