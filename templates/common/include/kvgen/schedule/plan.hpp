// The plan of a step: the KV tiles that each worker attends to. A worker is a CTA of a launch, or a unit of work on the CPU.
//
// All KV tiles of all heads lie in one row, ordered by sequence and head, and each worker has an equal range of the row (stream-K, Osama et
// al., 2023). Where that makes ranges shorter, no worker has tiles of two heads (see Row). The plan is a pure function of the sequence
// lengths and of PlanShape; kvgen/reference/plan.py is its oracle.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KVGEN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVGEN_HOST_DEVICE inline
#endif

namespace kvgen {

// A work tile: a range [first, end) of the KV tiles of one head, and the data for its reduction. All fields are int32, as the plan stores
// them.
struct alignas(16) WorkTile {
  int sequence = 0;
  int head = 0;  // KV head, or a run of its query rows: see PlanShape::heads
  int first = 0, end = 0;
  int split_idx = 0, num_splits = 0;  // num_splits is 0 if there is no work tile
  int slot = 0;                       // of the partial result; the slots of a head are consecutive
  int length = 0;                     // tokens of the sequence before the step
};
static_assert(sizeof(WorkTile) == 32);

// The work tiles of a worker, as indices [begin, end) into the plan's list.
struct WorkRange {
  int begin = 0, end = 0;
};

// The row of KV tiles, and how it is cut. Either several heads may lie in a worker's range: then `head_cost` empty positions precede the
// tiles of each head, which are as many as a worker could read while it starts on a head. Or every head has workers of its own: then its
// positions are a multiple of a range, and there is nothing to start on within a range.
struct Row {
  int each = 0;       // positions of a worker's range
  int head_cost = 0;  // empty positions before the tiles of a head
  int multiple = 1;   // what the positions of a head's tiles are rounded up to

  // Positions of a head of so many tiles. A head without tiles has the position of one, for its residual.
  KVGEN_HOST_DEVICE int positions(int tiles) const { return head_cost + (tiles > 1 ? (tiles + multiple - 1) / multiple * multiple : multiple); }
};

// Ranges to try where every head has workers of its own: equally spaced, from that which the KV tiles fill to that of the shared row.
struct OwnRanges {
  static constexpr int kTried = 32;
  int least = 1, step = 1, count = 0;

  KVGEN_HOST_DEVICE int operator[](int i) const { return least + i * step; }
};

// The inputs of a plan besides the lengths.
struct PlanShape {
  int batch = 0;
  int heads = 0;  // KV heads of a sequence, times the runs of query rows that are CTAs of their own
  int workers = 0;
  int tile_tokens = 0;   // tokens of a KV tile; tile t of a head holds the packed tokens from t * tile_tokens on, counted after the sink
  int block_tokens = 0;  // tokens of a packed block: tokens that no block holds are in no KV tile
  int head_cost = 0;     // in KV tiles
  int least_tiles = 0;   // fewest KV tiles per worker
  int window = 0;        // tokens of the sliding window; 0: none
  int q_len = 0;         // query tokens of the step
  int fresh = 0;         // tokens that the step appends: q_len for decode, 0 for attend
  int unpacked = 0;      // sink and local tokens (ResidualRows::kUnpacked), which are never in a packed block

