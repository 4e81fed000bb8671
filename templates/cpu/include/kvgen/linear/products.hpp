// Products of a block of rows of x with some tiles of a weight: floats; integers of 16 bits with AVX-512 VNNI; the same with AMX.
#pragma once

#include "kvgen/linear/activations.hpp"

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvgen::linear {

enum class Dot { fp32, int16 };

#if defined(__AVX512VNNI__)
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif

// A block of rows of x, as `put` of floats or bytes wrote it.
struct Rows {
  const char* numbers;
  const float* notes;
  int height;
};

// total[m][t] += x[m] . W[tile t] over all k, for M rows and T tiles.
template <class C, int M, int T>
KVGEN_INLINE void multiply_floats(Stream<C> weight, const Rows& x, F32 (&total)[M][T]) {
  using L = Layout<C>;
  using Code = typename L::Code;
  const float* at = reinterpret_cast<const float*>(x.numbers);
  for (int u = 0; u < L::units; ++u, weight.next()) {
    F32 sums[M][T] = {};
    for (int r = 0; r < L::runs; ++r, at += M * kRun) {
      for (int w = 0; w < kRun / Code::per_word; ++w) {
        U32 word[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          word[t] = load<U32>(weight.codes(r, t) + w * 64);
          if (C::prefetch) __builtin_prefetch(weight.codes(r + C::prefetch, t) + w * 64, 0, kSecondLevel);
        }
#pragma GCC unroll 8
        for (int i = 0; i < Code::per_word; ++i) {
          F32 code[T];
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) code[t] = Code::code(word[t], i);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const F32 b = splat<F32>(at[m * kRun + w * Code::per_word + i]);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sums[m][t] += code[t] * b;
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F32 scale = L::row ? splat<F32>(1.0f) : weight.scale(t);
      const F32 zero = C::zero ? convert<float>(weight.zero(t)) - Code::middle : F32{};
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        if (C::zero) sums[m][t] -= zero * x.notes[u * M + m];
        total[m][t] += sums[m][t] * scale;
      }
    }
  }
}

// The sum of a unit's two parts, as a float that its row's step and the weight's scale have to multiply.
template <class C>
KVGEN_INLINE F32 joined(U32 lower, U32 upper, I32 zero, int32_t total) {
  U32 both = lower + (upper << 8);  // parts may exceed 32 bits where their sum does not
  if (C::zero)
    both -= as<U32>(zero) * static_cast<uint32_t>(total);
  else
    both -= static_cast<uint32_t>(Layout<C>::Code::middle) * static_cast<uint32_t>(total);
  return convert<float>(as<I32>(both));
}

#ifdef __AVX512VNNI__
template <class C, int M, int T>
KVGEN_INLINE void multiply_bytes(Stream<C> weight, const Rows& x, F32 (&total)[M][T]) {
  using L = Layout<C>;
  using Code = typename L::Code;
  constexpr int steps = Code::per_word / 4;
  const char* at = x.numbers;
  const int32_t* totals = reinterpret_cast<const int32_t*>(x.notes + L::units * M);
  for (int u = 0; u < L::units; ++u, weight.next()) {
    U32 sums[2][M][T] = {};
    for (int r = 0; r < L::runs; ++r, at += 2 * M * kRun) {
#pragma GCC unroll 4
      for (int w = 0; w < kRun / Code::per_word; ++w) {
        U32 word[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          word[t] = load<U32>(weight.codes(r, t) + w * 64);
          if (C::prefetch) __builtin_prefetch(weight.codes(r + C::prefetch, t) + w * 64, 0, kSecondLevel);
        }
#pragma GCC unroll 8
        for (int j = 0; j < steps; ++j) {
          U32 code[T];
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) code[t] = C::bits == 8 ? word[t] : Code::integers_of(word[t], j);
#pragma GCC unroll 8
          for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
              const U32 b = splat<U32>(load<uint32_t>(at + (part * M + m) * kRun + (w * steps + j) * 4));
#pragma GCC unroll 8
              for (int t = 0; t < T; ++t)
                sums[part][m][t] = (U32)_mm512_dpbusd_epi32((__m512i)sums[part][m][t], (__m512i)code[t], (__m512i)b);
            }
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F32 scale = L::row ? splat<F32>(1.0f) : weight.scale(t);
      const I32 zero = C::zero ? weight.zero(t) : I32{};
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        total[m][t] += joined<C>(sums[0][m][t], sums[1][m][t], zero, totals[u * M + m]) * (scale * x.notes[u * M + m]);
    }
  }
}
#endif

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
// Linux lets a process use the tiles once it has asked; then all of its threads may.
inline bool amx_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
  return allowed;
}

