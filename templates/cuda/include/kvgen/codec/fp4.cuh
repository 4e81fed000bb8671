// The codec of 4-bit floats (e2m1) with scales of one byte: x = scale * code. What a codec's file has: integers.cuh.
#pragma once
#include "kvgen/codec/small_floats.cuh"

namespace kvgen {

// A scale in e4m3, without a sign (NVFP4).
struct E4m3Scale {
  uint8_t bits;

  // A sixth of the largest magnitude goes with the largest code.
  __device__ __forceinline__ static E4m3Scale of(float top) {
    float rest, unit;
    return {static_cast<uint8_t>(SmallFloats<4, 3>::nearest(__fdiv_rn(top, 6.f), rest, unit))};
  }
};
__device__ __forceinline__ float to_float(E4m3Scale x) { return SmallFloats<4, 3>::decode(x.bits); }

// A power of two (OCP MX): the largest one that is no more than the largest magnitude, less the exponent of the largest code. Those below
// the least number of fp16 become that number, so that weights times scales stay in their range (mainloop/softmax.cuh).
struct E8m0Scale {
  uint8_t bits;

  __device__ __forceinline__ static E8m0Scale of(float top) {
    return {static_cast<uint8_t>(max(static_cast<int>(__float_as_uint(top) >> 23) - 2, 127 - 24))};
  }
};
__device__ __forceinline__ float to_float(E8m0Scale x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 23); }

// The scales in the low bytes of a word.
__device__ __forceinline__ float2 to_floats(E4m3Scale, uint32_t pair) {
#if KVGEN_FP8
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return __half22float2(ptx::as_half2(halves));
#else
  const float2 units = __half22float2(ptx::as_half2((pair & 0x7f) << 7 | (pair & 0x7f00) << 15));
  return make_float2(units.x * 256, units.y * 256);
#endif
}
__device__ __forceinline__ float2 to_floats(E8m0Scale, uint32_t pair) {
  return make_float2(__uint_as_float(pair << 23 & 0x7f800000u), __uint_as_float(pair >> 8 << 23));
}

// The scales in byte `at` of two words as numbers of fp16, in units of `Fp4::kScaleUnit`.
__device__ __forceinline__ uint32_t to_halves(E4m3Scale, uint32_t first, uint32_t second, int at) {
#if KVGEN_FP8
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(__byte_perm(first, second, at | (at + 4) << 4))));
  return halves;
#else
  return (__byte_perm(first, second, at << 4 | (at + 4) << 12) & 0x7f007f00u) >> 1;
#endif
}

template <class Scale>
struct Fp4 : SmallFloats<2, 1> {
  using Param = Scale;
  static constexpr bool kHalfScales = std::is_same_v<Scale, E4m3Scale>;
  static constexpr float kScaleUnit = KVGEN_FP8 ? 1.f : 1.f / 256;  // of e4m3's bits at their places in fp16
  static constexpr int kScaleRoom = KVGEN_FP8 ? 9 : 1;              // the largest scale is 448
  static constexpr int kWords = 1, kRows = 16, kPerByte = 2;
  static constexpr int kMaxCode = 6;
  static constexpr float kUnit = 1.f / 16384;  // exponent and mantissa at their places in fp16, which is exact

  // See `Integers`. Bytes become the upper bytes of fp16: those of the low fields are rows g, those of the others rows g + 8.
  template <bool kComplemented, bool kMixed = true, class Use>
  __device__ __forceinline__ static void expand(const uint32_t* w, int tile, Use&& use) {
    const uint32_t x = w[0];
    constexpr uint32_t kSigns = 0x80808080u, kFields = 0x8e008e00u;
    const uint32_t low = ptx::select(kSigns, x << 4, x << 1), high = ptx::select(kSigns, x, x >> 3);
    use(tile, low << 8 & kFields, high << 8 & kFields, low & kFields, high & kFields);
  }

  __device__ __forceinline__ static Scaler make_scaler(float low, float high, Scale (&params)[2]) {
    params[0] = Scale::of(fmaxf(-low, high));
    return scaler_of(to_float(params[0]));
  }
  // The same with a second level, which multiplies the scales of all groups.
  __device__ __forceinline__ static Scaler make_scaler(float low, float high, Scale (&params)[2], float second) {
    params[0] = Scale::of(__fdiv_rn(fmaxf(-low, high), second));
    return scaler_of(to_float(params[0]) * second);
  }
};

}  // namespace kvgen
