// A warp's way through packed units: where they lie, which it works on, which its ring fetches next.
#pragma once
#include "kvgen/plan.cuh"
#include "kvgen/ring.cuh"

namespace kvgen {

// Where the packed units of a head lie, for a lane.
template <class Traits>
struct Blocks {
  const uint8_t* start;  // of the head's blocks; where there are pages, of the head within each
  const int* pages;      // of the sequence
  int page = 0;          // the unit's; asked for a unit ahead, so that nobody waits for the table
  int lane, stride;      // from one unit of the warp to the next

  __device__ Blocks(int lane_, int stride_) : lane(lane_), stride(stride_) {}
  __device__ __forceinline__ void enter(const AttendArgs& args, int batch, int head) {
    start = args.cache.packed + head * args.cache.head_stride_bytes + (Traits::kGathered ? 0 : lane * 16);  // lanes exchange gathered addresses
    if constexpr (Traits::kPaged)
      pages = args.cache.block_table + static_cast<int64_t>(batch) * args.cache.table_stride;
    else
      start += batch * args.cache.outer_stride_bytes;
  }
  // Asks for the page of a unit, if it is below `end`. `length`: the sequence's.
  __device__ __forceinline__ void look_up(int unit, int end, int length) {
    if constexpr (Traits::kPaged)
      if (unit < end) page = pages[block_of(unit, length) / Traits::kPageBlocks];
  }
  // A unit that was looked up; looks up the warp's next.
  __device__ __forceinline__ Unit packed(const AttendArgs& args, int unit, int end, int length) {
    int64_t block = block_of(unit, length);
    const uint8_t* base = start;
    if constexpr (Traits::kPaged) {
      base += page * args.cache.outer_stride_bytes, block %= Traits::kPageBlocks;
      look_up(unit + stride, end, length);
    }
    base += block * Traits::Format::kBlockBytes;
    if constexpr (Traits::kGathered) return Unit::of_block(nullptr, base);
    const int within = unit % Traits::kUnitsPerBlock, group = Traits::kKeyPerChannel ? within * Traits::kUnitTokens / Traits::Key::kGroup : 0;
    return Unit::of_block(base + Traits::Format::kKeyChannelParams + group * Traits::kUnitParams, base + Traits::Format::kHeaderBytes + within * Traits::kUnitBytes);
  }

 private:
  // Of a unit. Of a gathered one each lane gives a block; in place of a missing one, the last: what weighs nothing must be finite.
  __device__ __forceinline__ int block_of(int unit, int length) const {
    if constexpr (!Traits::kGathered) return unit / Traits::kUnitsPerBlock;
    return min(unit * Traits::kUnitBlocks + min(lane, Traits::kUnitBlocks - 1), length / Traits::Format::kTokens - 1);
  }
};

// Walks the units of one warp: every kWarps-th of the CTA's, across heads; packed ones, then pieces of the tail.
template <class Traits>
struct Cursor {
  const AttendArgs& args;
  const Lengths<Traits>& lengths;
  Book<Traits>& book;
  Blocks<Traits> blocks;
  int unit;   // within the head
  int plain;  // units below are packed ones of this head

  __device__ Cursor(const AttendArgs& args_, const Lengths<Traits>& lengths_, const Plan<Traits>& plan, Book<Traits>& book_, int warp, int lane)
      : args(args_), lengths(lengths_), book(book_), blocks(lane, Traits::kWarps) {
    const Segment segment = plan.segment(plan.first);
    unit = segment.begin + warp;
    settle(plan, plan.first, segment);
  }
  __device__ __forceinline__ Unit here() {
    if (unit < plain) return packed();
    if (unit >= book.segment.end) return {};
    return Unit::of_tail((unit - book.ahead.packed) * Traits::kPieceTokens);
  }
  __device__ __forceinline__ Unit next() {
    unit += Traits::kWarps;
    if (unit < plain) return packed();
    settle(book.plan, book.ahead, book.segment);
    return here();
  }
  // That pieces are of.
  __device__ __forceinline__ Tail<Traits> tail() const { return Tail<Traits>(args, book.ahead.batch, book.ahead.head, length()); }

 private:
  __device__ __forceinline__ int length() const { return lengths.before[book.ahead.batch]; }
  __device__ __forceinline__ Unit packed() { return blocks.packed(args, unit, plain, Traits::kGathered ? length() : 0); }
  __device__ __forceinline__ void settle(const Plan<Traits>& plan, Head at, Segment segment) {
    while (unit >= segment.end && plan.end > at.start + at.weight) {
      const int over = unit - segment.end;
      lengths.advance(at);
      segment = plan.segment(at);
      unit = segment.begin + over;
    }
    write_down(book.ahead, at, blocks.lane);
    write_down(book.segment, segment, blocks.lane);
    plain = min(segment.end, at.packed);
    blocks.enter(args, at.batch, at.head);
    blocks.look_up(unit, plain, Traits::kGathered ? length() : 0);
  }
};

// What a warp works on, and what its ring fetches next: wherever its cursor comes to.
template <class Traits, class Cursor>
struct Walk {
  Ring<Traits> ring;
  Cursor cursor;
  Unit upcoming;
  int depth = 0;

  __device__ Walk(uint32_t rings, const Cursor& cursor_, int warp, int lane) : ring(rings, warp, lane), cursor(cursor_) {}
  // Asks for the first stage of a unit ahead of all else.
  __device__ __forceinline__ void fill_first(const Unit& unit) {
    upcoming = unit;
    fill(0, 0);
  }
  // Fills the slots, the first from stage `from` on.
  __device__ __forceinline__ void fill_up(int from = 0) {
    upcoming = cursor.here();
#pragma unroll 1
    for (int slot = 0; slot < Traits::kDepth; ++slot, from = 0) {  // rolled: code that runs once costs more to fetch than to run
#pragma unroll 1
      for (int stage = from; stage < Traits::kUnitStages; ++stage) fill(slot, stage);
      upcoming = cursor.next();
    }
  }
  __device__ __forceinline__ void fill(int slot, int stage) {
    ring.fill(slot, stage, upcoming, [&] { return cursor.tail(); });
  }
  // A stage of the oldest slot is done with and refilled.
  __device__ __forceinline__ void release(int stage) {
    ring.release(stage);
    fill(depth, stage);
  }
  // The oldest slot is done with.
  __device__ __forceinline__ void step() {
    upcoming = cursor.next();
    if (Traits::kDepth == 1 || ++depth == Traits::kDepth) depth = 0, ring.next_round();
  }
};

}  // namespace kvgen