  // Tokens of a sequence that are packed.
  KVGEN_HOST_DEVICE int packed(int length) const { return length > unpacked ? (length - unpacked) / block_tokens * block_tokens : 0; }
  KVGEN_HOST_DEVICE int end_tile(int length) const { return (packed(length) + tile_tokens - 1) / tile_tokens; }
  // The first KV tile that holds a token which the step's first query attends to. If the window begins in the residual, no KV tile holds
  // one, even if a gathered tile covers that position. A window never goes with sink tokens, so tiles begin at position 0 here.
  KVGEN_HOST_DEVICE int first_tile(int length) const {
    const int token = length + fresh - q_len - window + 1;
    if (window == 0 || token <= 0) return 0;
    return token < packed(length) ? token / tile_tokens : end_tile(length);
  }
  KVGEN_HOST_DEVICE int tiles(int length) const { return end_tile(length) - first_tile(length); }
  // Positions per worker in a row of `total`.
  KVGEN_HOST_DEVICE int positions_per_worker(int total) const {
    const int each = (total + workers - 1) / workers;
    return each > least_tiles ? each : least_tiles;
  }
  // The row of `number` heads which several of may lie in one range. Without empty positions these have `positions` positions.
  KVGEN_HOST_DEVICE Row shared_row(int number, int positions) const {
    Row row;
    row.each = positions_per_worker(positions + number * head_cost), row.head_cost = head_cost;
    return row;
  }
  // The row in which every head has workers of its own.
  KVGEN_HOST_DEVICE Row own_row(int each) const {
    Row row;
    row.each = row.multiple = each;
    return row;
  }
  // There are none with more heads than workers, and where nothing is saved because starting on a head costs nothing.
  KVGEN_HOST_DEVICE OwnRanges own_ranges(int number, int positions) const {
    OwnRanges ranges;
    if (head_cost == 0 || number > workers) return ranges;
    const int most = shared_row(number, positions).each;
    ranges.least = positions_per_worker(positions);
    ranges.step = (most - ranges.least) / OwnRanges::kTried + 1;
    ranges.count = (most - ranges.least) / ranges.step + 1;
    return ranges;
  }
  KVGEN_HOST_DEVICE int most_work_tiles() const { return batch * heads + workers; }
  // Whether an int holds the positions of all heads of sequences of `max_len` tokens.
  bool countable(int max_len) const {
    const int64_t positions = head_cost + static_cast<int64_t>(max_len) / tile_tokens + 1;
    return static_cast<int64_t>(batch) * heads * positions <= INT32_MAX / 2;
  }

  // The plan in memory, as offsets in int32: a header, a WorkRange for each worker, the work tiles, the empty sequences.
  static constexpr int kHeader = 8;  // [0]: number of empty sequences
  KVGEN_HOST_DEVICE int ranges_at() const { return kHeader; }
  KVGEN_HOST_DEVICE int tiles_at() const { return (kHeader + 2 * workers + 7) / 8 * 8; }
  KVGEN_HOST_DEVICE int empty_at() const { return tiles_at() + 8 * most_work_tiles(); }
  KVGEN_HOST_DEVICE int64_t size() const { return static_cast<int64_t>(empty_at()) + batch; }

  // Writes the header. If no sequence attends, also writes the ranges, which are empty.
  KVGEN_HOST_DEVICE void begin(int* plan, int empty, int total) const {
    for (int i = 0; i < kHeader; ++i) plan[i] = i == 0 ? empty : 0;
    if (total > 0) return;
    for (int i = ranges_at(); i < tiles_at(); ++i) plan[i] = 0;
  }
};

// The position of a head in the row, and the workers that share it.
struct HeadRange {
  int number;  // index of the head among those that attend
  int at, tiles_at, end;
  int first_worker, last_worker;

  KVGEN_HOST_DEVICE HeadRange(const Row& row, int number_, int at_, int tiles)
      : number(number_), at(at_), tiles_at(at_ + row.head_cost), end(at_ + row.positions(tiles)) {
    first_worker = tiles_at / row.each, last_worker = (end - 1) / row.each;
  }
  // The index of the worker's work tile, and the slot of its partial result. From one work tile to the next either the head or the worker
  // advances, so number + worker is unique.
  KVGEN_HOST_DEVICE int index(int worker) const { return number + worker; }
  // Whether it is the worker's first work tile: the previous head ends before the worker's range.
  KVGEN_HOST_DEVICE bool is_first_of(int worker, int each) const { return at <= worker * each; }
  // Whether it is the worker's last work tile: the next head's tiles begin after the worker's range.
  KVGEN_HOST_DEVICE bool is_last_of(const Row& row, int worker, int total) const {
    return end == total || end + row.head_cost >= (worker + 1) * row.each;
  }
  // The first of the workers before `first_worker` that have no work tile, because their ranges lie in the empty positions before this
  // head.
  KVGEN_HOST_DEVICE int first_idle(int each) const { return at == 0 ? 0 : (at - 1) / each + 1; }

