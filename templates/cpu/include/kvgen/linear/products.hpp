// Products of a block of rows of x with some tiles of a weight: floats; integers of 16 bits with AVX-512 VNNI; parts of bfloat16 with AMX.
#pragma once

#include "kvgen/linear/activations.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BW__)
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

// The rows of x in blocks of `height` rows, as `put` of floats or bytes wrote them.
struct Rows {
  int blocks, height;
  const char* data;
  int64_t notes_at, stride;  // of a block's notes, and of blocks, in bytes

  const char* numbers(int block) const { return data + block * stride; }
  const float* notes(int block) const { return reinterpret_cast<const float*>(numbers(block) + notes_at); }
};

// One word of each row of S tiles, in registers; the memory that holds them some runs later is prefetched.
template <class C, int S>
KVGEN_INLINE void load_words(const Stream<C>& weight, int run, int first, int w, bool prefetch, U32 (&word)[S]) {
#pragma GCC unroll 8
  for (int t = 0; t < S; ++t) {
    word[t] = load<U32>(weight.codes(run, first + t) + w * 64);
    if (C::prefetch > 0 && prefetch) __builtin_prefetch(weight.codes(run + C::prefetch, first + t) + w * 64, 0, kSecondLevel);
  }
}

// total[m][first + t] += x[m] . W[tile t] over unit `u`, for the H rows of a block and S tiles from `first` on.
template <class C, int H, int S, int T>
KVGEN_INLINE void multiply_floats(const Stream<C>& weight, const Rows& x, int block, int u, int first, F32 (*total)[T]) {
  using L = Layout<C>;
  using Code = typename L::Code;
  const float* at = reinterpret_cast<const float*>(x.numbers(block)) + int64_t{u} * L::runs * H * kRun;
  F32 sums[H][S] = {};
  for (int r = 0; r < L::runs; ++r, at += H * kRun) {
    for (int w = 0; w < kRun / Code::per_word; ++w) {
      U32 word[S];
      load_words<C>(weight, r, first, w, block == 0, word);
#pragma GCC unroll 8
      for (int i = 0; i < Code::per_word; ++i) {
        F32 code[S];
#pragma GCC unroll 8
        for (int t = 0; t < S; ++t) code[t] = Code::code(word[t], i);
#pragma GCC unroll 8
        for (int m = 0; m < H; ++m) {
          const F32 b = splat<F32>(at[m * kRun + w * Code::per_word + i]);
#pragma GCC unroll 8
          for (int t = 0; t < S; ++t) sums[m][t] += code[t] * b;
        }
      }
    }
  }
  const float* note = x.notes(block) + u * H;
#pragma GCC unroll 8
  for (int t = 0; t < S; ++t) {
    const F32 scale = weight.unit_scale(first + t);
    const F32 zero = C::zero ? convert<float>(weight.zero(first + t)) - Code::middle : F32{};
#pragma GCC unroll 8
    for (int m = 0; m < H; ++m) {
      if (C::zero) sums[m][t] -= zero * note[m];
      total[m][first + t] += sums[m][t] * scale;
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

// The notes of one unit: of each row of a block the step, and the sum of the integers.
template <class C>
struct Steps {
  const float* step;
  const int32_t* total;

  Steps(const Rows& x, int block, int u)
      : step(x.notes(block) + u * x.height), total(reinterpret_cast<const int32_t*>(step + Layout<C>::units * x.height)) {}
};

#ifdef __AVX512VNNI__
template <class C, int H, int S, int T>
KVGEN_INLINE void multiply_bytes(const Stream<C>& weight, const Rows& x, int block, int u, int first, F32 (*total)[T]) {
  using L = Layout<C>;
  using Code = typename L::Code;
  constexpr int steps = Code::per_word / 4;
  const char* at = x.numbers(block) + int64_t{u} * L::runs * 2 * H * kRun;
  U32 sums[2][H][S] = {};
  for (int r = 0; r < L::runs; ++r, at += 2 * H * kRun) {
#pragma GCC unroll 2
    for (int w = 0; w < kRun / Code::per_word; ++w) {
      U32 word[S];
      load_words<C>(weight, r, first, w, block == 0, word);
#pragma GCC unroll 8
      for (int j = 0; j < steps; ++j) {
        U32 code[S];
#pragma GCC unroll 8
        for (int t = 0; t < S; ++t) code[t] = C::bits == 8 ? word[t] : Code::integers_of(word[t], j);
#pragma GCC unroll 8
        for (int part = 0; part < 2; ++part)
#pragma GCC unroll 8
          for (int m = 0; m < H; ++m) {
            const U32 b = splat<U32>(load<uint32_t>(at + (part * H + m) * kRun + (w * steps + j) * 4));
#pragma GCC unroll 8
            for (int t = 0; t < S; ++t)
              sums[part][m][t] = (U32)_mm512_dpbusd_epi32((__m512i)sums[part][m][t], (__m512i)code[t], (__m512i)b);
          }
      }
    }
  }
  const Steps<C> note(x, block, u);
#pragma GCC unroll 8
  for (int t = 0; t < S; ++t) {
    const F32 scale = weight.unit_scale(first + t);
    const I32 zero = C::zero ? weight.zero(first + t) : I32{};
#pragma GCC unroll 8
    for (int m = 0; m < H; ++m)
      total[m][first + t] += joined<C>(sums[0][m][t], sums[1][m][t], zero, note.total[m]) * (scale * note.step[m]);
  }
}
#endif

#if defined(__AMX_BF16__) && defined(__AVX512BW__)
#define KVGEN_AMX
constexpr int kAmxRows = 16;

// GCC does not see that tile instructions read memory: what was written there before this stays before them.
KVGEN_INLINE void written(const void* at) { asm volatile("" ::"r"(at) : "memory"); }

// Linux lets a process use the tiles once it has asked; then all of its threads may.
inline bool amx_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
  return allowed;
}

// The tile registers of a thread: 0 and 1 are sums [rows, 16] of two tiles of the weight, 4 and 5 parts of x [rows, 32 channels], 6 and 7
// codes [16 pairs of channels, 16 rows of 2].
class AmxRegisters {
 public:
  explicit AmxRegisters(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
    written(&config);
    _tile_loadconfig(&config);
  }
  ~AmxRegisters() { _tile_release(); }
};

// The products over all units and blocks of up to 16 rows. Codes become numbers of bfloat16, which hold them exactly; those of 8 bits are
// two numbers, of the upper and of the lower half. Tile registers exchange data with vectors through memory, which takes long: the codes
// of the next step are expanded before a step, and the sums of the step before are added after it.
template <class C, int T>
class AmxProducts {
  using L = Layout<C>;
  static constexpr int digits = C::bits / 4, parts = Parts<C>::parts, halves = kRun / 32;
  static constexpr int width = T < 2 ? 1 : 2, count = T / width;  // tiles of a step, steps of a unit

 public:
  AmxProducts(const Stream<C>& weight, const Rows& x, F32 (*total)[T]) : x_(x), total_(total) {
    Stream<C> now = weight;
    Item before{now, 0, 0, 0};
    int item = 0;
    expand(now, 0, 0);
    for (int u = 0; u < L::units; ++u) {
      Stream<C> next = now;
      next.next();
      for (int s = 0; s < count; ++s) {
        const int turn = (u * count + s) % 2;
        if (s + 1 < count)
          expand(now, s + 1, 1 - turn);
        else if (u + 1 < L::units)
          expand(next, 0, 1 - turn);
        written(codes_);
        for (int block = 0; block < x.blocks; ++block, ++item) {
          multiply(u, block, turn, item % 2);
          if (item > 0) add(before, 1 - item % 2);
          before = {now, u, s, block};
        }
      }
      now = next;
    }
    add(before, 1 - item % 2);
  }

 private:
  struct Item {
    Stream<C> weight;
    int unit, step, block;
  };

  // A permutation looks at the low 5 bits of 16: shift and look up, no mask; the fifth bit belongs to the next digit.
  static Lanes<uint16_t, 32> table(int digit) {
    Lanes<uint16_t, 32> t{};
    for (int i = 0; i < 32; ++i) {
      const int value = C::bits == 4 ? i % 16 - 8 : digit == 0 ? i % 16 : (i % 16 - 8) * 16;
      t[i] = from_float<Bfloat>(static_cast<float>(value)).bits;
    }
    return t;
  }

  KVGEN_INLINE void expand(const Stream<C>& weight, int step, int turn) {
#pragma GCC unroll 2
    for (int r = 0; r < L::runs; ++r)
#pragma GCC unroll 2
      for (int t = 0; t < width; ++t) {
        const uint8_t* codes = weight.codes(r, step * width + t);
        if (C::prefetch > 0) {
          const uint8_t* later = weight.codes(r + C::prefetch, step * width + t);
#pragma GCC unroll 16
          for (int i = 0; i < L::run_bytes; i += 64) __builtin_prefetch(later + i, 0, kSecondLevel);
        }
#pragma GCC unroll 16
        for (int w = 0; w < L::run_bytes / 64; ++w) {
          const U32 word = load<U32>(codes + w * 64);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const int pair = (w * 4 + j) / digits, digit = j % digits;
            const auto numbers = _mm512_permutexvar_epi16((__m512i)(word >> (4 * j)), (__m512i)tables_[digit]);
            store(codes_[turn][r][pair / 16][t][digit] + pair % 16 * 64, numbers);
          }
        }
      }
  }

  KVGEN_INLINE void multiply(int unit, int block, int turn, int to) {
    const char* at = x_.numbers(block) + int64_t{unit} * L::runs * Parts<C>::run_bytes(x_.height);
    const int part = x_.height * 64;
    _tile_zero(0);
    if constexpr (width > 1) _tile_zero(1);
#pragma GCC unroll 2
    for (int r = 0; r < L::runs; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < halves; ++h, at += parts * part) {
        const auto& codes = codes_[turn][r][h];
        _tile_loadd(4, at, 64);
        if constexpr (parts == 2) _tile_loadd(5, at + part, 64);
#pragma GCC unroll 2
        for (int digit = 0; digit < digits; ++digit) {
          _tile_loadd(6, codes[0][digit], 64);
          _tile_dpbf16ps(0, 4, 6);
          if constexpr (parts == 2) _tile_dpbf16ps(0, 5, 6);
          if constexpr (width > 1) {
            _tile_loadd(7, codes[1][digit], 64);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (parts == 2) _tile_dpbf16ps(1, 5, 7);
          }
        }
      }
    _tile_stored(0, sums_[to][0], 64);
    if constexpr (width > 1) _tile_stored(1, sums_[to][1], 64);
  }

  KVGEN_INLINE void add(const Item& item, int from) {
    const float* note = x_.notes(item.block) + item.unit * x_.height;
    F32 scale[width], zero[width];
#pragma GCC unroll 2
    for (int t = 0; t < width; ++t) {
      scale[t] = item.weight.unit_scale(item.step * width + t);
      zero[t] = C::zero ? convert<float>(item.weight.zero(item.step * width + t)) - L::Code::middle : F32{};
    }
    F32(*total)[T] = total_ + item.block * x_.height;
    for (int m = 0; m < x_.height; ++m)
#pragma GCC unroll 2
      for (int t = 0; t < width; ++t) {
        F32 sum = load<F32>(sums_[from][t][m]);
        if constexpr (C::zero) sum -= zero[t] * note[m];
        total[m][item.step * width + t] += sum * scale[t];
      }
  }

  const Rows& x_;
  F32 (*const total_)[T];
  const Lanes<uint16_t, 32> tables_[2] = {table(0), table(1)};
  alignas(64) uint8_t codes_[2][L::runs][halves][width][digits][1024];
  alignas(64) float sums_[2][width][kAmxRows][kLanes];
};
#endif

}  // namespace kvgen::linear
