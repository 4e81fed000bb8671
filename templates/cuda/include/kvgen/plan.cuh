// Who does what where lengths are not alike. Every head is a run of units: its packed units, then the pieces of its tail (one at least,
// if only an empty one: somebody must own the head). A packed unit weighs kUnit, a piece one. The runs of all heads are laid end to
// end, and each CTA takes an equal range of weight.
#pragma once
#include <climits>

#include "kvgen/args.cuh"
#include "kvgen/traits.cuh"

namespace kvgen {

// Division of numbers below 2^31 by one that the host knows.
struct Divisor {
  uint32_t number, multiplier, shift = 31;

  __host__ __device__ explicit Divisor(uint32_t number_) : number(number_) {
    while (1ull << (shift - 31) < number) ++shift;
    multiplier = static_cast<uint32_t>(((1ull << shift) + number - 1) / number);
  }
  __device__ __forceinline__ int quotient(int n) const { return static_cast<int>(static_cast<uint64_t>(n) * multiplier >> shift); }
  __device__ __forceinline__ int rest(int n) const { return n - quotient(n) * static_cast<int>(number); }
};

// A launch has `splits` x kv_heads x batch CTAs where every head has as many parts, else `ctas` x 1 x 1. If they take ranges, the
// first `ranges` do.
struct Grid {
  int ctas = 1;
  int splits = 0;
  int ranges = 1;
  Divisor by_ranges{1}, by_heads{1}, by_splits{1};  // KV heads; the plan waits for every division
};

// One head's run of units.
struct Head {
  int batch = 0;
  int head = 0;
  int start = 0;   // weight of all before it
  int packed = 0;  // packed units
  int pieces = 0;  // of the tail
  int weight = 0;
};

// Lengths before the call, in shared memory, and what the call adds to each.
template <class Traits>
struct Lengths {
  const int* before;
  int batch;
  int heads;
  int fresh;

  __device__ __forceinline__ void describe(int b, Head& head) const {
    const int length = before[b];
    head.batch = b;
    head.packed = Traits::packed_units(length);
    head.pieces = max(1, ceil_div(length % Traits::Format::kTokens + fresh, Traits::kPieceTokens));
    head.weight = head.packed * Traits::kUnit + head.pieces + Traits::kHeadWeight;
  }
  __device__ __forceinline__ int weight(int b) const {
    Head head;
    describe(b, head);
    return head.weight;
  }
  __device__ __forceinline__ void advance(Head& at) const {
    at.start += at.weight;
    if (++at.head == heads) at.head = 0, describe(at.batch + 1, at);
  }
};

// A CTA's units of one head: packed ones are numbered from zero, pieces of the tail from `packed` on.
struct Segment {
  int begin = 0;
  int end = 0;
};

template <class Traits>
struct Plan {
  Plan() = default;
  int begin = 0, end = 0;  // this CTA's range of weight
  Head first;              // the head that holds `begin`
  int cta = 0;               // this CTA's number
  int share = 0, extra = 0;  // weight of a CTA's range; the first `extra` CTAs have one more

  __device__ Plan(const Lengths<Traits>& lengths, const Grid& grid, int lane) : cta(number()) {
    int total = 0, shortest = INT_MAX, longest = 0;
    for (int at = lane; at < lengths.batch; at += 32) {
      const int length = lengths.before[at];
      total += lengths.weight(at), shortest = min(shortest, length), longest = max(longest, length);
    }
    const bool uniform = __reduce_min_sync(~0u, shortest) == __reduce_max_sync(~0u, longest);
    cut(lengths, __reduce_add_sync(~0u, total) * lengths.heads, grid, uniform, lane);
  }

  __device__ static int number() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }
  // The `further`-th head of this CTA, if lengths agree and but for rounding. Not that it exists.
  __device__ static Head likely(const Lengths<Traits>& lengths, const Grid& grid, int further) {
    const int at = grid.by_ranges.quotient(number() * (lengths.batch * lengths.heads)) + further;
    Head head;
    head.batch = grid.by_heads.quotient(at), head.head = grid.by_heads.rest(at);
    return head;
  }
  __device__ bool idle() const { return begin >= end; }
  __device__ Segment segment(const Head& head) const {
    return {unit_at(head, max(begin, head.start) - head.start), unit_at(head, min(end, head.start + head.weight) - head.start)};
  }
  // Whether the CTA's range covers the head's first or last weight.
  __device__ bool covers_begin(const Head& head) const { return begin <= head.start; }
  __device__ bool covers_end(const Head& head) const { return end >= head.start + head.weight; }