  KVGEN_HOST_DEVICE WorkTile work_tile(const PlanShape& shape, int worker, int each, int sequence, int head, int length) const {
    const int skipped = shape.first_tile(length), n = shape.end_tile(length) - skipped;
    const int from = worker * each - tiles_at, to = from + each;
    WorkTile tile;
    tile.sequence = sequence, tile.head = head, tile.length = length;
    tile.first = skipped + (from > 0 ? from : 0), tile.end = skipped + (to < n ? to : n);
    tile.split_idx = worker - first_worker, tile.num_splits = last_worker - first_worker + 1;
    tile.slot = index(worker);
    return tile;
  }

  // Writes the work tiles of every `step`-th worker from `first_worker + start` on, and the ranges of workers of which they are the first
  // or the last. With `start` 0 it also writes the empty ranges of workers before the head and, if the head is the last one, after it.
  KVGEN_HOST_DEVICE void write(const PlanShape& shape, const Row& row, int* plan, int total, int sequence, int head, int length, int start,
                               int step) const {
    const int each = row.each;
    WorkRange* ranges = reinterpret_cast<WorkRange*>(plan + shape.ranges_at());
    WorkTile* tiles = reinterpret_cast<WorkTile*>(plan + shape.tiles_at());
    for (int w = first_worker + start; w <= last_worker; w += step) {
      tiles[index(w)] = work_tile(shape, w, each, sequence, head, length);
      if (is_first_of(w, each)) ranges[w].begin = index(w);
      if (is_last_of(row, w, total)) ranges[w].end = index(w) + 1;
    }
    if (start > 0) return;
    for (int w = first_idle(each); w < first_worker; ++w) ranges[w] = WorkRange{};
    if (end == total)
      for (int w = last_worker + 1; w < shape.workers; ++w) ranges[w] = WorkRange{};
  }
};

// The role of a sequence in a step.
enum class SequenceStep {
  attends,
  empty,     // it has no tokens and the step appends none: its output is zero
  overflows  // it has no room for the step's tokens: nothing is written
};

// `skip_empty`: the step appends nothing to empty sequences. `limit`: maximum length of a sequence.
KVGEN_HOST_DEVICE SequenceStep step_of(int length, int fresh, int limit, bool skip_empty) {
  if (length <= 0 && (fresh == 0 || skip_empty)) return SequenceStep::empty;
  return length > limit - fresh ? SequenceStep::overflows : SequenceStep::attends;
}

// Writes the plan of `lengths`, by one thread. Returns whether a sequence overflows.
inline bool make_plan(const PlanShape& shape, const int* lengths, int limit, bool skip_empty, int* plan) {
  const auto step = [&](int b) { return step_of(lengths[b], shape.fresh, limit, skip_empty); };
  // The sum over all heads of `count` of a head's tiles.
  const auto sum = [&](auto count) {
    int total = 0;
    for (int b = 0; b < shape.batch; ++b)
      if (step(b) == SequenceStep::attends) total += shape.heads * count(shape.tiles(lengths[b]));
    return total;
  };
  int empty = 0;
  bool overflow = false;
  for (int b = 0; b < shape.batch; ++b) {
    if (step(b) == SequenceStep::empty) plan[shape.empty_at() + empty++] = b;
    overflow |= step(b) == SequenceStep::overflows;
  }
  const int heads = sum([](int) { return 1; }), positions = sum([](int tiles) { return Row{}.positions(tiles); });
  Row row = shape.shared_row(heads, positions);
  const OwnRanges ranges = shape.own_ranges(heads, positions);
  for (int i = ranges.count - 1; i >= 0; --i) {
    const Row own = shape.own_row(ranges[i]);
    if (sum([&](int tiles) { return own.positions(tiles) / own.each; }) <= shape.workers) row = own;
  }
  const int total = sum([&](int tiles) { return row.positions(tiles); });
  shape.begin(plan, empty, total);
  for (int b = 0, number = 0, at = 0; b < shape.batch; ++b) {
    if (step(b) != SequenceStep::attends) continue;
    for (int head = 0; head < shape.heads; ++head, ++number) {
      const HeadRange range(row, number, at, shape.tiles(lengths[b]));
      range.write(shape, row, plan, total, b, head, lengths[b], 0, 1);
      at = range.end;
    }
  }
  return overflow;
}

}  // namespace kvgen
