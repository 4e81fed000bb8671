// Vectors of 16 lanes in GCC's vector extensions: one AVX-512 register, two of AVX2, four of SSE2. GCC keeps vectors wider than
// a register in memory, so the hottest loops work on parts that fit one.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace kvgen {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kRegisters = kLanes / kRegisterLanes;

// Vectors of N lanes.
template <int N>
struct Vec {
  typedef float F __attribute__((vector_size(4 * N)));
  typedef int32_t I __attribute__((vector_size(4 * N)));
  typedef uint32_t U __attribute__((vector_size(4 * N)));
  typedef uint16_t H __attribute__((vector_size(2 * N)));
  typedef int16_t S __attribute__((vector_size(2 * N)));
};

using F32 = Vec<kLanes>::F;
using I32 = Vec<kLanes>::I;
using U32 = Vec<kLanes>::U;
using U16 = Vec<kLanes>::H;
using Register = Vec<kRegisterLanes>;

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <class V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof(v));
}

// The locality of a prefetch into the second-level cache, whose own prefetches then run ahead; the first level holds what is worked on.
constexpr int kSecondLevel = 2;

// x in every lane; subtracting zero changes no number, and GCC leaves it out.
template <int N>
inline typename Vec<N>::F spread(float x) {
  return x - typename Vec<N>::F{};
}

inline F32 splat(float x) { return spread<kLanes>(x); }

template <class V>
inline V max(V a, V b) {
  return a > b ? a : b;
}

// Lane i of the result is lane i ^ S.
template <int S, class V>
inline V swap(V v) {
  return __builtin_shuffle(
      v, I32{0 ^ S, 1 ^ S, 2 ^ S, 3 ^ S, 4 ^ S, 5 ^ S, 6 ^ S, 7 ^ S, 8 ^ S, 9 ^ S, 10 ^ S, 11 ^ S, 12 ^ S, 13 ^ S, 14 ^ S, 15 ^ S});
}

// The sum of all lanes.
template <class V>
inline auto sum(V v) {
  v += swap<8>(v);
  v += swap<4>(v);
  v += swap<2>(v);
  return v[0] + v[1];
}

// The largest lane.
template <class V>
inline auto max(V v) {
  v = max(v, swap<8>(v));
  v = max(v, swap<4>(v));
  v = max(v, swap<2>(v));
  return v[0] > v[1] ? v[0] : v[1];
}

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

// Elements of 16 bits, one per lane, as floats.
template <class T, int N>
inline typename Vec<N>::F widen(typename Vec<N>::H v) {
  if constexpr (std::is_same_v<T, Bfloat>) {
    return (typename Vec<N>::F)(__builtin_convertvector(v, typename Vec<N>::U) << 16);
  } else {
#ifdef __AVX512F__
    if constexpr (N == 16) return (F32)_mm512_cvtph_ps((__m256i)v);
#endif
#ifdef __F16C__
    if constexpr (N == 8) return (Vec<8>::F)_mm256_cvtph_ps((__m128i)v);
#endif
    typename Vec<N>::F r;
    for (int i = 0; i < N; ++i) r[i] = to_float(Half{v[i]});
    return r;
  }
}

// 16 neighbours in memory as floats.
template <class T>
inline F32 load_floats(const void* from) {
  if constexpr (sizeof(T) == 4) return load<F32>(from);
  F32 all;
  for (int p = 0; p < kRegisters; ++p) {
    const typename Register::F reg =
        widen<T, kRegisterLanes>(load<typename Register::H>(static_cast<const char*>(from) + p * sizeof(typename Register::H)));
    std::memcpy(reinterpret_cast<char*>(&all) + p * sizeof(reg), &reg, sizeof(reg));
  }
  return all;
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

// 2^x to about one unit in the last place, for x <= 127; 0 below -126, NaN for NaN (which `max` keeps as its second operand only).
inline F32 exp2(F32 x) {
  const F32 bounded = max(splat(-126.0f), x);
  const F32 n = round_even(bounded);
  const F32 f = bounded - n;
  F32 p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const F32 power = (F32)((__builtin_convertvector(n, I32) + 127) << 23);
  return x < -126.0f ? F32{} : p * power;
}

inline F32 tanh(F32 x) {
  constexpr float two_log2e = 2.8853901f;
  const F32 bounded = max(splat(-40.0f), x > 40.0f ? splat(40.0f) : x);
  const F32 wide = 1.0f - 2.0f / (exp2(bounded * two_log2e) + 1.0f);
  const F32 y = x * x;  // the series where the quotient would cancel
  const F32 small = x * (1.0f + y * (-0.33333333f + y * (0.13333333f + y * (-0.053968254f + y * 0.021869489f))));
  return y < 0.0625f ? small : wide;
}

// Transposes a 16 x 16 tile in place.
template <int S = 8>
inline void transpose(F32 (&row)[kLanes]) {
  constexpr auto low = [](int lane) { return lane & S ? lane - S + kLanes : lane; };
  constexpr auto high = [](int lane) { return lane & S ? lane + kLanes : lane + S; };
  const I32 take_low = {low(0), low(1), low(2),  low(3),  low(4),  low(5),  low(6),  low(7),
                        low(8), low(9), low(10), low(11), low(12), low(13), low(14), low(15)};
  const I32 take_high = {high(0), high(1), high(2),  high(3),  high(4),  high(5),  high(6),  high(7),
                         high(8), high(9), high(10), high(11), high(12), high(13), high(14), high(15)};
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const F32 a = row[i], b = row[i + S];
    row[i] = __builtin_shuffle(a, b, take_low);
    row[i + S] = __builtin_shuffle(a, b, take_high);
  }
  if constexpr (S > 1) transpose<S / 2>(row);
}

}  // namespace kvgen
