// The lengths of a call's sequences: how they are checked, and the calls that change nothing else.
#pragma once

#include <algorithm>

#include "kvgen/calls.hpp"

namespace kvgen {

// Lengths are int32, so a larger limit would let them wrap around.
inline int to_int(const char* function, const char* name, int64_t value) {
  if (value > INT32_MAX) ffi::fail("ValueError", "%s: %s is %lld, more than 2^31 - 1", function, name, (long long)value);
  return static_cast<int>(value);
}

inline int64_t longest(const int32_t* lengths, int64_t batch) {
  int64_t most = 0;
  for (int64_t b = 0; b < batch; ++b) most = std::max<int64_t>(most, lengths[b]);
  return most;
}

inline void check_length(int64_t b, int64_t length) {
  if (length < 0) ffi::fail("ValueError", "sequence %lld has a negative length", (long long)b);
}

[[noreturn]] inline void refuse_overflow(const char* function, int64_t b, int64_t tokens, int64_t limit) {
  ffi::fail("ValueError", "%s: sequence %lld would have %lld tokens, more than the limit of %lld", function, (long long)b,
            (long long)tokens, (long long)limit);
}

inline void check_limit(const char* function, int64_t b, int64_t length, int64_t more, int64_t limit) {
  if (more > limit - length) refuse_overflow(function, b, length + more, limit);
}

// An empty sequence stays empty, unless it has tokens of its own count.
inline void advance(const ffi::Advance& call) {
  const int64_t batch = call.lengths.size[0];
  int32_t* lengths = call.lengths.as<int32_t>();
  const int32_t* counts = call.counts.as<int32_t>();
  const int limit = to_int("advance", "limit", call.limit), tokens = to_int("advance", "tokens", call.tokens);
  const auto more = [&](int64_t b) { return counts ? counts[b] : lengths[b] > 0 ? tokens : 0; };
  for (int64_t b = 0; b < batch; ++b) {
    check_length(b, lengths[b]);
    if (more(b) < 0) ffi::fail("ValueError", "advance: counts[%lld] is %d, must be at least 0", (long long)b, more(b));
    check_limit("advance", b, lengths[b], more(b), limit);
  }
  for (int64_t b = 0; b < batch; ++b) lengths[b] += more(b);
}

// Between two crops lengths only grow, so the length that a crop finds is the longest since the last one. `most` is the largest rollback
// that the residual has rows for.
inline void crop(const ffi::Crop& call, int64_t most) {
  if (call.rollback > most)
    ffi::fail("ValueError", "crop: rollback is %lld, this kernel keeps tokens for %lld", (long long)call.rollback, (long long)most);
  const int64_t batch = call.lengths.size[0];
  int32_t *lengths = call.lengths.as<int32_t>(), *least = call.least.as<int32_t>();
  const int32_t* counts = call.counts.as<int32_t>();
  const auto fewer = [&](int64_t b) { return counts ? counts[b] : lengths[b] > 0 ? call.tokens : 0; };
  const auto floor = [&](int64_t b) { return std::max<int64_t>(least[b], lengths[b] - call.rollback); };
  for (int64_t b = 0; b < batch; ++b) {
    check_length(b, lengths[b]);
    if (least[b] < 0) ffi::fail("ValueError", "crop: least[%lld] is %d, must be at least 0", (long long)b, least[b]);
    if (fewer(b) < 0 || fewer(b) > lengths[b] - floor(b))
      ffi::fail("ValueError", "crop: sequence %lld has %d tokens, of which %lld can be taken back, not %lld", (long long)b, lengths[b],
                (long long)(lengths[b] - floor(b)), (long long)fewer(b));
  }
  for (int64_t b = 0; b < batch; ++b) {
    least[b] = static_cast<int32_t>(floor(b));
    lengths[b] -= static_cast<int32_t>(fewer(b));
  }
}

}  // namespace kvgen
