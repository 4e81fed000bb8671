// Who does what. Every head is a run of virtual units: its packed units, then kTailUnits that stand for the residual (and are
// there even if it is empty: somebody must own the head). The runs of all heads are laid end to end, and each CTA takes an
// equal range. Where all lengths agree and the grid allows it, ranges are cut per head, so that no CTA straddles two.
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

struct Head {
  int batch = 0;
  int head = 0;
  int start = 0;   // flat number of its first unit
  int packed = 0;  // packed units
  int total = 0;   // with the tail
};

template <class Traits>
struct Plan {
  int begin = 0, end = 0;  // this CTA's flat range
  Head first;              // the head that holds `begin`
  bool per_head = false;
  int share = 0, extra = 0;  // units of a CTA; the first `extra` CTAs have one more
  int splits = 1;            // CTAs of a head if per_head

  __device__ Plan(const int* lengths, int batch, int heads, const Grid& grid, int lane) {
    int total = 0, shortest = INT_MAX, longest = 0;
    for (int at = lane; at < batch; at += 32) {
      const int units = packed_units<Traits>(lengths[at]);
      total += units, shortest = min(shortest, units), longest = max(longest, units);
    }
    total = __reduce_add_sync(~0u, total) + batch * Traits::kTailUnits;
    shortest = __reduce_min_sync(~0u, shortest), longest = __reduce_max_sync(~0u, longest);
    const int all_heads = batch * heads;
    splits = grid.splits ? grid.splits : grid.ctas / all_heads;
    per_head = grid.splits > 0 || (shortest == longest && splits > 0 && splits * all_heads == grid.ctas);
    if (per_head)
      cut_head(lengths, heads);
    else
      cut_flat(lengths, batch, heads, total * heads, shortest == longest, lane);
  }

  // First and last CTA of a head.
  __device__ int first_cta(const Head& head) const { return per_head ? blockIdx.x / splits * splits : cta_of(head.start); }
  __device__ int last_cta(const Head& head) const { return per_head ? first_cta(head) + splits - 1 : cta_of(head.start + head.total - 1); }
  // Whether the CTA's range begins with this head rather than with the one before.
  __device__ bool begins_at(int cta, const Head& head) const { return per_head || range_begin(cta) == head.start; }

 private:
  __device__ int range_begin(int cta) const { return cta * share + min(cta, extra); }
  __device__ int cta_of(int unit) const {
    const int head = extra * (share + 1);
    return unit < head ? unit / (share + 1) : extra + (unit - head) / share;
  }
  __device__ void set_first(const int* lengths, int batch, int head, int start) {
    const int packed = packed_units<Traits>(lengths[batch]);
    first = Head{batch, head, start, packed, packed + Traits::kTailUnits};
  }
  __device__ void cut_head(const int* lengths, int heads) {
    const int at = blockIdx.x / splits, rank = blockIdx.x % splits;
    set_first(lengths, at / heads, at % heads, 0);
    begin = static_cast<int>(static_cast<int64_t>(first.total) * rank / splits);
    end = static_cast<int>(static_cast<int64_t>(first.total) * (rank + 1) / splits);
  }
  __device__ void cut_flat(const int* lengths, int batch, int heads, int total, bool uniform, int lane) {
    share = total / gridDim.x, extra = total % gridDim.x;
    begin = range_begin(blockIdx.x), end = range_begin(blockIdx.x + 1);
    if (begin >= end) return;
    if (uniform) {
      const int units = packed_units<Traits>(lengths[0]) + Traits::kTailUnits, at = begin / units;
      set_first(lengths, at / heads, at % heads, at * units);
      return;
    }
    for (int base = 0, before = 0; base < batch; base += 32) {  // inclusive scan, 32 sequences at a time
      const int mine = base + lane < batch ? (packed_units<Traits>(lengths[base + lane]) + Traits::kTailUnits) * heads : 0;
      int scan = mine;
      for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, scan, by);
        if (lane >= by) scan += other;
      }
      const unsigned after = __ballot_sync(~0u, before + scan > begin);
      if (after) {
        const int at = __ffs(after) - 1, start = before + __shfl_sync(~0u, scan - mine, at);
        const int units = packed_units<Traits>(lengths[base + at]) + Traits::kTailUnits, head = (begin - start) / units;
        set_first(lengths, base + at, head, start + head * units);
        return;
      }
      before += __shfl_sync(~0u, scan, 31);
    }
  }
};

// The head after this one.
template <class Traits>
__device__ __forceinline__ void advance(Head& at, const int* lengths, int heads) {
  at.start += at.total;
  if (++at.head == heads) {
    at.head = 0, ++at.batch;
    at.packed = packed_units<Traits>(lengths[at.batch]), at.total = at.packed + Traits::kTailUnits;
  }
}

// Walks the packed units of one warp: every kWarps-th of the CTA's range, across heads.
template <class Traits>
struct Cursor {
  Head at;
  int flat;

  __device__ Cursor(const Plan<Traits>& plan, int warp) : at(plan.first), flat(plan.begin + warp) {}

  __device__ __forceinline__ void settle(const Plan<Traits>& plan, const int* lengths, int heads) {
    while (flat < plan.end && flat - at.start >= at.packed) {
      if (flat - at.start < at.total)
        flat += Traits::kWarps;
      else
        advance<Traits>(at, lengths, heads);
    }
  }
  __device__ __forceinline__ Unit unit(const AttendArgs& args, const Plan<Traits>& plan) const {
    if (flat >= plan.end) return {};
    const int local = flat - at.start, block = local / Traits::kUnitsPerBlock, within = local % Traits::kUnitsPerBlock;
    const uint8_t* base = args.cache.block<Traits::kPaged>(at.batch, at.head, block, Traits::Format::kBlockBytes);
    const int group = Traits::kKeyPerChannel ? within * Traits::kUnitTokens / Traits::Key::kGroup : 0;
    return {base + Traits::Format::kKeyChannelParams + group * Traits::kUnitParams, base + Traits::Format::kHeaderBytes + within * Traits::kUnitBytes};
  }
  __device__ __forceinline__ Unit next(const AttendArgs& args, const Plan<Traits>& plan, const int* lengths) {
    flat += Traits::kWarps;
    settle(plan, lengths, args.cache.kv_heads);
    return unit(args, plan);
  }
};

}  // namespace kvgen
