// Who does what. Every head is a run of units: its packed units, then those of its tail, of about as many bytes (one at least,
// if only an empty one: somebody must own the head). The runs of all heads are laid end to end, and each CTA takes an equal
// range. Where all lengths agree and the grid allows it, ranges are cut per head, so that no CTA straddles two.
#pragma once
#include "kvgen/args.cuh"
#include "kvgen/ring.cuh"
#include "kvgen/traits.cuh"

namespace kvgen {

// How many CTAs, and how a range follows from a CTA's number.
struct Grid {
  int ctas = 1;
  int splits = 0;  // CTAs per head if ranges are cut per head whatever the lengths; 0: decided on the device
};

template <class Traits>
__device__ __forceinline__ int packed_units(int length) { return length / Traits::Format::kTokens * Traits::kUnitsPerBlock; }

// Units of the tail of a sequence, with `fresh` new tokens.
template <class Traits>
__device__ __forceinline__ int tail_units(int length, int fresh) {
  return max(1, ceil_div(length % Traits::Format::kTokens + fresh, Traits::kTailTokens));
}

struct Head {
  int batch = 0;
  int head = 0;
  int start = 0;   // flat number of its first unit
  int packed = 0;  // packed units
  int total = 0;   // with the tail
};

// Lengths before the call, in shared memory, and what the call adds to each.
struct Lengths {
  const int* before;
  int batch;
  int heads;
  int fresh;

  template <class Traits>
  __device__ __forceinline__ int units(int b) const {
    return packed_units<Traits>(before[b]) + tail_units<Traits>(before[b], fresh);
  }
  template <class Traits>
  __device__ __forceinline__ void describe(int b, Head& head) const {
    head.batch = b, head.packed = packed_units<Traits>(before[b]), head.total = head.packed + tail_units<Traits>(before[b], fresh);
  }
};

template <class Traits>
struct Plan {
  int begin = 0, end = 0;  // this CTA's flat range
  Head first;              // the head that holds `begin`
  bool per_head = false;
  int share = 0, extra = 0;  // units of a CTA; the first `extra` CTAs have one more
  int splits = 1;            // CTAs of a head if per_head; of these, `parts` have something to do
  int parts = 1;

  __device__ Plan(const Lengths& lengths, const Grid& grid, int lane) {
    int total = 0, shortest = INT_MAX, longest = 0;
    for (int at = lane; at < lengths.batch; at += 32) {
      const int length = lengths.before[at];
      total += lengths.units<Traits>(at), shortest = min(shortest, length), longest = max(longest, length);
    }
    total = __reduce_add_sync(~0u, total) * lengths.heads;
    const bool uniform = __reduce_min_sync(~0u, shortest) == __reduce_max_sync(~0u, longest);
    const int all_heads = lengths.batch * lengths.heads;
    splits = grid.splits ? grid.splits : grid.ctas / all_heads;
    per_head = grid.splits > 0 || (uniform && splits > 0 && splits * all_heads == grid.ctas);
    if (per_head)
      cut_head(lengths);
    else
      cut_flat(lengths, total, uniform, lane);
  }

  // First and last CTA of a head.
  __device__ int first_cta(const Head& head) const { return per_head ? blockIdx.x / splits * splits : cta_of(head.start); }
  __device__ int last_cta(const Head& head) const { return per_head ? first_cta(head) + parts - 1 : cta_of(head.start + head.total - 1); }
  // Whether the CTA's range begins with this head rather than with the one before.
  __device__ bool begins_at(int cta, const Head& head) const { return per_head || range_begin(cta) == head.start; }

 private:
  __device__ int range_begin(int cta) const { return cta * share + min(cta, extra); }
  __device__ int cta_of(int unit) const {
    const int head = extra * (share + 1);
    return unit < head ? unit / (share + 1) : extra + (unit - head) / share;
  }
  __device__ int cut(int units, int part) const { return static_cast<int>(static_cast<int64_t>(units) * part / parts); }
  __device__ void set_first(const Lengths& lengths, int batch, int head, int start) {
    first.head = head, first.start = start;
    lengths.describe<Traits>(batch, first);
  }
  __device__ void cut_head(const Lengths& lengths) {
    const int at = blockIdx.x / splits, rank = blockIdx.x % splits;
    set_first(lengths, at / lengths.heads, at % lengths.heads, 0);
    parts = min(splits, first.total);
    begin = cut(first.total, min(rank, parts));
    end = cut(first.total, min(rank + 1, parts));
  }
  __device__ void cut_flat(const Lengths& lengths, int total, bool uniform, int lane) {
    share = total / gridDim.x, extra = total % gridDim.x;
    begin = range_begin(blockIdx.x), end = range_begin(blockIdx.x + 1);
    if (begin >= end) return;
    if (uniform) {
      const int units = lengths.units<Traits>(0), at = begin / units;
      set_first(lengths, at / lengths.heads, at % lengths.heads, at * units);
      return;
    }
    for (int base = 0, before = 0; base < lengths.batch; base += 32) {  // inclusive scan, 32 sequences at a time
      const int mine = base + lane < lengths.batch ? lengths.units<Traits>(base + lane) * lengths.heads : 0;
      int scan = mine;
      for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, scan, by);
        if (lane >= by) scan += other;
      }
      const unsigned after = __ballot_sync(~0u, before + scan > begin);
      if (after) {
        const int at = __ffs(after) - 1, start = before + __shfl_sync(~0u, scan - mine, at);
        const int units = lengths.units<Traits>(base + at), head = (begin - start) / units;
        set_first(lengths, base + at, head, start + head * units);
        return;
      }
      before += __shfl_sync(~0u, scan, 31);
    }
  }
};

// The head after this one.
template <class Traits>
__device__ __forceinline__ void advance(Head& at, const Lengths& lengths) {
  at.start += at.total;
  if (++at.head == lengths.heads) {
    at.head = 0;
    lengths.describe<Traits>(at.batch + 1, at);
  }
}

// Walks the units of one warp: every kWarps-th of the CTA's range, across heads.
template <class Traits>
struct Cursor {
  Head at;
  int flat;

  __device__ Cursor(const Plan<Traits>& plan, const Lengths& lengths, int warp) : at(plan.first), flat(plan.begin + warp) { settle(plan, lengths); }

  __device__ __forceinline__ Unit unit(const AttendArgs& args, const Plan<Traits>& plan, const Lengths& lengths) const {
    if (flat >= plan.end) return {};
    const int local = flat - at.start;
    if (local >= at.packed) return Unit::of_tail(at.batch, at.head, lengths.before[at.batch], (local - at.packed) * Traits::kTailTokens);
    const int block = local / Traits::kUnitsPerBlock, within = local % Traits::kUnitsPerBlock;
    const uint8_t* base = args.cache.block<Traits::kPaged>(at.batch, at.head, block, Traits::Format::kBlockBytes);
    const int group = Traits::kKeyPerChannel ? within * Traits::kUnitTokens / Traits::Key::kGroup : 0;
    return Unit::of_block(base + Traits::Format::kKeyChannelParams + group * Traits::kUnitParams, base + Traits::Format::kHeaderBytes + within * Traits::kUnitBytes);
  }
  __device__ __forceinline__ Unit next(const AttendArgs& args, const Plan<Traits>& plan, const Lengths& lengths) {
    flat += Traits::kWarps;
    settle(plan, lengths);
    return unit(args, plan, lengths);
  }

 private:
  __device__ __forceinline__ void settle(const Plan<Traits>& plan, const Lengths& lengths) {
    while (flat < plan.end && flat - at.start >= at.total) advance<Traits>(at, lengths);
  }
};

}  // namespace kvgen
