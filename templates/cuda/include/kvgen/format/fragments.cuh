// Converts codes to MMA fragments. The bits of a code field in a 16-bit half are the fp16 denormal code * 2^-24, times a power of two for
// the field's position. The top field of a byte is not masked, so its products include the lower fields (mixed form); `unmix` subtracts
// them once from the accumulators.
#pragma once
#include "kvgen/mainloop/traits.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], uint32_t address) {
  if constexpr (kWords == 4) {
    const uint4 v = ptx::load_shared16(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = ptx::load_shared8(address);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = ptx::load_shared4(address);
  }
}

// Converts two elements of bfloat16 to two of fp16.
__device__ __forceinline__ uint32_t half2_from(uint32_t x, const __nv_bfloat16*) {
  return ptx::pack_half2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ uint32_t half2_from(uint32_t x, const __half*) { return x; }

// Masks one field of each half of a word; complemented: gives -(top - code).
template <bool kComplemented>
__device__ __forceinline__ uint32_t fields(uint32_t x, uint32_t mask) {
  return kComplemented ? ptx::not_and_or(x, mask, 0x80008000u) : x & mask;
}

// Passes the fragments of one MMA tile and k-step to `use(tile16, a0, a1, a2, a3)`. Words of 2-bit codes hold two tiles of 16 rows.
// kComplemented complements the codes in k-slots 0..7. Without kMixed the top field of 2-bit codes is masked.
template <int kBits, class Element, bool kComplemented, bool kMixed = true, class Use>
__device__ __forceinline__ void expand(const uint32_t* w, int tile, Use&& use) {
  if constexpr (kBits == 16) {
    const Element* type = nullptr;
    use(tile, half2_from(w[0], type), half2_from(w[1], type), half2_from(w[2], type), half2_from(w[3], type));
  } else if constexpr (kBits == 8) {
    use(tile, fields<kComplemented>(w[0], 0x00ff00ffu), fields<kComplemented>(w[1], 0x00ff00ffu), ptx::odd_bytes(w[0]),
        ptx::odd_bytes(w[1]));
  } else if constexpr (kBits == 4) {
    const uint32_t x = w[0], y = ptx::odd_bytes(x);
    use(tile, fields<kComplemented>(x, 0x000f000fu), fields<kComplemented>(x, 0x00ff00ffu), y & 0x000f000fu, y);
  } else {
    const uint32_t x = w[0], y = ptx::odd_bytes(x);
    use(2 * tile, fields<kComplemented>(x, 0x00030003u), fields<kComplemented>(x, 0x000c000cu), y & 0x00030003u, y & 0x000c000cu);
    constexpr uint32_t kTop = kMixed ? 0x00ff00ffu : 0x00c000c0u;
    use(2 * tile + 1, fields<kComplemented>(x, 0x00300030u), fields<kComplemented>(x, kTop), y & 0x00300030u, kMixed ? y : y & kTop);
  }
}

// The same for operands of bytes: passes rows g and g + 8 of an MMA tile and k-step to `use(tile16, a0, a1)`.
template <int kBits, class Use>
__device__ __forceinline__ void expand_bytes(uint32_t x, int tile, Use&& use) {
  static_assert(kBits == 4 || kBits == 2);
  if constexpr (kBits == 4) {
    use(tile, x & 0x0f0f0f0fu, x);
  } else {
    use(2 * tile, x & 0x03030303u, x & 0x0c0c0c0cu);
    use(2 * tile + 1, x & 0x30303030u, x);
  }
}

// Visits every (tile, step) pair of an operand in the order of a lane's words: `visit(pair, words)`.
template <int kBits, int kPairs, class Visit>
__device__ __forceinline__ void visit_words(uint32_t codes, int lane, Visit&& visit) {
  constexpr int kWords = Fragment<kBits>::kWords;
  constexpr int kVector = vector_words(kPairs * kWords);
  constexpr int kChunk = kVector > kWords ? kVector : kWords;  // words per iteration: whole pairs, and whole loads
#pragma unroll
  for (int at = 0; at < kPairs * kWords; at += kChunk) {
    uint32_t words[kChunk / kVector][kVector];
#pragma unroll
    for (int load = 0; load < kChunk / kVector; ++load)
      load_words<kVector>(words[load], codes + ((at / kVector + load) * 32 + lane) * kVector * 4);
#pragma unroll
    for (int i = 0; i < kChunk / kWords; ++i) visit(at / kWords + i, &words[0][0] + i * kWords);
  }
}

// The same for a sub-tile, or for two of 16 tokens that lie kHalfStride bytes apart.
template <int kBits, int kPairs, int kHalfStride, class Visit>
__device__ __forceinline__ void visit_subtile(uint32_t codes, int lane, Visit&& visit) {
  if constexpr (kHalfStride == 0) {
    visit_words<kBits, kPairs>(codes, lane, visit);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visit_words<kBits, kPairs / 2>(codes + half * kHalfStride, lane,
                                     [&](int pair, const uint32_t* words) { visit(half * (kPairs / 2) + pair, words); });
  }
}

// Converts products from mixed form: subtracts the products of a byte's lower fields from those of its top field. `low` and `high` are the
// two MMA tiles of a pair, [2 * half + column].
template <int kBits, class Sum>
__device__ __forceinline__ void unmix(Sum (&low)[4], Sum (&high)[4]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if constexpr (kBits == 4) low[2 + c] -= low[c], high[2 + c] -= high[c];
    if constexpr (kBits == 2) high[2 + c] -= low[c] + low[2 + c] + high[c];
  }
}

// Inverse of `unmix`.
template <int kBits>
__device__ __forceinline__ void mix(float (&low)[4], float (&high)[4]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if constexpr (kBits == 4) low[2 + c] += low[c], high[2 + c] += high[c];
    if constexpr (kBits == 2) high[2 + c] += low[c] + low[2 + c] + high[c];
  }
}

}  // namespace kvgen