  // First and last CTA of a head.
  __device__ int first_cta(const Head& head) const { return cta_of(head.start); }
  __device__ int last_cta(const Head& head) const { return cta_of(head.start + head.weight - 1); }
  __device__ bool covers(const Head& head) const { return covers_begin(head) && covers_end(head); }
  // Whether a CTA's range begins with this head rather than with the one before.
  __device__ bool begins_at(int cta, const Head& head) const { return range_begin(cta) == head.start; }

 private:
  // The first unit that begins at or after `weight` within a head.
  __device__ static int unit_at(const Head& head, int weight) {
    const int packed = head.packed * Traits::kUnit;
    return weight <= packed ? ceil_div(weight, Traits::kUnit) : head.packed + min(weight - packed, head.pieces);
  }
  __device__ int range_begin(int cta) const { return cta * share + min(cta, extra); }
  __device__ int cta_of(int weight) const {
    const int longer = extra * (share + 1);
    return weight < longer ? weight / (share + 1) : extra + (weight - longer) / share;
  }
  __device__ void set_first(const Lengths<Traits>& lengths, int batch, int head, int start) {
    first.head = head, first.start = start;
    lengths.describe(batch, first);
  }
  __device__ void cut(const Lengths<Traits>& lengths, int total, const Grid& grid, bool uniform, int lane) {
    share = grid.by_ranges.quotient(total), extra = grid.by_ranges.rest(total);
    begin = range_begin(cta), end = range_begin(cta + 1);
    if (idle()) begin = end = 0;
    if (idle()) return;
    if (uniform) {
      const int weight = lengths.weight(0), at = static_cast<unsigned>(begin) / static_cast<unsigned>(weight);
      set_first(lengths, grid.by_heads.quotient(at), grid.by_heads.rest(at), at * weight);
      return;
    }
    for (int base = 0, before = 0; base < lengths.batch; base += 32) {  // inclusive scan, 32 sequences at a time
      const int mine = base + lane < lengths.batch ? lengths.weight(base + lane) * lengths.heads : 0;
      int scan = mine;
      for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, scan, by);
        if (lane >= by) scan += other;
      }
      const unsigned after = __ballot_sync(~0u, before + scan > begin);
      if (after) {
        const int at = __ffs(after) - 1, start = before + __shfl_sync(~0u, scan - mine, at);
        const int weight = lengths.weight(base + at), head = (begin - start) / weight;
        set_first(lengths, base + at, head, start + head * weight);
        return;
      }
      before += __shfl_sync(~0u, scan, 31);
    }
  }
};

// The CTAs that share a head, and the slots where their partial results lie.
struct Parts {
  int first = 0, count = 1;
  int first_slot = 0;
  int own_slot = 0;

  template <class Traits>
  __device__ static Parts of(const Plan<Traits>& plan, const Head& head) {
    Parts parts;
    parts.first = plan.first_cta(head), parts.count = plan.last_cta(head) - parts.first + 1;
    parts.first_slot = 2 * parts.first + (plan.begins_at(parts.first, head) ? 0 : 1);
    parts.own_slot = parts.slot(plan.cta - parts.first);
    return parts;
  }
  // Of `count` neighbouring CTAs, the `rank`-th of which this is, that have nothing else.
  __device__ static Parts even(int first, int count, int rank) { return {first, count, 2 * first, 2 * (first + rank)}; }
  __device__ int slot(int i) const { return i == 0 ? first_slot : 2 * (first + i); }
};

// Heads of a CTA's range that are worked on together.
template <class Traits>
struct Group {
  Head heads[Traits::kHeads];
  Parts parts[Traits::kHeads];  // of those that are shared
  int count = 0;
  bool last = false;
  Head next;  // unless it is the last group

  __device__ Group(const Plan<Traits>& plan, const Lengths<Traits>& lengths, const Head& head) : next(head) {
#pragma unroll
    for (int i = 0; i < Traits::kHeads; ++i) {
      if (last) break;
      heads[i] = next, ++count;
      if (!plan.covers(next)) parts[i] = Parts::of(plan, next);
      last = plan.end <= next.start + next.weight;
      if (!last) lengths.advance(next);
    }
  }
};

// What a warp seldom looks at lies in shared memory: registers are for the inner loop.
template <class Traits>
struct Book {
  Plan<Traits> plan;
  Group<Traits> group, next;  // that the warp works on, and the one after it
  Head ahead;                 // that its ring is being filled from
  Segment segment;            // of that
};

// Every lane gives the same value.
template <class T>
__device__ __forceinline__ void write_down(T& place, const T& value, int lane) {
  __syncwarp();
  if (lane == 0) place = value;
  __syncwarp();
}

}  // namespace kvgen
