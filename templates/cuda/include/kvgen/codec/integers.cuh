// The codec of integers of 8, 4 or 2 bits: x = scale * code + zero, or scale * (code - kOffset) without a zero.
//
// A codec's file has
//   its unit          kWords, kRows, kPerByte: how an MMA tile lies in a lane's words
//   decoding          expand: words to A fragments of the MMA; expand_bytes: to bytes, if kByteOperands
//   its correction    what is left to do outside the MMA: unmix (and its inverse mix), row_factor, kUnit, kOffset, kTop
//   its params        Param: the type of a stored scale or zero
//   encoding          make_scaler, quick_code, exact_code; kByThresholds: by comparison (pack/words.cuh) instead
// Its sizes and offsets are rendered (kvgen/format/codecs.py).
#pragma once
#include <type_traits>

#include "kvgen/format/elements.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

// Which products an MMA mixes: none, those of rows g and g + 8 of a tile, or those of two tiles. Fields of a byte that belong to different
// rows are not shifted down, and the top one is not masked, so its products include the lower fields'. `unmix` subtracts these once.
enum class Mix { none, tile, pair };

// The params of one group as the encoder uses them. `inverse` is 1 / scale if the rounded product value * inverse is the code unless it is
// close to a tie; 0 if all codes are 0; NaN if only a division gives the code: for scales that were denormal or saturated before rounding,
// and for zeros that fp16 does not represent exactly.
struct Scaler {
  float zero = 0.f;
  float scale = 0.f;
  float inverse = 0.f;
};

template <int kBits_, bool kZero>
struct Integers {
  using Param = Half;
  static constexpr bool kQuantized = true;
  static constexpr int kBits = kBits_, kPerByte = 8 / kBits;  // of a row's field; rows in one byte of a word, eight apart
  static constexpr int kWords = kBits == 8 ? 2 : 1;           // of a lane per row tile and k-step
  static constexpr int kRows = kBits == 2 ? 32 : 16;          // of a tile of words
  static constexpr Mix kMix = kBits == 4 ? Mix::tile : kBits == 2 ? Mix::pair : Mix::none;
  static constexpr bool kNarrow = kBits == 2;        // sub-tiles are so small that each is a stage, and errors of weights do not count
  static constexpr bool kByteOperands = kBits <= 4;  // a mask gives operands of bytes
  static constexpr bool kHalfScales = false;         // scales are so few numbers that their products with weights fit fp16
  static constexpr int kTop = (1 << kBits) - 1;
  static constexpr int kOffset = kZero ? 0 : 1 << (kBits - 1);  // added to symmetric codes before they are stored
  static constexpr int kMaxCode = kZero ? kTop : (1 << (kBits - 1)) - 1;
  static constexpr int kMaxBoosted = 15;
  // Threads of an SM whose registers packing fits, but for coding by thresholds.
  static constexpr int kPackThreads = KVGEN_SM90 && kBits != 2 ? 768 : 512;
  // The bits of a code, read as fp16, are the denormal code * 2^-24, which is exact.
  static constexpr float kUnit = 1.f / 16777216.f;

  // 2-bit codes of fp16 are encoded by comparison.
  template <class Element>
  static constexpr bool kByThresholds = kBits == 2 && kZero && std::is_same_v<Element, Half>;

  // Passes the fragments of one MMA tile and k-step to `use(tile16, a0, a1, a2, a3)`. Words of 2-bit codes hold two tiles of 16 rows.
  // kComplemented complements the codes in k-slots 0..7. Without kMixed the top field of 2-bit codes is masked.
  template <bool kComplemented, bool kMixed = true, class Use>
  __device__ __forceinline__ static void expand(const uint32_t* w, int tile, Use&& use) {
    if constexpr (kBits == 8) {
      use(tile, fields<kComplemented>(w[0], 0x00ff00ffu), fields<kComplemented>(w[1], 0x00ff00ffu), ptx::odd_bytes(w[0]),
          ptx::odd_bytes(w[1]));
    } else if constexpr (kBits == 4) {
      const uint32_t x = w[0], y = ptx::odd_bytes(x);
      use(tile, fields<kComplemented>(x, 0x000f000fu), fields<kComplemented>(x, 0x00ff00ffu), y & 0x000f000fu, y);
    } else {
      const uint32_t x = w[0], y = ptx::odd_bytes(x);
      use(2 * tile, fields<kComplemented>(x, 0x00030003u), fields<kComplemented>(x, 0x000c000cu), y & 0x00030003u, y & 0x000c000cu);
      constexpr uint32_t kTopField = kMixed ? 0x00ff00ffu : 0x00c000c0u;
      use(2 * tile + 1, fields<kComplemented>(x, 0x00300030u), fields<kComplemented>(x, kTopField), y & 0x00300030u,
          kMixed ? y : y & kTopField);
    }
  }

