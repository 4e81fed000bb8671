// The plan of a step: how KV tiles of all heads are distributed over workers.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KVGEN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVGEN_HOST_DEVICE inline
#endif

namespace kvgen {

// A number that divides by a multiplication and a shift (Granlund and Montgomery, "Division by invariant integers using multiplication",
// 1994), since a GPU has no instruction that divides integers. Dividends are not negative. It may be zero if nothing is divided by it.
class Divisor {
 public:
  constexpr Divisor(int value) : value_(value) {  // not explicit, so that a member of this type can be initialized from an int
    while ((int64_t{1} << shift_) < value) ++shift_;
    if (value > 0) multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - value) << 32) / value + 1);
  }
  KVGEN_HOST_DEVICE operator int() const { return value_; }
  KVGEN_HOST_DEVICE friend int operator/(int dividend, const Divisor& by) {
    const uint32_t n = static_cast<uint32_t>(dividend);
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * by.multiplier_) >> 32);
    return static_cast<int>((n + high) >> by.shift_);
  }
  friend int64_t operator/(int64_t dividend, const Divisor& by) { return dividend / by.value_; }  // for the host
  KVGEN_HOST_DEVICE friend int operator%(int dividend, const Divisor& by) { return dividend - dividend / by * by.value_; }

 private:
  int value_ = 0;
  int shift_ = 0;            // the least for which value <= 2^shift
  uint32_t multiplier_ = 0;  // 2^32 * (2^shift - value) / value + 1
};

// The load of a head: how much it reads, in KV tiles. A head without tiles counts as one, because its residual needs a worker.
struct HeadLoad {
  int tiles;
  int residual;  // the KV tiles that have as many bytes as its unquantized tokens

  KVGEN_HOST_DEVICE int all() const { return tiles + residual; }
};

// How the KV tiles of all heads lie in a row, and how it is cut into ranges. A shared range may hold tiles of several heads. Then
// `head_cost` empty positions precede the tiles of each head, as many tiles as a worker could read while it starts on a head, and empty
// positions for the residual follow the tiles. Otherwise every head has ranges of its own, the last of which may be partly empty.
struct Row {
  int each = 1;       // positions of a range
  int total = 0;      // positions of the row
  int ranges = 0;     // ranges of the row
  int head_cost = 0;  // empty positions before the tiles of a head
  bool shared = true;

  KVGEN_HOST_DEVICE int positions(const HeadLoad& load) const { return shared ? head_cost + load.all() : own_ranges(load) * each; }
  KVGEN_HOST_DEVICE int gap(const HeadLoad& load) const { return shared ? load.residual : 0; }  // for the residual
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

// A work tile: a range [first, end) of the KV tiles of one head, and the data for its reduction, as the plan stores them.
struct alignas(16) WorkTile {
  int sequence = 0;
  int head = 0;                       // KV head, or a run of its query rows: see PlanShape::heads
  int first = 0, end = 0;             // empty if the head has no packed tiles
  int split_idx = 0, num_splits = 0;  // num_splits is at least 1; entries that no WorkRange covers are undefined
  int slot = 0;                       // of the partial result; the slots of a head are consecutive
  int length = 0;                     // tokens of the sequence before the step
};
static_assert(sizeof(WorkTile) == 32);

// The work tiles of a worker, as indices [begin, end) into the plan's list.
struct WorkRange {
  int begin = 0, end = 0;
};

// The inputs of a plan besides the lengths.
struct PlanShape {
  int batch = 0;
  Divisor heads = 0;  // of a sequence: KV heads or, where their runs of query rows have work tiles of their own, runs of all KV heads
  Divisor workers = 0;
  Divisor tile_tokens = 0;    // tokens of a KV tile; tile t of a head holds the packed tokens from t * tile_tokens on, after the sink
  Divisor block_tokens = 0;   // tokens of a packed block: tokens that no block holds are in no KV tile
  int head_cost = 0;          // in KV tiles
  Divisor least_tiles = 0;    // least length of a range
  int window = 0;             // tokens of the sliding window; 0: none
  int q_len = 0;              // query tokens of the step
  int fresh = 0;              // tokens that the step appends: q_len for decode, 0 for attend
  int unpacked = 0;           // sink and local tokens (ResidualRows::kUnpacked), which are never in a packed block
  Divisor tile_residual = 0;  // unquantized tokens that have as many bytes as a KV tile; 0: they do not count

