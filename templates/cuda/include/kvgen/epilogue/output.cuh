// Writes the output of a row: its accumulator divided by row_sum, and the log-sum-exp.
#pragma once
#include "kvgen/epilogue/sinks.cuh"

namespace kvgen {

// Writes the natural log-sum-exp of a row, if it was asked for: -inf if the row attends to nothing and has no sink.
template <class Traits>
__device__ __forceinline__ void write_lse(const AttendArgs& args, int sequence, int q_head, int query, const RowStats& stats) {
  if (!args.lse) return;
  const int64_t at = (static_cast<int64_t>(sequence) * args.cache.kv_heads * Traits::kGroup + q_head) * args.q_len + query;
  args.lse[at] = stats.row_sum == 0.f ? -INFINITY : (stats.row_max + log2f(stats.row_sum)) * 0.6931471805599453f;
}

// Writes elements of a row, every `stride`-th from `channel` on; the thread with channel 0 writes the log-sum-exp. `sink` joins the
// denominator. A row that attends to no token has the output 0, and its sink or -inf as log-sum-exp. A NaN in row_sum gives NaN.
template <class Traits, int kWide>
__device__ __forceinline__ void write_output(const AttendArgs& args, const Head& head, int row, int channel, int stride,
                                             const float (&value)[kWide], const RowStats& stats,
                                             const typename Traits::Sinks::Logit& sink) {
  using Element = typename Traits::Format::Element;
  const int head_row = Traits::head_row(head.run, row);
  const int query = head_row / Traits::kGroup, q_head = head.head * Traits::kGroup + head_row % Traits::kGroup;
  if (query >= args.q_len) return;
  Element* to = args.out.row<Element>(head.sequence, query, q_head) + channel;
  // An exact division adds some hundred bytes of code that each CTA runs once; fetching them takes longer than running them.
  RowStats total = stats;
  float factor = 1.f;
  if constexpr (Traits::Sinks::kActive) factor = Traits::Sinks::join(sink, total);
  const float inverse = total.row_sum == 0.f ? 0.f : __fdividef(factor, total.row_sum);
#pragma unroll
  for (int i = 0; i < kWide; ++i) to[i * stride] = static_cast<Element>(value[i] * inverse);
  if (channel == 0) write_lse<Traits>(args, head.sequence, q_head, query, total);
}

// Writes the output of a sequence without tokens: zeros, or NaN where the sink is NaN, and a log-sum-exp of -inf or the sink. All threads
// of the CTA call it. Rows are aligned to 16 bytes, which a thread writes at once.
template <class Traits>
__device__ __forceinline__ void write_empty(const AttendArgs& args, int sequence) {
  using Element = typename Traits::Format::Element;
  struct alignas(16) Vector {
    Element elements[16 / sizeof(Element)];
  };
  constexpr int kWide = 16 / sizeof(Element), kVectors = Traits::kHeadDim / kWide;
  for (int query = 0; query < args.q_len; ++query)
    for (int at = threadIdx.x; at < args.cache.kv_heads * Traits::kGroup * kVectors; at += Traits::kThreads) {
      const int q_head = at / kVectors;
      RowStats stats;
      Vector vector = {};
      if constexpr (Traits::Sinks::kActive) {
        const Head head{sequence, q_head / Traits::kGroup};
        Traits::Sinks::join(Traits::Sinks::template load<Traits>(args, head, q_head % Traits::kGroup), stats);
        for (Element& element : vector.elements) element = static_cast<Element>(0.f * stats.row_sum);
      }
      *reinterpret_cast<Vector*>(args.out.row<Element>(sequence, query, q_head) + at % kVectors * kWide) = vector;
      if (at % kVectors == 0) write_lse<Traits>(args, sequence, q_head, query, stats);
    }
}

}  // namespace kvgen
