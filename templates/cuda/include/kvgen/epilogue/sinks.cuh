// The seam of learned sinks: a logit of each query head may join the softmax denominator. It joins when the output is written, so it
// counts once however many splits a head has.
//
// A type of the seam has
//   kActive                   whether there are logits; without them the seam costs no instruction
//   Logit                     the type of a loaded logit
//   load(args, head, row)     the logit of a packed-GQA row. It is loaded before the sums are, so that their latencies overlap
//   join(logit, stats)        adds it to the denominator; returns the factor of the accumulators
#pragma once
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

}  // namespace kvgen
