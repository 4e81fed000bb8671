// The codec of 8-bit floats, e4m3 and e5m2 (OCP): x = scale * code. What a codec's file has: integers.cuh.
#pragma once
#include "kvgen/codec/small_floats.cuh"

namespace kvgen {

template <int kExponentBits, int kMantissaBits>
struct Fp8 : SmallFloats<kExponentBits, kMantissaBits> {
  using Param = Half;
  static constexpr int kWords = 2, kRows = 16, kPerByte = 1;
  static constexpr int kMaxCode = kExponentBits == 4 ? 448 : 57344;
  static constexpr bool kIsE5m2 = kExponentBits == 5;  // the upper byte of fp16
  // Exponent and mantissa of e4m3, at their places in fp16, are 2^-8 of the number, which is exact.
  static constexpr float kUnit = kIsE5m2 || KVGEN_FP8 ? 1.f : 1.f / 256;

  // See `Integers`. Even bytes are operands of the k-slots 0..7, odd ones of the others.
  template <bool kComplemented, bool kMixed = true, class Use>
  __device__ __forceinline__ static void expand(const uint32_t* w, int tile, Use&& use) {
    uint32_t even[2], odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) halves(w[i], even[i], odd[i]);
    use(tile, even[0], even[1], odd[0], odd[1]);
  }

  // Computes a scaler from the extremes of a group; params[0] is the scale to store. A quotient's rounding error is relative, as the
  // distance of codes is, so products with the inverse serve any scale.
  __device__ __forceinline__ static Scaler make_scaler(float low, float high, Half (&params)[2], float levels = kMaxCode) {
    params[0] = saturated_half(__fdiv_rn(fmaxf(-low, high), levels));
    return scaler_of(__half2float(params[0]));
  }

 private:
  // The even and the odd bytes of a word as numbers of fp16, in units.
  __device__ __forceinline__ static void halves(uint32_t x, uint32_t& even, uint32_t& odd) {
    if constexpr (kIsE5m2) {
      even = __byte_perm(x, 0, 0x2404), odd = x & 0xff00ff00u;
      return;
    }
#if KVGEN_FP8
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(even), "=r"(odd)
        : "r"(__byte_perm(x, 0, 0x3120)));
#else
    const uint32_t upper = x << 8;
    even = (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
    odd = (x & 0x80008000u) | (x >> 1 & 0x3f803f80u);
#endif
  }
};

}  // namespace kvgen
