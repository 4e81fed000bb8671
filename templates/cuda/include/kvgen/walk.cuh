// A warp's way through packed units: where they lie, which it works on, which its ring fetches next.
#pragma once
#include "kvgen/part.cuh"
#include "kvgen/ring.cuh"

namespace kvgen {

// Where the packed units of a head lie, for a lane.
template <class Traits>
struct Blocks {
  const uint8_t* start;  // of the head's blocks; where there are pages, of the head within each
  const int* pages;      // of the sequence
  int page = 0, next = 0;  // of the unit and of the warp's next: whoever asks for an entry of the table waits as long as a ring takes to be filled
  int lane, stride;        // from one unit of the warp to the next

  __device__ Blocks(int lane_, int stride_) : lane(lane_), stride(stride_) {}
  __device__ __forceinline__ void enter(const AttendArgs& args, int batch, int head) {
    start = args.cache.packed + head * args.cache.head_stride_bytes + (Traits::kGathered ? 0 : lane * 16);  // lanes exchange gathered addresses
    if constexpr (Traits::kPaged)
      pages = args.cache.block_table + static_cast<int64_t>(batch) * args.cache.table_stride;
    else
      start += batch * args.cache.outer_stride_bytes;
  }
  // Asks for the pages of the warp's first units, of those below `end`. `length`: the sequence's.
  __device__ __forceinline__ void look_up(int unit, int end, int length) {
    if constexpr (Traits::kPaged) page = page_of(unit, end, length), next = page_of(unit + stride, end, length);
  }
  // A unit that was looked up; looks up the warp's next but one.
  __device__ __forceinline__ Unit packed(const AttendArgs& args, int unit, int end, int length) {
    int64_t block = block_of(unit, length);
    const uint8_t* base = start;
    if constexpr (Traits::kPaged) {
      base += page * args.cache.outer_stride_bytes, block %= Traits::kPageBlocks;
      page = next, next = page_of(unit + 2 * stride, end, length);
    }
    base += block * Traits::Format::kBlockBytes;
    if constexpr (Traits::kGathered) return {nullptr, base, true};
    const int within = unit % Traits::kUnitsPerBlock, group = Traits::kKeyPerChannel ? within * Traits::kUnitTokens / Traits::Key::kGroup : 0;
    return {base + Traits::Format::kKeyChannelParams + group * Traits::kUnitParams, base + Traits::Format::kHeaderBytes + within * Traits::kUnitBytes, true};
  }

 private:
  __device__ __forceinline__ int page_of(int unit, int end, int length) const { return unit < end ? pages[block_of(unit, length) / Traits::kPageBlocks] : 0; }
  // Of a unit. Of a gathered one each lane gives a block; in place of a missing one, the last: what weighs nothing must be finite.
  __device__ __forceinline__ int block_of(int unit, int length) const {
    if constexpr (!Traits::kGathered) return unit / Traits::kUnitsPerBlock;
    return min(unit * Traits::kUnitBlocks + min(lane, Traits::kUnitBlocks - 1), length / Traits::Format::kTokens - 1);
  }
};

// A CTA among those of its head.
template <class Traits>
struct Place {
  int rank, ctas;

  __device__ explicit Place(const Part& part) : rank(part.rank * Traits::kTogether + blockIdx.x % Traits::kTogether), ctas(part.count * Traits::kTogether) {}
};

// Walks the packed units of one warp. The warps of all of a head's CTAs take them in turn, so that where a warp begins does not
// depend on the sequence's length.
template <class Traits>
struct Cursor {
  const AttendArgs* args;
  Blocks<Traits> blocks;
  int unit, end = 0, length = 0;

  __device__ Cursor(const AttendArgs& args_, const Head& head, const Place<Traits>& place, int warp, int lane)
      : args(&args_), blocks(lane, Traits::kWarps * place.ctas), unit(warp * place.ctas + place.rank) {
    blocks.enter(*args, head.batch, head.head);
    if constexpr (!Traits::kGathered) blocks.look_up(unit, args->cache.blocks * Traits::kUnitsPerBlock, 0);  // as far as the table goes
  }
  // The first unit, if memory goes that far: perhaps it is not the sequence's. Where no table says where it lies.
  __device__ __forceinline__ Unit likely() { return unit < args->cache.blocks * Traits::kUnitsPerBlock ? blocks.packed(*args, unit, 0, 0) : Unit{}; }
  __device__ void limit(int length_) {
    length = length_, end = Traits::packed_units(length);
    if constexpr (Traits::kGathered) blocks.look_up(unit, end, length);
  }
  __device__ __forceinline__ Unit here() { return unit < end ? blocks.packed(*args, unit, end, length) : Unit{}; }
  __device__ __forceinline__ Unit next() {
    unit += blocks.stride;
    return here();
  }
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
  // Fills the slots.
  __device__ __forceinline__ void fill_up() {
    upcoming = cursor.here();
#pragma unroll 1
    for (int slot = 0; slot < Traits::kDepth; ++slot) {  // rolled: code that runs once costs more to fetch than to run
#pragma unroll 1
      for (int stage = slot ? 0 : early; stage < Traits::kUnitStages; ++stage) ring.fill(slot, stage, upcoming);
      upcoming = cursor.next();
    }
  }
  // A stage of the oldest slot is done with and refilled.
  __device__ __forceinline__ void release(int stage) {
    ring.release(stage);
    ring.fill(depth, stage, upcoming);
  }
  // The oldest slot is done with.
  __device__ __forceinline__ void step() {
    upcoming = cursor.next();
    if (Traits::kDepth == 1 || ++depth == Traits::kDepth) depth = 0, ring.next_round();
  }
};

}  // namespace kvgen
