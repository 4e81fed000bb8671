// Vectors in GCC's extensions: of the machine's registers, and pairs of halves where a vector is wider than one; vectors of 16 lanes:
// element types, functions, transposition.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace kvgen {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)  // AVX alone has no integers of 32 bytes
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

template <class T, int N, bool wide = (sizeof(T) * N > kRegisterBytes)>
struct LanesOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};

// A vector of N elements.
template <class T, int N>
using Lanes = typename LanesOf<T, N>::type;

// A vector wider than a register. GCC keeps vectors of its own that are wider in memory; the halves of this one stay in registers.
template <class T, int N>
struct Halves {
  using Half = Lanes<T, N / 2>;
  Half low, high;

  T operator[](int i) const { return i < N / 2 ? low[i] : high[i - N / 2]; }
};

template <class T, int N>
struct LanesOf<T, N, true> {
  using type = Halves<T, N>;
};

template <class V>
struct IsHalved : std::false_type {};
template <class T, int N>
struct IsHalved<Halves<T, N>> : std::true_type {};
template <class V>
constexpr bool halved = IsHalved<V>::value;

template <class V>
using ElementOf = std::decay_t<decltype(std::declval<const V&>()[0])>;
template <class V>
constexpr int lanes_of = sizeof(V) / sizeof(ElementOf<V>);

#define KVGEN_INLINE inline __attribute__((always_inline))

// The vector of both halves: one register where they fit.
template <class V>
KVGEN_INLINE auto join(V low, V high) {
  using Both = Lanes<ElementOf<V>, 2 * lanes_of<V>>;
  Both both;
  if constexpr (halved<Both>) {
    both = {low, high};
  } else {
    std::memcpy(&both, &low, sizeof(V));
    std::memcpy(reinterpret_cast<char*>(&both) + sizeof(V), &high, sizeof(V));
  }
  return both;
}

// The upper or lower half of a vector. A scalar stands for every element, so it is returned as it is.
template <bool upper, class X>
KVGEN_INLINE auto half_of(const X& x) {
  if constexpr (!halved<X>)
    return x;
  else if constexpr (upper)
    return x.high;
  else
    return x.low;
}

#define KVGEN_LANEWISE(op)                                               \
  template <class T, int N, class B>                                     \
  KVGEN_INLINE auto operator op(const Halves<T, N>& a, const B& b) {     \
    return join(a.low op half_of<false>(b), a.high op half_of<true>(b)); \
  }                                                                      \
  template <class T, int N>                                              \
  KVGEN_INLINE auto operator op(T a, const Halves<T, N>& b) {            \
    return join(a op b.low, a op b.high);                                \
  }
#define KVGEN_UPDATE(op)                                                    \
  KVGEN_LANEWISE(op)                                                        \
  template <class T, int N, class B>                                        \
  KVGEN_INLINE Halves<T, N>& operator op##=(Halves<T, N>& a, const B & b) { \
    return a = a op b;                                                      \
  }
KVGEN_UPDATE(+)
KVGEN_UPDATE(-)
KVGEN_UPDATE(*)
KVGEN_UPDATE(/)
KVGEN_UPDATE(&)
KVGEN_UPDATE(|)
KVGEN_UPDATE(^)
KVGEN_UPDATE(<<)
KVGEN_UPDATE(>>)
KVGEN_LANEWISE(<)
KVGEN_LANEWISE(>)
KVGEN_LANEWISE(>=)
KVGEN_LANEWISE(==)
#undef KVGEN_UPDATE
#undef KVGEN_LANEWISE

template <class T, int N>
KVGEN_INLINE Halves<T, N> operator-(const Halves<T, N>& a) {
  return {-a.low, -a.high};
}

template <class V>
KVGEN_INLINE V load(const void* from) {
  V v;
  if constexpr (halved<V>)
    v = {load<typename V::Half>(from), load<typename V::Half>(static_cast<const char*>(from) + sizeof(V) / 2)};
  else
    std::memcpy(&v, from, sizeof(v));
  return v;
}

