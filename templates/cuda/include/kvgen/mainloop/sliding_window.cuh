// Sliding window attention: a query attends to itself and the kTokens - 1 tokens before it.
#pragma once
#include "kvgen/mainloop/mask.cuh"

namespace kvgen {

template <int kTokens>
struct SlidingWindow {
  static constexpr int kWindow = kTokens;
  __device__ static constexpr int first_token(int position) { return position < kTokens ? 0 : position - kTokens + 1; }
};

}  // namespace kvgen
