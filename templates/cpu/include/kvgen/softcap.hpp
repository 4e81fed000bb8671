// Softcapping: a score s becomes cap * tanh(s / cap), as in Gemma 2.
#pragma once

#include "kvgen/score_modifier.hpp"

namespace kvgen {

// `Modifier::kCap` is the cap as a float.
template <class Modifier>
struct Softcap {
  static constexpr bool active = true;
  static constexpr float limit = Modifier::kCap * kLog2e;

  static F32 apply(F32 x, const ScorePlace&) { return tanh(x * (1.0f / limit)) * limit; }
};

}  // namespace kvgen
