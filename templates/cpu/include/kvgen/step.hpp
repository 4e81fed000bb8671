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
    if constexpr (C::ResidualRows::kArrival)
      plan.block_tokens = 1, plan.unpacked = append ? -static_cast<int>(q_len) : 0;  // new ones are packed
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
  std::vector<int> empty;           // sequences that give zeros, and to which nothing is appended
  std::vector<int32_t> lengths;     // before the step; 0 for empty sequences
  std::vector<int32_t> appended;    // tokens that the step appends

  // The plan of `lengths`, which the caller has checked.
  Step(const StepShape<C>& shape_, const int32_t* lengths_) : shape(shape_), lengths(lengths_, lengths_ + shape_.plan.batch) {
    make(false);
  }

  // The plan that the caller gives: a function of lengths, so it is made again from those that it holds. Raises where it holds none.
  Step(const char* function, const StepShape<C>& shape_, const ffi::View<1>& given) : shape(shape_), lengths(shape_.plan.batch, -1) {
    const PlanShape& p = shape.plan;
    shape.check_size(function, given);
    const int* plan = given.as<int>();
    bool valid = plan[0] >= 0 && plan[0] <= p.batch;
    const auto set = [&](int b, int length) {
      valid = valid && b >= 0 && b < p.batch && length >= 0 && length <= shape.most_tokens;
      if (valid) lengths[b] = length;
    };
    for (int i = 0; valid && i < plan[0]; ++i) set(plan[p.empty_at() + i], 0);
    for (int w = 0; valid && w < p.workers; ++w) {
      WorkRange range;
      std::memcpy(&range, plan + p.ranges_at() + 2 * w, sizeof(range));
      valid = range.begin >= 0 && range.end <= p.most_work_tiles();
      for (int i = range.begin; valid && i < range.end; ++i) {
        WorkTile tile;  // a copy, as the caller's tensor need not lie at a multiple of 16 bytes
        std::memcpy(&tile, plan + p.tiles_at() + 8 * i, sizeof(tile));
        set(tile.sequence, tile.length);
      }
    }
    if (!valid || std::count(lengths.begin(), lengths.end(), -1) > 0)
      ffi::fail("ValueError", "%s: the plan is not one of this call", function);
    shape = StepShape<C>(function, p.batch, p.q_len, *std::max_element(lengths.begin(), lengths.end()), p.fresh > 0);
    make(plan[0] > 0);
  }

 private:
  void make(bool skip_empty) {
    const PlanShape& p = shape.plan;
    std::vector<int> plan(p.size());
    make_plan(p, lengths.data(), INT32_MAX, skip_empty, plan.data());
    appended.assign(p.batch, p.fresh);
    empty.assign(plan.data() + p.empty_at(), plan.data() + p.empty_at() + plan[0]);
    for (const int b : empty) appended[b] = 0;
    int slots = 0;
    for (int w = 0; w < p.workers; ++w) {
      const WorkRange range = reinterpret_cast<const WorkRange*>(plan.data() + p.ranges_at())[w];
      for (int i = range.begin; i < range.end; ++i) {
        WorkTile tile;
        std::memcpy(&tile, plan.data() + p.tiles_at() + 8 * i, sizeof(tile));
        if (tile.split_idx == 0 && tile.num_splits > 1) split_heads.push_back(work.size());
        // Partial results get slots of their own numbering: a plan has one for each work tile, and most heads of a prompt are not split.
        tile.slot = tile.num_splits > 1 ? slots++ : 0;
        work.push_back(tile);
      }
    }
  }
};

}  // namespace kvgen