constexpr int kAmxRows = 16;

// The tiles of a thread: 0 to 3 are sums [rows, 16] of two tiles of the weight, lower and upper part, 4 and 5 the parts of x
// [rows, 64 bytes], 6 and 7 codes [16, 16 rows of 4 bytes].
class AmxTiles {
 public:
  explicit AmxTiles(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
    _tile_loadconfig(&config);
  }
  ~AmxTiles() { _tile_release(); }
};

// As multiply_bytes, for up to 16 rows.
template <class C, int T>
KVGEN_INLINE void multiply_tiles(Stream<C> weight, const Rows& x, F32 (*total)[T]) {
  using L = Layout<C>;
  using Code = typename L::Code;
  constexpr int pair = T < 2 ? 1 : 2;
  const int M = x.height;
  const char* at = x.numbers;
  const int32_t* totals = reinterpret_cast<const int32_t*>(x.notes + L::units * M);
  alignas(64) uint8_t bytes[pair][kRun * kLanes];
  alignas(64) int32_t sums[2 * pair][kAmxRows][kLanes];
  for (int u = 0; u < L::units; ++u, weight.next(), at += L::runs * 2 * M * kRun) {
#pragma GCC unroll 4
    for (int t0 = 0; t0 < T; t0 += pair) {
      _tile_zero(0);
      _tile_zero(1);
      if (pair > 1) {
        _tile_zero(2);
        _tile_zero(3);
      }
#pragma GCC unroll 2
      for (int r = 0; r < L::runs; ++r) {
        const uint8_t* codes[pair];
        for (int t = 0; t < pair; ++t) {
          codes[t] = weight.codes(r, t0 + t);
          if (C::prefetch)
            for (int i = 0; i < L::run_bytes; i += 64)
              __builtin_prefetch(weight.codes(r + C::prefetch, t0 + t) + i, 0, kSecondLevel);
          if constexpr (C::bits == 4) {
#pragma GCC unroll 8
            for (int w = 0; w < kRun / Code::per_word; ++w) {
              const U32 word = load<U32>(codes[t] + w * 64);
              store(bytes[t] + w * 128, Code::integers_of(word, 0));
              store(bytes[t] + w * 128 + 64, Code::integers_of(word, 1));
            }
            codes[t] = bytes[t];
          }
        }
        const char* run = at + r * 2 * M * kRun;
        _tile_loadd(4, run, kRun);
        _tile_loadd(5, run + M * kRun, kRun);
        _tile_loadd(6, codes[0], 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 5, 6);
        if constexpr (pair > 1) {
          _tile_loadd(7, codes[pair - 1], 64);
          _tile_dpbsud(2, 4, 7);
          _tile_dpbsud(3, 5, 7);
        }
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      if constexpr (pair > 1) {
        _tile_stored(2, sums[2 * pair - 2], 64);
        _tile_stored(3, sums[2 * pair - 1], 64);
      }
      for (int t = 0; t < pair; ++t) {
        const F32 scale = L::row ? splat<F32>(1.0f) : weight.scale(t0 + t);
        const I32 zero = C::zero ? weight.zero(t0 + t) : I32{};
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const F32 part = joined<C>(load<U32>(sums[2 * t][m]), load<U32>(sums[2 * t + 1][m]), zero, totals[u * M + m]);
          total[m][t0 + t] += part * (scale * x.notes[u * M + m]);
        }
      }
    }
  }
}
#endif

}  // namespace kvgen::linear
