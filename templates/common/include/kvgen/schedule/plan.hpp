// The plan of a step: which KV tiles each worker attends to. A worker is a CTA of a launch, on the CPU a unit of work.
//
// All KV tiles of all heads lie in one row, sequence by sequence, and each worker has an equal range of it (stream-K, Osama et al., 2023).
// Before the tiles of a head the row has `head_cost` empty places: what a worker could read while it starts on the head.
// The plan is a pure function of the sequence lengths and of PlanShape; kvgen/reference/plan.py is its oracle.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KVGEN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVGEN_HOST_DEVICE inline
#endif

namespace kvgen {

// A range [first, end) of the KV tiles of one head, and what a worker must know to reduce it. All fields are int32, as the plan stores
// them.
struct alignas(16) WorkTile {
  int sequence = 0;
  int head = 0;  // KV head, or a run of its query rows: see PlanShape::heads
  int first = 0, end = 0;
  int split_idx = 0, num_splits = 0;  // of the head's work tiles; num_splits is 0 where there is no work tile
  int slot = 0;                       // of the partial result; the slots of a head follow one another
  int length = 0;                     // tokens of the sequence before the step
};
static_assert(sizeof(WorkTile) == 32);

// Which work tiles are a worker's, as indices [begin, end) into the plan's list.
struct WorkRange {
  int begin = 0, end = 0;
};

// What a plan depends on besides the lengths.
struct PlanShape {
  int batch = 0;
  int heads = 0;  // KV heads of a sequence, times the runs of query rows that are CTAs of their own
  int workers = 0;
  int tile_tokens = 0;   // tokens of a KV tile
  int block_tokens = 0;  // tokens of a packed block: the tokens beyond whole blocks are the residual, which is in no KV tile
  int head_cost = 0;     // in KV tiles
  int least_tiles = 0;   // fewest KV tiles that are worth a worker
  int window = 0;        // tokens of the sliding window; 0: none
  int q_len = 0;         // query tokens of the step
  int fresh = 0;         // tokens that the step appends: q_len for decode, 0 for attend

  KVGEN_HOST_DEVICE int end_tile(int length) const { return (length / block_tokens * block_tokens + tile_tokens - 1) / tile_tokens; }
  // The first KV tile that holds a token which the step's first query sees.
  KVGEN_HOST_DEVICE int first_tile(int length) const {
    if (window == 0) return 0;
    const int token = length + fresh - q_len - window + 1, end = end_tile(length);
    const int tile = token > 0 ? token / tile_tokens : 0;
    return tile < end ? tile : end;
  }
  KVGEN_HOST_DEVICE int tiles(int length) const { return end_tile(length) - first_tile(length); }
  // Places of a head in the row.
  KVGEN_HOST_DEVICE int cost(int length) const {
    const int n = tiles(length);
    return head_cost + (n > 1 ? n : 1);
  }
  // Places of a worker, where all heads have `total`.
  KVGEN_HOST_DEVICE int places_each(int total) const {
    const int each = (total + workers - 1) / workers;
    return each > least_tiles ? each : least_tiles;
  }
  KVGEN_HOST_DEVICE int most_work_tiles() const { return batch * heads + workers; }
  // Whether an int holds the places of all heads of sequences of `max_len` tokens.
  bool countable(int max_len) const {
    const int64_t places = head_cost + static_cast<int64_t>(max_len) / tile_tokens + 1;
    return static_cast<int64_t>(batch) * heads * places <= INT32_MAX / 2;
  }

  // The plan in memory, as offsets in int32: a header, a WorkRange for each worker, the work tiles, the empty sequences.
  static constexpr int kHeader = 8;  // [0]: number of empty sequences
  KVGEN_HOST_DEVICE int ranges_at() const { return kHeader; }
  KVGEN_HOST_DEVICE int tiles_at() const { return (kHeader + 2 * workers + 7) / 8 * 8; }
  KVGEN_HOST_DEVICE int empty_at() const { return tiles_at() + 8 * most_work_tiles(); }
  KVGEN_HOST_DEVICE int64_t size() const { return static_cast<int64_t>(empty_at()) + batch; }
};

// Where a head lies in the row, and which workers have some of it.
struct HeadPlaces {
  int number;  // of the head, among those that take part
  int tiles_at;
  int first_worker, last_worker;

  KVGEN_HOST_DEVICE HeadPlaces(const PlanShape& shape, int number_, int at, int length, int each)
      : number(number_), tiles_at(at + shape.head_cost) {
    const int n = shape.tiles(length);
    first_worker = tiles_at / each, last_worker = (tiles_at + (n > 1 ? n : 1) - 1) / each;
  }
  // The index of the work tile of `worker`, and the slot of its partial result: from one work tile to the next the head's number or the
  // worker's increases, so that no two have the same.
  KVGEN_HOST_DEVICE int index(int worker) const { return number + worker; }
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
};

// What a sequence does in a step.
enum class Part {
  works,
  empty,     // it has no tokens, and the step appends none: its output is zero
  overflows  // it has no room for the step's tokens: nothing is written
};

// `skip_empty`: the step appends nothing to an empty sequence either. `limit`: most tokens of a sequence.
KVGEN_HOST_DEVICE Part part_of(int length, int fresh, int limit, bool skip_empty) {
  if (length <= 0 && (fresh == 0 || skip_empty)) return Part::empty;
  return length > limit - fresh ? Part::overflows : Part::works;
}

// The plan of `lengths`, written by one thread. Gives whether a sequence overflows.
inline bool make_plan(const PlanShape& shape, const int* lengths, int limit, bool skip_empty, int* plan) {
  WorkRange* ranges = reinterpret_cast<WorkRange*>(plan + shape.ranges_at());
  WorkTile* tiles = reinterpret_cast<WorkTile*>(plan + shape.tiles_at());
  int total = 0, empty = 0;
  bool overflow = false;
  for (int b = 0; b < shape.batch; ++b) {
    const Part part = part_of(lengths[b], shape.fresh, limit, skip_empty);
    if (part == Part::works) total += shape.heads * shape.cost(lengths[b]);
    if (part == Part::empty) plan[shape.empty_at() + empty++] = b;
    overflow |= part == Part::overflows;
  }
  const int each = shape.places_each(total);
  for (int i = 0; i < PlanShape::kHeader; ++i) plan[i] = 0;
  plan[0] = empty;
  for (int w = 0; w < shape.workers; ++w) ranges[w] = WorkRange{};
  int number = 0, at = 0;
  for (int b = 0; b < shape.batch; ++b) {
    if (part_of(lengths[b], shape.fresh, limit, skip_empty) != Part::works) continue;
    for (int head = 0; head < shape.heads; ++head, ++number, at += shape.cost(lengths[b])) {
      const HeadPlaces places(shape, number, at, lengths[b], each);
      for (int w = places.first_worker; w <= places.last_worker; ++w) {
        const int index = places.index(w);
        tiles[index] = places.work_tile(shape, w, each, b, head, lengths[b]);
        if (ranges[w].end == 0) ranges[w].begin = index;
        ranges[w].end = index + 1;
      }
    }
  }
  return overflow;
}

}  // namespace kvgen
