// A warp's way through packed units: where they lie, which it works on, which its ring fetches next.
#pragma once
#include "kvgen/part.cuh"
#include "kvgen/ring.cuh"

namespace kvgen {

// Where the packed units of a head lie, for a lane.
template <class Traits>
struct Blocks {
  static constexpr int kEntries = Traits::kGathered ? Traits::kUnitBlocks : 1;  // of the page table, for a unit
  const uint8_t* start;  // of the head's blocks; where there are pages, of the head within each
  const int* pages;      // of the sequence
  int lane, stride;      // from one unit of the warp to the next

  __device__ Blocks(int lane_, int stride_) : lane(lane_), stride(stride_) {}
  __device__ __forceinline__ void enter(const AttendArgs& args, int batch, int head) {
    start =
        args.cache.packed + head * args.cache.head_stride_bytes + (Traits::kGathered ? 0 : lane * 16);  // lanes exchange gathered addresses
    if constexpr (Traits::kPaged)
      pages = args.cache.block_table + static_cast<int64_t>(batch) * args.cache.table_stride;
    else
      start += batch * args.cache.outer_stride_bytes;
  }
  // The table's entry for the `which`-th block of a unit. `length`: the sequence's.
  __device__ __forceinline__ const int* entry(int unit, int which, int length) const {
    return pages + block_of(unit, which, length) / Traits::kPageBlocks;
  }
  // A unit on a page; of a gathered unit, each lane's block on its own.
  __device__ __forceinline__ Unit packed(const AttendArgs& args, int unit, int page, int length) const {
    int64_t block = block_of(unit, min(lane, kEntries - 1), length);
    const uint8_t* base = start;
    if constexpr (Traits::kPaged) base += page * args.cache.outer_stride_bytes, block %= Traits::kPageBlocks;
    base += block * Traits::Format::kBlockBytes;
    if constexpr (Traits::kGathered) return {nullptr, base, true};
    const int within = unit % Traits::kUnitsPerBlock,
              group = Traits::kKeyPerChannel ? within * Traits::kUnitTokens / Traits::Key::kGroup : 0;
    return {base + Traits::Format::kKeyChannelParams + group * Traits::kUnitParams,
            base + Traits::Format::kHeaderBytes + within * Traits::kUnitBytes, true};
  }

 private:
  // Of a gathered unit, in place of a missing one, the last: what weighs nothing must be finite.
  __device__ __forceinline__ static int block_of(int unit, int which, int length) {
    if constexpr (!Traits::kGathered) return unit / Traits::kUnitsPerBlock;
    return min(unit * Traits::kUnitBlocks + which, length / Traits::Format::kTokens - 1);
  }
};

// Entries of the page table on their way to a warp: to ask for one when it is needed would be to wait as long as a ring takes to be filled.
// Those of the first units are in registers; each later one comes with the unit that lies kDepth + 1 before its own.
template <class Traits>
struct PageQueue {
  static constexpr int kEntries = Blocks<Traits>::kEntries, kUnits = 2 * Traits::kDepth;
  static_assert(!Traits::kPaged || (Traits::kDepth + 1) * kEntries <= 32);
  int* words;     // [kUnits][kEntries], in shared memory
  int first = 0;  // lane i * kEntries + j: the j-th of the i-th unit
  int turn = 0;   // of the unit to be filled next, in `words`

  __device__ explicit PageQueue(int* words_) : words(words_) {}
  __device__ __forceinline__ void begin(const Blocks<Traits>& blocks, int unit, int end, int length) {
    const int at = unit + blocks.lane / kEntries * blocks.stride;
    if (blocks.lane < (Traits::kDepth + 1) * kEntries && at < end) first = *blocks.entry(at, blocks.lane % kEntries, length);
  }
  __device__ __forceinline__ int of_first(int unit, int lane) const {
    return __shfl_sync(~0u, first, unit * kEntries + min(lane, kEntries - 1));
  }
  // With the unit that is about to be filled.
  __device__ __forceinline__ void ask(const Blocks<Traits>& blocks, int unit, int end, int length) {
    const int later = unit + (Traits::kDepth + 1) * blocks.stride;
    if (blocks.lane < kEntries && later < end)
      ptx::copy_async<4>(ptx::shared_address(words + turn * kEntries + blocks.lane), blocks.entry(later, blocks.lane, length));
  }
  // When the oldest unit is done with: the page of the one after the last.
  __device__ __forceinline__ int next(int lane) {
    if constexpr (Traits::kCopy != Copy::async) {
      ptx::copy_wait_all();
      __syncwarp();
    }
    const int page = words[(turn + Traits::kDepth) % kUnits * kEntries + min(lane, kEntries - 1)];
    turn = (turn + 1) % kUnits;
    return page;
  }
};

// A CTA among those of its head.
template <class Traits>
struct Place {
  int rank, ctas;