  KVGEN_HOST_DEVICE int packed(int length) const { return length > unpacked ? (length - unpacked) / block_tokens * block_tokens : 0; }
  KVGEN_HOST_DEVICE int end_tile(int length) const { return (packed(length) + tile_tokens - 1) / tile_tokens; }
  // The first KV tile that holds a token which the step's first query attends to; none does if the window begins in the residual. A window
  // never goes with sink tokens, so tiles begin at position 0 here.
  KVGEN_HOST_DEVICE int first_tile(int length) const {
    const int token = length + fresh - q_len - window + 1;
    if (window == 0 || token <= 0) return 0;
    return token < packed(length) ? token / tile_tokens : end_tile(length);
  }
  KVGEN_HOST_DEVICE HeadLoad load(int length) const {
    const int tiles = end_tile(length) - first_tile(length);
    return {tiles > 1 ? tiles : 1, tile_residual > 0 ? (length + fresh - packed(length)) / tile_residual : 0};
  }
  // Positions of a range, in a row of `total`.
  KVGEN_HOST_DEVICE int range_length(int total) const {
    const int each = (total + workers - 1) / workers;
    return each > least_tiles ? each : int{least_tiles};
  }
  // The row of `number` heads with shared ranges; `loads` is the sum of their loads.
  KVGEN_HOST_DEVICE Row shared_row(int number, int loads) const {
    Row row;
    row.total = loads + number * head_cost, row.each = range_length(row.total), row.head_cost = head_cost;
    row.ranges = (row.total + row.each - 1) / row.each;
    return row;
  }
  // The row in which every head has ranges of its own.
  KVGEN_HOST_DEVICE Row own_row(int each, int ranges) const {
    Row row;
    row.each = each, row.total = each * ranges, row.ranges = ranges, row.shared = false;
    return row;
  }
  // The lengths of own ranges that are not longer than those of `row`, which are shared: multiples of `least_tiles`, so that the warps of a
  // CTA have equally many tiles. Own ranges save starts, so there are none where a start costs nothing.
  KVGEN_HOST_DEVICE OwnLengths own_lengths(int number, const Row& row) const {
    OwnLengths lengths;
    if (head_cost == 0 || number > workers) return lengths;
    const int multiples = row.each / least_tiles;
    lengths.longest = multiples * least_tiles, lengths.unit = least_tiles;
    lengths.count = multiples < OwnLengths::kMost ? multiples : OwnLengths::kMost;
    return lengths;
  }
  KVGEN_HOST_DEVICE int most_work_tiles() const { return batch * heads + workers; }
  // Whether an int holds the positions of all heads of sequences of `max_len` tokens.
  bool countable(int max_len) const {
    const int residual = tile_residual > 0 ? (block_tokens + unpacked + fresh) / tile_residual : 0;
    const int64_t positions = head_cost + static_cast<int64_t>(max_len) / tile_tokens + residual + 1;
    return static_cast<int64_t>(batch) * heads * positions <= INT32_MAX / 2;
  }

  // The plan in memory, as offsets in int32: a header, a WorkRange for each worker, the work tiles, the empty sequences.
  static constexpr int kHeader = 8;  // [0]: number of empty sequences
  KVGEN_HOST_DEVICE int ranges_at() const { return kHeader; }
  KVGEN_HOST_DEVICE int tiles_at() const { return (kHeader + 2 * workers + 7) / 8 * 8; }
  KVGEN_HOST_DEVICE int empty_at() const { return tiles_at() + 8 * most_work_tiles(); }
  KVGEN_HOST_DEVICE int64_t size() const { return static_cast<int64_t>(empty_at()) + batch; }

  // Writes the header and, if no head attends, the ranges, which are empty.
  KVGEN_HOST_DEVICE void begin(int* plan, int empty, int number) const {
    for (int i = 0; i < kHeader; ++i) plan[i] = i == 0 ? empty : 0;
    if (number > 0) return;
    for (int i = ranges_at(); i < tiles_at(); ++i) plan[i] = 0;
  }
};

// The position of a head in the row, and the ranges that hold its tiles.
struct HeadRange {
  int number;       // index of the head among those that attend
  int before;       // where the tiles of the previous head end
  int tiles_at;     // where those of this head begin
  int end;          // where this head's positions end, with those for its residual
  int first, last;  // ranges, both included

