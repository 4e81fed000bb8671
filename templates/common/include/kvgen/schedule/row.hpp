// The row of KV tiles of a plan, and the ranges that it is cut into (kvgen/schedule/plan.hpp makes a plan of them).
#pragma once
#include "kvgen/schedule/divisor.hpp"

namespace kvgen {

// The load of a head: how much it reads, in KV tiles. A head without tiles counts as one, because its residual needs a worker.
struct HeadLoad {
  int tiles;
  int residual;  // the KV tiles that have as many bytes as its unquantized tokens

  KVGEN_HOST_DEVICE int all() const { return tiles + residual; }
};

// How the heads lie in the row, and how the row is cut.
//
// There are two kinds of rows. A shared range may hold tiles of several heads. Then `head_cost` empty positions precede the tiles of each
// head, as many tiles as a worker could read while it starts on a head, and empty positions for the residual follow the tiles. Otherwise
// every head has ranges of its own: a row of these has neither kind of empty positions, but the last range of a head may be partly empty.
struct Row {
  int each = 1;       // positions of a range
  int total = 0;      // positions of the row
  int ranges = 0;     // ranges of the row
  int head_cost = 0;  // empty positions before the tiles of a head
  bool shared = true;

  // Positions of a head.
  KVGEN_HOST_DEVICE int positions(const HeadLoad& load) const { return shared ? head_cost + load.all() : own_ranges(load) * each; }
  // The last positions of a head, which stand for its residual.
  KVGEN_HOST_DEVICE int gap(const HeadLoad& load) const { return shared ? load.residual : 0; }
  // Ranges of a head that has its own.
  KVGEN_HOST_DEVICE int own_ranges(const HeadLoad& load) const { return (load.tiles + each - 1) / each; }
  // The worker of a range. Fewer ranges than workers are spread evenly, because consecutive CTAs may share a multiprocessor. (The test
  // saves a division where there are as many.)
  KVGEN_HOST_DEVICE int worker(int range, int workers) const { return ranges == workers ? range : range * workers / ranges; }
};

// The range lengths that are tried where every head has its own ranges: multiples of `unit`, from the longest one downwards.
struct OwnLengths {
  static constexpr int kMost = 32;  // one for each lane of a warp
  int longest = 0, unit = 1, count = 0;

  KVGEN_HOST_DEVICE int operator[](int i) const { return longest - i * unit; }
};

}  // namespace kvgen
