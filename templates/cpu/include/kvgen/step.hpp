// How a step is cut into work tiles: the plan's shape for the CPU, and a plan read back and checked.
#pragma once

#include <algorithm>
#include <vector>

#include "kvgen/cache.hpp"
#include "kvgen/rows.hpp"
#include "kvgen/schedule/plan.hpp"

namespace kvgen {

// The numbers besides the lengths that the cut depends on. The number of workers is a constant of the variant, not the number of threads,
// so that results do not depend on the machine. A head of the plan is a block of query rows of a KV head: kv_head * row_blocks + block.
template <class C>
struct StepShape {
  static_assert(C::split_tokens % C::chunk == 0 && C::chunk % C::kSubtile == 0, "work tiles begin where a chunk and a sub-tile do");
  static constexpr int64_t record = C::kHeadDim + 2;  // floats of a row's partial result: weighted values, row_max, row_sum

  static constexpr int64_t most_tokens = INT32_MAX / 4;

  int64_t rows;  // of a KV head: query tokens times heads of its group
  int64_t row_blocks;
  PlanShape plan;

  // Raises where an int does not count the KV tiles of all heads at lengths up to `longest`.
  StepShape(const char* function, int64_t batch, int64_t q_len, int64_t longest, bool append)
      : rows(std::min(q_len, most_tokens + 1) * (C::q_heads / C::kv_heads)) {
    row_blocks = (rows + Rows<C>::most - 1) / Rows<C>::most;
    const int64_t heads = C::kv_heads * row_blocks, work_tiles = std::min(batch, most_tokens) * heads + C::workers;
    const bool counted = std::max({batch, longest, q_len}) <= most_tokens && work_tiles <= INT32_MAX / 16;
    if (!counted || longest / C::chunk + 1 > INT32_MAX / 2 / work_tiles)
      ffi::fail("ValueError", "%s: %lld sequences of up to %lld tokens, with %lld query tokens, are more than it can count", function,
                (long long)batch, (long long)longest, (long long)q_len);
    plan.batch = static_cast<int>(batch), plan.heads = static_cast<int>(heads), plan.workers = C::workers;
    plan.tile_tokens = C::chunk, plan.block_tokens = C::kTokens, plan.unpacked = C::ResidualRows::kUnpacked;
    plan.head_cost = 0;  // threads take work tiles one by one, so that a worker's time does not matter
    plan.least_tiles = C::split_tokens / C::chunk;
    plan.window = C::window, plan.q_len = static_cast<int>(q_len), plan.fresh = append ? plan.q_len : 0;
  }

  void check_size(const char* function, const ffi::View<1>& given) const {
    if (given.size[0] < plan.size())
      ffi::fail("ValueError", "%s: plan has %lld numbers, this call needs %lld", function, (long long)given.size[0],
                (long long)plan.size());
  }

  int64_t slot_rows() const { return rows < Rows<C>::most ? rows : Rows<C>::most; }

  // Bytes of the partial results of all splits, for lengths up to `max_len`. A border between two workers cuts at most one head, and a head
  // has one split more than it has cuts.
  int64_t workspace_bytes(int64_t max_len) const {
    const int64_t heads = int64_t{plan.batch} * plan.heads, tiles = (max_len + plan.tile_tokens - 1) / plan.tile_tokens;
    const int64_t workers = std::min<int64_t>(plan.workers, (heads * tiles + plan.least_tiles - 1) / plan.least_tiles);
    if (tiles < 2 || workers < 2) return 0;
    return (workers - 1 + std::min(workers - 1, heads)) * slot_rows() * record * static_cast<int64_t>(sizeof(float));
  }

  // Packed tokens of the first split where all lengths are `max_len`; 0 where no head is split.
  int64_t split_tokens(int max_len) const {
    const int heads = plan.batch * plan.heads;
    const HeadLoad load = plan.load(max_len);
    const Row row = plan.shared_row(heads, heads * load.all());
    for (int number = 0; number < heads; ++number) {
      const HeadRange range(row, number, number * row.positions(load), row.gap(load), load);
      if (range.first < range.last) return int64_t{(range.first + 1) * row.each - range.tiles_at} * plan.tile_tokens;
    }
    return 0;
  }
};

// A plan in the order in which its work is done.
template <class C>
struct Step {
  StepShape<C> shape;
  std::vector<WorkTile> work;       // worker by worker, so that the splits of a head follow one another
  std::vector<size_t> split_heads;  // where in `work` the heads with several splits begin
  int slots = 0;                    // of partial results
  std::vector<int> empty;           // sequences that give zeros, and to which nothing is appended
  std::vector<int32_t> lengths;     // before the step; 0 for empty sequences
  std::vector<int32_t> appended;    // tokens that the step appends

