// Query rows: partial results, and the online softmax over a chunk of scores.
#pragma once
#include <cmath>

#include "kvgen/score_modifier.hpp"
#include "kvgen/simd.hpp"

namespace kvgen {

// The attention of a query row to some of its tokens, and the sum of two such results.

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

// Rows are (query token, head of the GQA group), heads fastest. Scores are in units of log2 e, so that weights are powers of 2.
template <class C>
struct Rows {
  static constexpr int dim = C::kHeadDim;
  static constexpr int most = C::rows * (8192 / dim > C::rows ? (8192 / dim < 64 ? 8192 / dim : 64) / C::rows : 1);
  static constexpr bool summed = C::Key::kPerToken && C::Key::kZero;
  static constexpr int sums = summed ? dim / C::Key::kGroup : 1;

  alignas(64) float q[most][dim];
  alignas(64) float acc[most][dim];
  float q_sum[most][sums];  // over each channel group of K, where K has one zero per token
  float row_max[most];
  float row_sum[most];
  int64_t from[most], to[most];  // positions that a row sees; its own is the last
  int q_head[most];
  int count;  // padded to a multiple of C::rows; padding sees nothing

  void reset(int rows) {
    count = (rows + C::rows - 1) / C::rows * C::rows;
    std::memset(acc, 0, sizeof(acc[0]) * count);
    for (int r = 0; r < count; ++r) {
      row_max[r] = -kInfinity;
      row_sum[r] = 0;
      from[r] = to[r] = q_head[r] = 0;
      if (r >= rows) std::memset(q[r], 0, sizeof(q[r]));
    }
  }

  PartialSum<dim> partial(int r) { return {acc[r], row_max[r], row_sum[r]}; }

  void sum_groups() {
    if constexpr (summed)
      for (int r = 0; r < count; ++r)
        for (int g = 0; g < sums; ++g) {
          float s = 0;
          for (int c = 0; c < dim / sums; ++c) s += q[r][g * (dim / sums) + c];
          q_sum[r][g] = s;
        }
  }

  // Turns the scores of `tokens` positions from `position` on into weights (zero where masked, and up to the next 16), and rescales acc and
  // row_sum to the new row_max, for the C::rows rows from `first` on, whose scores are rows of C::chunk. Two passes over all rows, so that
  // the chains of dependent instructions of several rows overlap. Prefetches the bytes that the products of `keys` did not prefetch.
  template <class Keys>
  void online_softmax(int first, int64_t position, int tokens, float* scores, const Keys& keys) {
    const int padded = (tokens + kLanes - 1) / kLanes * kLanes;
    float peak[C::rows];
    for (int m = 0; m < C::rows; ++m) peak[m] = masked_max(first + m, position, tokens, padded, scores + m * C::chunk);
    for (int m = 0; m < C::rows; ++m) {
      float* score = scores + m * C::chunk;
      const float shift = peak[m] == -kInfinity ? 0 : peak[m];  // where all scores are -inf, weights are 0; a NaN stays one
      F32 total = F32{};
      for (int i = 0; i < padded; i += kLanes) {
        const F32 p = exp2(load<F32>(score + i) - shift);
        total += p;
        keys.prefetch_rest(m, i / kLanes);
        store(score + i, p);
      }
      partial(first + m).rescale(peak[m]);
      row_sum[first + m] += sum(total);
    }
  }

 private:
  // Applies score modifier and mask to a row's scores, and returns the new row_max, which shows no NaN.
  float masked_max(int r, int64_t position, int tokens, int padded, float* score) const {
    const int64_t low = from[r] - position, high = to[r] - position < tokens ? to[r] - position : tokens;
    if (low >= high) {
      for (int i = 0; i < padded; i += kLanes) store(score + i, splat<F32>(-kInfinity));
      return row_max[r];
    }
    if constexpr (C::Modifier::active)
      for (int i = 0; i < padded; i += kLanes)
        store(score + i, C::Modifier::apply(load<F32>(score + i), ScorePlace{q_head[r], to[r] - 1, position + i}));
    if (low > 0 || high < padded) mask(score, padded, static_cast<int>(low), static_cast<int>(high));
    F32 largest = splat<F32>(row_max[r]);
    for (int i = 0; i < padded; i += kLanes) largest = max(load<F32>(score + i), largest);
    return largest_lane(largest);
  }

  static void mask(float* score, int padded, int low, int high) {
    I32 index = lanes_from<I32>([](int i) { return i; });
    for (int i = 0; i < padded; i += kLanes, index += kLanes)
      store(score + i, select((index >= low) & (index < high), load<F32>(score + i), splat<F32>(-kInfinity)));
  }
};

}  // namespace kvgen
