// The seam of learned sinks: a logit of each query head may join the softmax denominator. It joins when the output is written, so it
// counts once however many splits a head has.
//
// A type of the seam has
//   kActive                   whether there are logits; without them the seam costs no instruction
//   Logit                     the type of a loaded logit
//   load(args, head, row)     the logit of a packed-GQA row. It is loaded before the sums are, so that their latencies overlap
//   join(logit, stats)        adds it to the denominator; returns the factor of the accumulators
#pragma once
#include <cfloat>

#include "kvgen/epilogue/workspace.cuh"

namespace kvgen {

struct NoSinks {
  static constexpr bool kActive = false;
  struct Logit {};
  template <class Traits>
  __device__ __forceinline__ static Logit load(const AttendArgs&, const Head&, int) {
    return {};
  }
};

// Learned sinks: each query head has a logit that joins the softmax denominator and has no value, as in gpt-oss.

struct LearnedSinks {
  static constexpr bool kActive = true;
  using Logit = float;  // in log2 units, as row_max
  template <class Traits>
  __device__ __forceinline__ static Logit load(const AttendArgs& args, const Head& head, int row) {
    return args.sinks[head.head * Traits::kGroup + Traits::head_row(head.run, row) % Traits::kGroup] * 1.4426950408889634f;
  }
  // row_max is lazy, so the logit may lie far above or below it. The larger of both becomes row_max, so that no power of two overflows. A
  // row with row_sum 0 has no valid row_max, which is then ignored.
  __device__ __forceinline__ static float join(Logit logit, RowStats& stats) {
    const float row_max = fmaxf(stats.row_sum == 0.f ? -FLT_MAX : stats.row_max, logit);
    const float factor = ptx::exp2(fminf(stats.row_max - row_max, 0.f));
    stats = {row_max, fmaf(stats.row_sum, factor, ptx::exp2(logit - row_max))};
    return factor;
  }
};

}  // namespace kvgen