  // Bytes of the partial results.
  int64_t partial_bytes() const { return slots * shape.slot_rows() * StepShape<C>::record * static_cast<int64_t>(sizeof(float)); }

  // The plan of `lengths`, which the caller has checked.
  Step(const StepShape<C>& shape_, const int32_t* lengths_) : Step(shape_) {
    std::vector<int> plan(shape.plan.size());
    make_plan(shape.plan, lengths_, INT32_MAX, false, plan.data());
    read("", plan.data());
  }

  // A plan that the caller gives. Raises where it cannot be of a step of this shape: every head must be there exactly once, whole.
  Step(const char* function, const StepShape<C>& shape_, const ffi::View<1>& plan) : Step(shape_) {
    shape.check_size(function, plan);
    read(function, plan.as<int>());
  }

 private:
  static constexpr int32_t unknown = -1;

  explicit Step(const StepShape<C>& shape_) : shape(shape_), lengths(shape_.plan.batch, unknown), appended(shape_.plan.batch, 0) {}

  void read(const char* function, const int* plan) {
    if (!read_empty(plan) || !read_work(plan) || !complete()) ffi::fail("ValueError", "%s: the plan is not one of this call", function);
  }

  bool read_empty(const int* plan) {
    if (plan[0] < 0 || plan[0] > shape.plan.batch) return false;
    empty.assign(plan + shape.plan.empty_at(), plan + shape.plan.empty_at() + plan[0]);
    for (const int b : empty) {
      if (b < 0 || b >= shape.plan.batch || lengths[b] != unknown) return false;
      lengths[b] = 0;
    }
    return true;
  }

  bool read_work(const int* plan) {
    for (int w = 0; w < shape.plan.workers; ++w) {
      WorkRange range;
      std::memcpy(&range, plan + shape.plan.ranges_at() + 2 * w, sizeof(range));
      if (range.begin < 0 || range.end > shape.plan.most_work_tiles()) return false;
      for (int i = range.begin; i < range.end; ++i) {
        WorkTile tile;  // a copy, as the caller's tensor need not lie at a multiple of 16 bytes
        std::memcpy(&tile, plan + shape.plan.tiles_at() + 8 * i, sizeof(tile));
        if (!follows(tile)) return false;
        add(tile);
      }
    }
    return true;
  }

  // Partial results get slots of their own numbering: a plan has one for each work tile, and most heads of a prompt are not split.
  void add(WorkTile tile) {
    if (tile.split_idx == 0) {
      lengths[tile.sequence] = tile.length, appended[tile.sequence] = shape.plan.fresh;
      if (tile.num_splits > 1) split_heads.push_back(work.size());
    }
    tile.slot = tile.num_splits > 1 ? slots++ : 0;
    work.push_back(tile);
  }

  // Whether a work tile may come after those read so far: the next split of the same head, or the first one of the next head.
  bool follows(const WorkTile& tile) const {
    const PlanShape& p = shape.plan;
    if (tile.sequence < 0 || tile.sequence >= p.batch || tile.length < 0 || tile.length > shape.most_tokens) return false;
    if (tile.split_idx < 0 || tile.split_idx >= tile.num_splits || tile.first > tile.end) return false;
    if (last(tile) && tile.end != p.end_tile(tile.length)) return false;
    const WorkTile none, &before = work.empty() ? none : work.back();
    const bool same = tile.sequence == before.sequence && tile.length == before.length;
    if (tile.split_idx > 0)
      return same && tile.head == before.head && tile.first == before.end && tile.num_splits == before.num_splits &&
             tile.split_idx == before.split_idx + 1;
    if (tile.first != p.first_tile(tile.length) || (!work.empty() && !last(before))) return false;
    if (tile.head == 0) return lengths[tile.sequence] == unknown && (work.empty() || before.head == p.heads - 1);
    return same && tile.head == before.head + 1 && tile.head < p.heads;
  }

  static bool last(const WorkTile& tile) { return tile.split_idx == tile.num_splits - 1; }

  // Whether every sequence has its work, or is empty. `follows` has seen that heads come in order.
  bool complete() const {
    return std::count(lengths.begin(), lengths.end(), unknown) == 0 &&
           (work.empty() || (last(work.back()) && work.back().head == shape.plan.heads - 1));
  }
};

}  // namespace kvgen
