// Writes the output of a row: its accumulator divided by row_sum, and the log-sum-exp.
#pragma once
#include "kvgen/epilogue/sinks.cuh"

namespace kvgen {

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
  if (args.lse && channel == 0) {
    const int64_t at = (static_cast<int64_t>(head.sequence) * args.cache.kv_heads * Traits::kGroup + q_head) * args.q_len + query;
    args.lse[at] = total.row_sum == 0.f ? -INFINITY : (total.row_max + log2f(total.row_sum)) * 0.6931471805599453f;
  }
}

// Writes the output of a sequence without tokens: zeros, and a log-sum-exp of -inf or the sink. All threads of the CTA call it.
template <class Traits>
__device__ __noinline__ void write_empty(const AttendArgs& args, int sequence) {
  const float zero[] = {0.f};
  for (int head = 0; head < args.cache.kv_heads; ++head)
    for (int at = threadIdx.x; at < Traits::kHeadQRows * Traits::kHeadDim; at += Traits::kThreads) {
      const int row = at / Traits::kHeadDim;
      const auto sink = Traits::Sinks::template load<Traits>(args, Head{sequence, head}, row);
      write_output<Traits>(args, Head{sequence, head}, row, at % Traits::kHeadDim, 1, zero, RowStats{}, sink);
    }
}

}  // namespace kvgen