  // The same for operands of bytes: passes rows g and g + 8 of an MMA tile and k-step to `use(tile16, a0, a1)`.
  template <class Use>
  __device__ __forceinline__ static void expand_bytes(uint32_t x, int tile, Use&& use) {
    static_assert(kByteOperands);
    if constexpr (kBits == 4) {
      use(tile, x & 0x0f0f0f0fu, x);
    } else {
      use(2 * tile, x & 0x03030303u, x & 0x0c0c0c0cu);
      use(2 * tile + 1, x & 0x30303030u, x);
    }
  }

  // Converts products from mixed form. `low` and `high` are the two MMA tiles of a pair, [2 * half + column].
  template <class Sum>
  __device__ __forceinline__ static void unmix(Sum (&low)[4], Sum (&high)[4]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kMix == Mix::tile) low[2 + c] -= low[c], high[2 + c] -= high[c];
      if constexpr (kMix == Mix::pair) high[2 + c] -= low[c] + low[2 + c] + high[c];
    }
  }
  // Inverse of `unmix`.
  __device__ __forceinline__ static void mix(float (&low)[4], float (&high)[4]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kMix == Mix::tile) low[2 + c] += low[c], high[2 + c] += high[c];
      if constexpr (kMix == Mix::pair) high[2 + c] += low[c] + low[2 + c] + high[c];
    }
  }
  // Fields are not shifted down before the MMA: the products of a row are multiplied by this factor afterwards.
  __host__ __device__ static constexpr float row_factor(int tile, int half) {
    return kBits == 4 ? (half ? 1.f / 16 : 1.f) : kBits == 2 ? (tile ? (half ? 1.f / 64 : 1.f / 16) : (half ? 1.f / 4 : 1.f)) : 1.f;
  }

  // Encoding gives the codes of kvgen/verify/packing.py, bit for bit: fp32 statistics, params rounded to fp16 first, exact division.

  // Computes a scaler from the extremes of a group; params[0] is the scale to store, params[1] the zero (asymmetric formats). `levels` is
  // the largest code.
  __device__ __forceinline__ static Scaler make_scaler(float low, float high, Half (&params)[2], float levels = kMaxCode) {
    Scaler s;
    const float range = kZero ? __fsub_rn(high, low) : fmaxf(-low, high);
    const float scale = __fdiv_rn(range, levels);
    params[0] = saturated_half(scale);
    params[1] = saturated_half(low);
    s.scale = __half2float(params[0]);
    bool plain = s.scale >= kSmallestNormalHalf && scale <= kLargestHalf;
    if constexpr (kZero) {
      s.zero = __half2float(params[1]);
      plain = plain && s.zero == low;
    }
    s.inverse = s.scale == 0.f ? 0.f : plain ? __frcp_rn(s.scale) : __int_as_float(0x7fffffff);
    return s;
  }

  template <int kMost = kMaxCode>
  __device__ __forceinline__ static uint32_t exact_code(float value, float zero, float scale) {
    const float distance = kZero ? __fsub_rn(value, zero) : value;
    if (scale == 0.f) return kOffset;
    const float code = rintf(__fdiv_rn(distance, scale));
    constexpr float kLargest = kMost;
    return static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(code, kZero ? 0.f : -kLargest), kLargest)) + kOffset);
  }

  // Returns a code in the low byte; the higher bytes are undefined. Sets `close` if the value is so close to a tie that the code may be
  // wrong.
  //
  // value * inverse differs from the correctly rounded quotient by at most 2^bits * 2^-23, so both round to the same code unless the
  // product is that close to a tie. Adding 1.5 * 2^23 rounds to the nearest even integer.
  __device__ __forceinline__ static uint32_t quick_code(float value, float zero, float inverse, bool& close) {
    constexpr float kRound = 12582912.f + kOffset;
    constexpr float kClear = 0.5f - ((1 << kBits) + 1) * 2.384185791015625e-7f;
    const float distance = kZero ? __fsub_rn(value, zero) : value;
    const float rounded = __fmaf_rn(distance, inverse, kRound);
    const float rest = __fmaf_rn(distance, inverse, -__fsub_rn(rounded, kRound));
    close |= !(fabsf(rest) <= kClear);
    return __float_as_uint(rounded);
  }

  // Converts a code below 2^23 to a float, minus kOffset, which is cheaper than a conversion instruction.
  __device__ __forceinline__ static float decode(uint32_t code) { return __uint_as_float(0x4b000000u | code) - (8388608.f + kOffset); }

 private:
  // Masks one field of each half of a word; complemented: gives -(top - code).
  template <bool kComplemented>
  __device__ __forceinline__ static uint32_t fields(uint32_t x, uint32_t mask) {
    return kComplemented ? ptx::not_and_or(x, mask, 0x80008000u) : x & mask;
  }
};

}  // namespace kvgen
