// The score modifier seam: it changes scores before the mask is applied.
//
// A modifier is a type with
//   active            whether it changes scores
//   apply(x, place)   the new scores of 16 neighbouring tokens. x is scale * q.k in units of log2 e, and so is the result
#pragma once

#include "kvgen/simd.hpp"

namespace kvgen {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// The query head, query and tokens that scores belong to.
struct ScorePlace {
  int q_head;
  int64_t position;  // of the query
  int64_t token;     // position of the first of the 16 keys
};

struct NoModifier {
  static constexpr bool active = false;
};

}  // namespace kvgen
