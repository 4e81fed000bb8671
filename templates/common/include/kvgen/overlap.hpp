// Whether tensors share memory: a call must not write to bytes that it reads, nor write to bytes twice.
#pragma once

#include <algorithm>
#include <vector>

#include "kvgen/ffi.hpp"

namespace kvgen::ffi {

// Bytes [begin, end) from the first to the last of a tensor. Strides are not negative, since torch has no such tensors.
struct Span {
  uintptr_t begin = 0, end = 0;
};

template <int N>
inline Span span_of(const View<N>& view, int64_t item) {
  int64_t last = 0;
  for (int d = 0; d < N; ++d) {
    if (view.size[d] == 0) return {};
    last += (view.size[d] - 1) * view.stride[d];
  }
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  return {begin, begin + static_cast<uintptr_t>((last + 1) * item)};
}

inline bool meet(const Span& a, const Span& b) { return a.begin < b.end && b.begin < a.end; }

template <int N>
inline bool dense(const View<N>& view) {
  int64_t run = 1;
  for (int d = N - 1; d >= 0; run *= view.size[d--])
    if (view.size[d] > 1 && view.stride[d] != run) return false;
  return true;
}

// Appends the runs of a tensor, whose last dimension is contiguous.
template <int N>
inline void add_runs(const View<N>& view, int64_t item, std::vector<Span>& runs) {
  int64_t rows = 1;
  for (int d = 0; d < N - 1; ++d) rows *= view.size[d];
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = 0, rest = row;
    for (int d = N - 2; d >= 0; rest /= view.size[d--]) at += rest % view.size[d] * view.stride[d];
    const auto begin = reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(at * item);
    runs.push_back({begin, begin + static_cast<uintptr_t>(view.size[N - 1] * item)});
  }
}

// Whether two of the runs meet. Sorts them.
inline bool any_meet(std::vector<Span>& runs) {
  std::sort(runs.begin(), runs.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < runs.size(); ++i)
    if (runs[i].begin < runs[i - 1].end) return true;
  return false;
}

// Raises where elements of a tensor that a call writes share memory, as those of an expanded one do (its stride is 0).
template <int N>
inline void check_once(const char* function, const char* name, const View<N>& written, int64_t item) {
  const Span span = span_of(written, item);
  if (span.begin == span.end || dense(written)) return;
  std::vector<Span> runs;
  add_runs(written, item, runs);
  if (any_meet(runs)) fail("ValueError", "%s: %s overlaps with itself", function, name);
}

// Raises where a tensor that a call writes shares memory with another. Their spans are compared, and only if these meet, all rows.
template <int N, int M>
inline void check_apart(const char* function, const char* name, const View<N>& written, int64_t item, const char* other_name,
                        const View<M>& other, int64_t other_item) {
  if (!other || !meet(span_of(written, item), span_of(other, other_item))) return;
  std::vector<Span> runs, others;
  add_runs(written, item, runs);
  add_runs(other, other_item, others);
  std::sort(runs.begin(), runs.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (const Span& run : others) {
    const auto after = std::lower_bound(runs.begin(), runs.end(), run.end, [](const Span& a, uintptr_t end) { return a.begin < end; });
    if (after != runs.begin() && run.begin < (after - 1)->end) fail("ValueError", "%s: %s overlaps with %s", function, name, other_name);
  }
}

}  // namespace kvgen::ffi
