// The attention of a query row to some of its tokens, and the sum of two such results.
#pragma once

#include <cmath>

#include "kvgen/simd.hpp"

namespace kvgen {

// Weights are 2^(score - row_max). The KV tiles of a work tile and the splits of a head are all rescaled and added here.
template <int dim>
struct PartialSum {
  float* acc;  // of weight * v, by channel
  float &row_max, &row_sum;

  // Changes row_max to `peak`, by which all weights are multiplied by 2^(row_max - peak).
  void rescale(float peak) const {
    if (peak == row_max) return;
    const float alpha = std::exp2(row_max - peak);
    row_max = peak;
    row_sum *= alpha;
    for (int c = 0; c < dim; c += kLanes) store(acc + c, load<F32>(acc + c) * alpha);
  }

  // Adds the result of other tokens. A `sum` of 0 says that the row sees none of them, and then `values` may be anything.
  void add(const float* values, float max, float sum) const {
    if (sum == 0) return;
    rescale(row_max < max ? max : row_max);
    const float weight = std::exp2(max - row_max);
    row_sum += sum * weight;
    for (int c = 0; c < dim; c += kLanes) store(acc + c, load<F32>(acc + c) + load<F32>(values + c) * weight);
  }
};

}  // namespace kvgen