  __device__ explicit Place(const Part& part)
      : rank(part.rank * Traits::kTogether + blockIdx.x % Traits::kTogether), ctas(part.count * Traits::kTogether) {}
};

// Walks the packed units of one warp. The warps of all of a head's CTAs take them in turn, so that where a warp begins does not
// depend on the sequence's length.
template <class Traits>
struct Cursor {
  const AttendArgs* args;
  Blocks<Traits> blocks;
  PageQueue<Traits> pages;
  int unit, end = 0, length = 0;

  __device__ static int first(const Place<Traits>& place, int warp) { return warp * place.ctas + place.rank; }
  // `words`: the warp's own, for the page table.
  __device__ Cursor(const AttendArgs& args_, const Head& head, const Place<Traits>& place, int* words, int warp, int lane)
      : Cursor(args_, head, first(place, warp), Traits::kWarps * place.ctas, words, lane) {}
  __device__ Cursor(const AttendArgs& args_, const Head& head, int first, int stride, int* words, int lane)
      : args(&args_), blocks(lane, stride), pages(words), unit(first) {
    blocks.enter(*args, head.batch, head.head);
    if constexpr (Traits::kPaged && !Traits::kGathered) pages.begin(blocks, unit, most_units(), 0);  // as far as the table goes
  }
  // The first unit, if memory goes that far: perhaps it is not the sequence's. Where no table says where it lies.
  __device__ __forceinline__ Unit likely() const { return unit < most_units() ? blocks.packed(*args, unit, 0, 0) : Unit{}; }
  __device__ void limit(int length_) { limit(length_, Traits::packed_units(length_)); }
  __device__ void limit(int length_, int end_) {
    length = length_, end = end_;
    if constexpr (Traits::kGathered) pages.begin(blocks, unit, end, length);
  }
  // The `number`-th of the warp's first units.
  __device__ __forceinline__ Unit early(int number) const {
    int page = 0;
    if constexpr (Traits::kPaged) page = pages.of_first(number, blocks.lane);
    return at(page);
  }
  __device__ __forceinline__ void step() { unit += blocks.stride; }
  // After `step`, when the oldest unit is done with.
  __device__ __forceinline__ Unit later() {
    int page = 0;
    if constexpr (Traits::kPaged) page = pages.next(blocks.lane);
    return at(page);
  }
  // What a unit's first stage brings beside it.
  __device__ __forceinline__ void bring() {
    if constexpr (Traits::kPaged) pages.ask(blocks, unit, end, length);
  }

 private:
  __device__ int most_units() const { return args->cache.blocks * Traits::kUnitsPerBlock; }
  __device__ __forceinline__ Unit at(int page) const { return unit < end ? blocks.packed(*args, unit, page, length) : Unit{}; }
};

// What a warp works on, and what its ring fetches next: wherever its cursor comes to.
template <class Traits>
struct Walk {
  Ring<Traits> ring;
  Cursor<Traits> cursor;
  Unit upcoming;
  int depth = 0;
  int early = 0;  // stages that were asked for ahead

  __device__ Walk(uint32_t rings, const Cursor<Traits>& cursor_, int warp, int lane) : ring(rings, warp, lane), cursor(cursor_) {}
  // Asks for the first stage ahead of all else, on a guess; a group of copies in any case.
  __device__ __forceinline__ void fill_first(bool guess) {
    ring.fill(0, 0, guess ? cursor.likely() : Unit{});
    early = guess;
  }
  // Begins with what a cursor has, by its first stage, ahead of all else.
  __device__ __forceinline__ void begin(const Cursor<Traits>& cursor_) {
    cursor = cursor_, depth = 0, early = 1;
    cursor.bring();
    ring.fill(0, 0, cursor.early(0));
  }
  // Fills the slots.
  __device__ __forceinline__ void fill_up() {
    upcoming = cursor.early(0);
#pragma unroll 1
    for (int slot = 0; slot < Traits::kDepth; ++slot) {  // rolled: code that runs once costs more to fetch than to run
      if (slot || !early) cursor.bring();
#pragma unroll 1
      for (int stage = slot ? 0 : early; stage < Traits::kUnitStages; ++stage) ring.fill(slot, stage, upcoming);
      cursor.step();
      if constexpr (Traits::kPaged) cursor.pages.turn = (slot + 1) % PageQueue<Traits>::kUnits;
      upcoming = cursor.early(slot + 1);
    }
  }
  // A stage of the oldest slot is done with and refilled.
  __device__ __forceinline__ void release(int stage) {
    ring.release(stage);
    if (stage == 0) cursor.bring();
    ring.fill(depth, stage, upcoming);
  }
  // The oldest slot is done with.
  __device__ __forceinline__ void step() {
    cursor.step();
    upcoming = cursor.later();
    if (Traits::kDepth == 1 || ++depth == Traits::kDepth) depth = 0, ring.next_round();
  }
};

}  // namespace kvgen