template <class V>
KVGEN_INLINE void store(void* to, V v) {
  if constexpr (halved<V>) {
    store(to, v.low);
    store(static_cast<char*>(to) + sizeof(V) / 2, v.high);
  } else {
    std::memcpy(to, &v, sizeof(v));
  }
}

// x in every lane; subtracting zero changes no number, and GCC leaves it out.
template <class V>
KVGEN_INLINE V splat(ElementOf<V> x) {
  return x - V{};
}

template <class V, class F, int... i>
KVGEN_INLINE V lanes_from(F f, std::integer_sequence<int, i...>) {
  return V{f(i)...};
}

// A vector of integers: f(i) in lane i.
template <class V, class F>
KVGEN_INLINE V lanes_from(F f) {
  if constexpr (halved<V>)
    return {lanes_from<typename V::Half>(f), lanes_from<typename V::Half>([f](int i) { return f(i + lanes_of<V> / 2); })};
  else
    return lanes_from<V>(f, std::make_integer_sequence<int, lanes_of<V>>{});
}

// Lanes of `a` where the mask is set, else of `b`.
template <class Mask, class V>
KVGEN_INLINE V select(const Mask& mask, const V& a, const V& b) {
  if constexpr (halved<V>)
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else
    return mask ? a : b;
}

// One expression for GCC, which finds the instruction for it.
template <class V>
KVGEN_INLINE V max(const V& a, const V& b) {
  if constexpr (halved<V>)
    return {max(a.low, b.low), max(a.high, b.high)};
  else
    return a > b ? a : b;
}

// The bits of a vector as lanes of another type of the same size.
template <class To, class V>
KVGEN_INLINE To as(const V& v) {
  if constexpr (halved<V>)
    return {as<typename To::Half>(v.low), as<typename To::Half>(v.high)};
  else
    return (To)v;
}

// The numbers of a vector in another type.
template <class T, class V>
KVGEN_INLINE auto convert(const V& v) {
  if constexpr (halved<V>)
    return join(convert<T>(v.low), convert<T>(v.high));
  else
    return __builtin_convertvector(v, Lanes<T, lanes_of<V>>);
}

// `f` of all lanes, which joins two numbers or vectors: lanes i and i + N / 2 first, then those of the half that remains.
template <class V, class F>
KVGEN_INLINE ElementOf<V> fold(V v, F f) {
  if constexpr (halved<V>) {
    return fold(f(v.low, v.high), f);
  } else {
    constexpr int N = lanes_of<V>;
#pragma GCC unroll 4
    for (int s = N / 2; s > 1; s /= 2) v = f(v, __builtin_shuffle(v, lanes_from<Lanes<int32_t, N>>([s](int i) { return i ^ s; })));
    return f(v[0], v[1]);
  }
}

template <class V>
KVGEN_INLINE auto sum(V v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}

template <class V>
KVGEN_INLINE auto largest_lane(V v) {
  return fold(v, [](auto a, auto b) { return max(a, b); });
}

// Swaps the upper half of every 2 * S lanes of `a` with the lower half of those of `b`.
template <int S, class V>
KVGEN_INLINE void swap_halves(V& a, V& b) {
  if constexpr (halved<V>) {
    if constexpr (S == lanes_of<V> / 2) {
      std::swap(a.high, b.low);
    } else {
      swap_halves<S>(a.low, b.low);
      swap_halves<S>(a.high, b.high);
    }
  } else {
    constexpr int N = lanes_of<V>;
    using I = Lanes<int32_t, N>;
    const V low = __builtin_shuffle(a, b, lanes_from<I>([](int i) { return i & S ? i - S + N : i; }));
    b = __builtin_shuffle(a, b, lanes_from<I>([](int i) { return i & S ? i + N : i + S; }));
    a = low;
  }
}

// --- vectors of 16 lanes ---------------------------------------------------------------------------------------------

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
  if constexpr (sizeof(T) == 1) {
    uint32_t bytes[N];
    for (int i = 0; i < N; ++i) bytes[i] = static_cast<const uint8_t*>(from)[i];
    return T::floats(load<Lanes<uint32_t, N>>(bytes));
  } else if constexpr (sizeof(T) == 4)
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
