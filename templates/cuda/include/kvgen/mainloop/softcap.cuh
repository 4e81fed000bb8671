// Softcapping: a score s becomes cap * tanh(s / cap), as in Gemma 2.
#pragma once
#include "kvgen/mainloop/score_modifier.cuh"

namespace kvgen {

// `Modifier::kCap` is the cap as a float.
template <class Modifier>
struct Softcap {
  static constexpr bool kActive = true;
  static constexpr float kLargeCap = 256.f;

  // tanh(y) = 1 - 2 / (1 + 2^(2 y log2 e)). With x = s log2 e the exponent is 2 x / cap. tanh.approx.f32, whose relative error is 2^-11,
  // would be too coarse for caps of 30 and more. The error of this form is the same for all scores and grows with the cap, so small scores
  // under a large cap take the series of tanh, whose error is relative.
  __device__ static float apply(float x, const ScorePlace&) {
    constexpr float kExponent = 2.f / Modifier::kCap, kLimit = Modifier::kCap * 1.4426950408889634f;
    if constexpr (Modifier::kCap >= kLargeCap) {
      const float y = x / kLimit, z = y * y;
      const float series = fmaf(z, fmaf(z, fmaf(z, -17.f / 315.f, 2.f / 15.f), -1.f / 3.f), 1.f);
      if (fabsf(y) < 0.25f) return x * series;
    }
    return fmaf(-2.f * kLimit, __fdividef(1.f, 1.f + ptx::exp2(x * kExponent)), kLimit);
  }
};

}  // namespace kvgen
