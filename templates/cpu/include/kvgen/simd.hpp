// Vectors of 16 lanes: element types, functions, transposition.
#pragma once

#include <limits>

#include "kvgen/vector.hpp"

namespace kvgen {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 16;

using F32 = Lanes<float, kLanes>;
using I32 = Lanes<int32_t, kLanes>;
using U32 = Lanes<uint32_t, kLanes>;

// The locality of a prefetch into the second-level cache, whose own prefetches then run ahead; the first level holds the tile that is
// worked on.
constexpr int kSecondLevel = 2;

// --- element types ---------------------------------------------------------------------------------------------------

struct Half {
  uint16_t bits;
};

struct Bfloat {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(Half x) {
  _Float16 h;
  std::memcpy(&h, &x, sizeof(h));
  return static_cast<float>(h);
}

inline float to_float(Bfloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline Half from_float<Half>(float x) {
  const auto h = static_cast<_Float16>(x);
  Half r;
  std::memcpy(&r, &h, sizeof(r));
  return r;
}

template <>
inline Bfloat from_float<Bfloat>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Elements of 16 bits as floats, which fit a register.
template <class T, int N>
KVGEN_INLINE auto widen(const Lanes<uint16_t, N>& v) {
  using F = Lanes<float, N>;
  if constexpr (std::is_same_v<T, Bfloat>) return (F)(__builtin_convertvector(v, Lanes<uint32_t, N>) << 16);
#ifdef __AVX512F__
  if constexpr (N == 16) return (F)_mm512_cvtph_ps((__m256i)v);
#endif
#ifdef __F16C__
  if constexpr (N == 8) return (F)_mm256_cvtph_ps((__m128i)v);
#endif
  F r;
  for (int i = 0; i < N; ++i) r[i] = to_float(Half{v[i]});
  return r;
}

// The elements in the lower halves of lanes as floats.
template <class T, class U>
KVGEN_INLINE auto widen_low(const U& lanes) {
  if constexpr (halved<U>)
    return join(widen_low<T>(lanes.low), widen_low<T>(lanes.high));
  else
    return widen<T, lanes_of<U>>(convert<uint16_t>(lanes));
}

// Neighbours in memory as floats.
template <class T, class F = F32>
KVGEN_INLINE F load_floats(const void* from) {
  constexpr int N = lanes_of<F>;
  if constexpr (sizeof(T) == 4)
    return load<F>(from);
  else if constexpr (halved<F>)
    return {load_floats<T, typename F::Half>(from), load_floats<T, typename F::Half>(static_cast<const T*>(from) + N / 2)};
  else
    return widen<T, N>(load<Lanes<uint16_t, N>>(from));
}

template <class T>
inline void store_floats(void* to, F32 v) {
  T out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = from_float<T>(v[i]);
  std::memcpy(to, out, sizeof(out));
}

// --- functions -------------------------------------------------------------------------------------------------------

// Nearest integer, ties to even; right for |x| < 2^22.
inline F32 round_even(F32 x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23
  return (x + magic) - magic;
}

// 2^x within 3 units in the last place, for x <= 127; 0 below -126. NaN stays NaN: `max` returns its second operand where either is one.
KVGEN_INLINE F32 exp2(F32 x) {
  const F32 bounded = max(splat<F32>(-126.0f), x);
  const F32 n = round_even(bounded);
  const F32 f = bounded - n;
  F32 p = splat<F32>(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const F32 power = as<F32>((convert<int32_t>(n) + 127) << 23);
  return select(x < -126.0f, F32{}, p * power);
}

KVGEN_INLINE F32 tanh(F32 x) {
  constexpr float two_log2e = 2.8853901f;
  const F32 bounded = max(splat<F32>(-40.0f), select(x > 40.0f, splat<F32>(40.0f), x));
  const F32 wide = 1.0f - 2.0f / (exp2(bounded * two_log2e) + 1.0f);
  const F32 y = x * x;  // the series where the quotient would cancel
  const F32 small = x * (1.0f + y * (-0.33333333f + y * (0.13333333f + y * (-0.053968254f + y * 0.021869489f))));
  return select(y < 0.0625f, small, wide);
}

// Transposes a 16 x 16 tile in place.
template <int S = 8>
inline void transpose(F32 (&row)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) swap_halves<S>(row[i], row[i + S]);
  if constexpr (S > 1) transpose<S / 2>(row);
}

}  // namespace kvgen