  // `at` is where the positions of the previous head end, of which the last `gap` stand for its residual.
  KVGEN_HOST_DEVICE HeadRange(const Row& row, int number_, int at, int gap, const HeadLoad& load)
      : number(number_), before(at - gap), tiles_at(at + row.head_cost), end(at + row.positions(load)) {
    first = tiles_at / row.each, last = (end - row.gap(load) - 1) / row.each;
  }
  // The index of the work tile in a range, and the slot of its partial result. From one work tile to the next the head, the range or both
  // advance, and neither goes back, so number + range is unique.
  KVGEN_HOST_DEVICE int index(int range) const { return number + range; }
  // Whether it is the first work tile of the range, or the last one.
  KVGEN_HOST_DEVICE bool is_first_of(const Row& row, int range) const { return before <= range * row.each; }
  KVGEN_HOST_DEVICE bool is_last_of(const Row& row, int range) const {
    return is_end(row, range) || end + row.head_cost >= (range + 1) * row.each;
  }
  // Whether no later range holds tiles.
  KVGEN_HOST_DEVICE bool is_end(const Row& row, int range) const { return end == row.total && range == last; }
  // The first of the ranges before `first` that hold no tile, because they lie in the empty positions before this head.
  KVGEN_HOST_DEVICE int first_empty(const Row& row) const { return before == 0 ? 0 : (before - 1) / row.each + 1; }

  KVGEN_HOST_DEVICE WorkTile work_tile(const PlanShape& shape, const Row& row, int range, int sequence, int head, int length) const {
    const int skipped = shape.first_tile(length), n = shape.end_tile(length) - skipped;
    const int from = range * row.each - tiles_at, to = from + row.each;
    WorkTile tile;
    tile.sequence = sequence, tile.head = head, tile.length = length;
    tile.first = skipped + (from > 0 ? from : 0), tile.end = skipped + (to < n ? to : n);
    tile.split_idx = range - first, tile.num_splits = last - first + 1;
    tile.slot = index(range);
    return tile;
  }

  // Writes every `step`-th work tile of the head, from its `start`-th on. The first work tile of a range sets `begin` of its worker's
  // WorkRange, the last one `end`. Workers without a range up to the next one are cleared, and with `start` 0 those before this head.
  KVGEN_HOST_DEVICE void write(const PlanShape& shape, const Row& row, int* plan, int sequence, int head, int length, int start,
                               int step) const {
    WorkRange* workers = reinterpret_cast<WorkRange*>(plan + shape.ranges_at());
    WorkTile* tiles = reinterpret_cast<WorkTile*>(plan + shape.tiles_at());
    const auto worker = [&](int range) { return row.worker(range, shape.workers); };
    for (int r = first + start; r <= last; r += step) {
      tiles[index(r)] = work_tile(shape, row, r, sequence, head, length);
      if (is_first_of(row, r)) workers[worker(r)].begin = index(r);
      if (!is_last_of(row, r)) continue;
      workers[worker(r)].end = index(r) + 1;
      for (int w = worker(r) + 1; w < worker(is_end(row, r) ? row.ranges : r + 1); ++w) workers[w] = WorkRange{};
    }
    if (start > 0) return;
    for (int w = worker(first_empty(row)); w < worker(first); ++w) workers[w] = WorkRange{};
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
  const auto sum_over_heads = [&](auto term) {  // of term(HeadLoad)
    int sum = 0;
    for (int b = 0; b < shape.batch; ++b)
      if (step(b) == SequenceStep::attends) sum += shape.heads * term(shape.load(lengths[b]));
    return sum;
  };
  int empty = 0;
  bool overflow = false;
  for (int b = 0; b < shape.batch; ++b) {
    if (step(b) == SequenceStep::empty) plan[shape.empty_at() + empty++] = b;
    overflow |= step(b) == SequenceStep::overflows;
  }
  const int heads = sum_over_heads([](const HeadLoad&) { return 1; });
  const int loads = sum_over_heads([](const HeadLoad& load) { return load.all(); });
  shape.begin(plan, empty, heads);
  Row row = shape.shared_row(heads, loads);
  const OwnLengths own = shape.own_lengths(heads, row);
  for (int i = 0; i < own.count; ++i) {
    const int ranges = sum_over_heads([&](const HeadLoad& load) { return shape.own_row(own[i], 0).own_ranges(load); });
    if (ranges > shape.workers) break;
    row = shape.own_row(own[i], ranges);
  }
  for (int b = 0, number = 0, at = 0, gap = 0; b < shape.batch; ++b) {
    if (step(b) != SequenceStep::attends) continue;
    const HeadLoad load = shape.load(lengths[b]);
    for (int head = 0; head < shape.heads; ++head, ++number) {
      const HeadRange range(row, number, at, gap, load);
      range.write(shape, row, plan, b, head, lengths[b], 0, 1);
      at = range.end, gap = row.gap(load);
    }
  }
  return overflow;
}

}  // namespace kvgen
