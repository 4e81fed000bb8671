// Softcapping: a score s becomes cap * tanh(s / cap), as in Gemma 2.
#pragma once
#include "kvgen/mainloop/score_modifier.cuh"

namespace kvgen {

// `Cap::kValue` is the cap as a float.
template <class Cap>
struct Softcap {
  static constexpr bool kActive = true;

  // tanh(y) = 1 - 2 / (1 + 2^(2 y log2 e)). With x = s log2 e the exponent is 2 x / cap. tanh.approx.f32, whose relative error is 2^-11,
  // would be too coarse for caps of 30 and more.
  __device__ static float apply(float x, const ScorePlace&) {
    constexpr float kExponent = 2.f / Cap::kValue, kLimit = Cap::kValue * 1.4426950408889634f;
    return fmaf(-2.f * kLimit, __fdividef(1.f, 1.f + ptx::exp2(x * kExponent)), kLimit);
  }
};

}  // namespace kvgen
