// Vectors in GCC's extensions: of the machine's registers, and pairs of halves where a vector is wider than one.
#pragma once

#include <cstdint>
#include <cstring>
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

// The vector whose halves have type V.
template <class V>
using Joined = Halves<ElementOf<V>, 2 * lanes_of<V>>;

#define KVGEN_INLINE inline __attribute__((always_inline))

template <class V>
KVGEN_INLINE Joined<V> join(V low, V high) {
  return {low, high};
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

}  // namespace kvgen
