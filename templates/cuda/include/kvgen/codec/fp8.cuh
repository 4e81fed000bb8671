// The codec of 8-bit floats, e4m3 and e5m2 (OCP): x = scale * code. What a codec's file has: integers.cuh.
#pragma once
#include "kvgen/codec/integers.cuh"

// Whether instructions convert e4m3.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KVGEN_FP8 1
#else
#define KVGEN_FP8 0
#endif

namespace kvgen {

template <int kExponentBits, int kMantissaBits>
struct Fp8 {
  static constexpr bool kQuantized = true;
  static constexpr int kBits = 8, kPerByte = 1;
  static constexpr int kWords = 2, kRows = 16;
  static constexpr Mix kMix = Mix::none;
  static constexpr bool kNarrow = false, kByteOperands = false;
  static constexpr int kTop = 0, kOffset = 0;  // codes have a sign, so none is complemented
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMaxCode = kExponentBits == 4 ? 448 : 57344;
  static constexpr int kPackThreads = 512;
  static constexpr bool kIsE5m2 = kExponentBits == 5;  // the upper byte of fp16
  // Exponent and mantissa of e4m3, at their places in fp16, are 2^-8 of the number, which is exact.
  static constexpr float kUnit = kIsE5m2 || KVGEN_FP8 ? 1.f : 1.f / 256;

  template <class Element>
  static constexpr bool kByThresholds = false;

  // See `Integers`. Even bytes are operands of the k-slots 0..7, odd ones of the others.
  template <bool kComplemented, bool kMixed = true, class Use>
  __device__ __forceinline__ static void expand(const uint32_t* w, int tile, Use&& use) {
    uint32_t even[2], odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) halves(w[i], even[i], odd[i]);
    use(tile, even[0], even[1], odd[0], odd[1]);
  }
  template <class Sum>
  __device__ __forceinline__ static void unmix(Sum (&)[4], Sum (&)[4]) {}
  __device__ __forceinline__ static void mix(float (&)[4], float (&)[4]) {}
  __host__ __device__ static constexpr float row_factor(int, int) { return 1.f; }

  // Computes a scaler from the extremes of a group; params[0] is the scale to store. A quotient's rounding error is relative, as the
  // spacing of codes is, so products with the inverse serve any scale.
  __device__ __forceinline__ static Scaler make_scaler(float low, float high, Half (&params)[2], float levels = kMaxCode) {
    Scaler s;
    params[0] = saturated_half(__fdiv_rn(fmaxf(-low, high), levels));
    s.scale = __half2float(params[0]);
    s.inverse = s.scale == 0.f ? 0.f : __frcp_rn(s.scale);
    return s;
  }

  __device__ __forceinline__ static uint32_t exact_code(float value, float, float scale) {
    float rest, unit;
    return scale == 0.f ? 0 : nearest(__fdiv_rn(value, scale), rest, unit);
  }

  // See `Integers`: the product differs from the quotient by less than 2^-22 of itself, and that is below 2^-18 of the distance of codes.
  __device__ __forceinline__ static uint32_t quick_code(float value, float, float inverse, bool& close) {
    float rest, unit;
    const uint32_t code = nearest(value * inverse, rest, unit);
    close |= !(fabsf(rest) <= unit * (0.5f - 1.f / (1 << 17)));
    return inverse == 0.f ? 0 : code;
  }

  __device__ __forceinline__ static float decode(uint32_t code) {
    const uint32_t bits = (code & 0x80) << 24 | (code & 0x7f) << (23 - kMantissaBits);
    return __uint_as_float(bits) * power_of_two(127 - kBias);
  }

 private:
  __host__ __device__ static constexpr float power_of_two(int exponent) {
    float x = 1.f;
    for (int i = exponent; i > 0; --i) x *= 2;
    for (int i = exponent; i < 0; ++i) x /= 2;
    return x;
  }

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

  // The code nearest to x, of two the even one, at most the largest finite; a NaN gives that, too. Also x less the code's number, unless it
  // is larger than all of them, and the distance of codes near x. Adding 1.5 * 2^23 times this distance rounds to its multiples.
  __device__ __forceinline__ static uint32_t nearest(float x, float& rest, float& unit) {
    const float size = fminf(fabsf(x), kMaxCode);
    const uint32_t exponent = max(__float_as_uint(size) & 0x7f800000u, static_cast<uint32_t>(128 - kBias) << 23);
    unit = __uint_as_float(exponent - (kMantissaBits << 23));
    const float shift = __uint_as_float(exponent + ((23 - kMantissaBits) << 23) | 0x400000u);
    const float rounded = (size + shift) - shift;
    rest = size - rounded;
    const uint32_t code = __float_as_uint(rounded * power_of_two(kBias - 127)) >> (23 - kMantissaBits);
    return code | (__float_as_uint(x) >> 24 & 0x80);
  }
};

}  // namespace kvgen
