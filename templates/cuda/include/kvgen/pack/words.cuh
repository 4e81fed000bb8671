// Code fields to words of a lane: from codes, and for 2-bit codes of fp16 by comparison.
#pragma once
#include "kvgen/format/places.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

// Joins the low bytes of four words.
__device__ __forceinline__ uint32_t join_bytes(uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
  return __byte_perm(__byte_perm(b0, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410);
}

// The bytes of a lane's words of a run, before they are joined. The lane has eight channels of every lane row; in a half run it has four,
// twice, and the second half of the words is not stored.
template <class Places>
struct Fields {
  uint32_t bytes[Places::kWordsPerRun][4];

  // Adds the fields of one lane row, which are in the low bytes of `codes`. Lane rows are added in order, since the first field of a byte
  // initializes it.
  __device__ __forceinline__ void add(int lane_row, const uint32_t (&codes)[8]) {
#pragma unroll
    for (int w = 0; w < Places::kWordsPerRun; ++w)
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int f = 0; f < Places::kPerByte; ++f) {
          const auto from = Places::element(w, b, f);
          if (from.lane_row == lane_row) bytes[w][b] = (f == 0 ? 0 : bytes[w][b]) + (codes[from.channel] << (Places::kBits * f));
        }
  }

  // Corrects a field that was added before.
  __device__ __forceinline__ void change(int lane_row, int channel, uint32_t by) {
#pragma unroll
    for (int w = 0; w < Places::kWordsPerRun; ++w)
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int f = 0; f < Places::kPerByte; ++f) {
          const auto from = Places::element(w, b, f);
          if (from.lane_row == lane_row && from.channel == channel) bytes[w][b] += by << (Places::kBits * f);
        }
  }

  __device__ __forceinline__ uint32_t word(int w) const { return join_bytes(bytes[w][0], bytes[w][1], bytes[w][2], bytes[w][3]); }
};

// The same for 16-bit elements, two to a word.
template <class Places>
__device__ __forceinline__ void assemble_pairs(const uint32_t (&pairs)[Places::kLaneRows][4], uint32_t (&words)[Places::kWordsPerRun]) {
#pragma unroll
  for (int w = 0; w < Places::kWordsPerRun; ++w) words[w] = pairs[Places::pair(w).lane_row][Places::pair(w).channel];
}

// Adds the codes of half run x of a 2-bit V to a word that two half runs share. The first one begins the word; the lane that stored it adds
// the second. The lane's channels are in `codes` twice.
template <class Places>
__device__ __forceinline__ uint32_t share_word(uint32_t codes, int x, const uint8_t* stored) {
  const uint32_t mine = codes & 0x0f0f0f0fu;
  return Places::first_bit(x) == 0 ? mine : mine << 4 | *reinterpret_cast<const uint32_t*>(stored);
}

// Number of runs whose words a lane stores together, so that stores are as wide as the order allows.
template <class Places>
constexpr int chunk_runs() {
  return greatest_common_divisor(Places::kWordsPerRun >= 4 ? 1 : 4 / Places::kWordsPerRun, Places::Runs::kCount);
}

// Words per store, for a lane that has kCount such runs. Half runs may begin in the middle of a vector, so no store is wider than one.
template <class Places, int kCount>
constexpr int store_words() {
  constexpr int kWords = Places::Runs::kHalf ? ceil_div(Places::kWordsPerRun, 2) : kCount * Places::kWordsPerRun;
  return greatest_common_divisor(greatest_common_divisor(kWords, Places::kVector), Places::kTileWords);
}

// Two-bit codes of fp16 elements by comparison: a code is the number of thresholds that an element reaches, and one instruction compares
// two elements. The thresholds of a group are chosen so that the codes equal those of the division, bit for bit.

// Maps halves to integers of the same order; both zeros are 0, infinities -kInfinity and kInfinity.
constexpr int kInfinity = 0x7c00;
__device__ __forceinline__ int order_of(__half x) {
  const int bits = reinterpret_cast<const uint16_t&>(x);
  return bits & 0x8000 ? 0x8000 - bits : bits;
}
__device__ __forceinline__ uint32_t bits_of_order(int order) { return order < 0 ? 0x8000 - order : order; }
__device__ __forceinline__ float float_of_order(int order) { return __low2float(ptx::as_half2(bits_of_order(order))); }

// Whether an element's code is kNth (1, 2, 3) or more. A correctly rounded quotient lies on the same side of kNth - 1/2 as the exact one,
// because (kNth - 1/2) * scale is exact. At a tie, 1/2 and 5/2 round down and 3/2 rounds up.
template <int kNth>
__device__ __forceinline__ bool reaches(int order, float zero, float bound) {
  const float distance = __fsub_rn(float_of_order(order), zero);
  return kNth == 2 ? distance >= bound : distance > bound;
}

// The smallest half whose code is kNth or more. It is nearly always zero + bound, rounded, or the next half. If the distances of halves
// near it are rounded themselves, a binary search finds it. If all codes are 0, the threshold is NaN, which no element reaches.
template <int kNth>
__device__ __forceinline__ uint32_t threshold(float zero, float scale) {
  const float bound = (kNth - 0.5f) * scale;
  const int guess = order_of(__float2half_rn(zero + bound));
  int first = reaches<kNth>(guess, zero, bound) ? guess : guess + 1;
  if (reaches<kNth>(guess - 1, zero, bound) || !reaches<kNth>(guess + 1, zero, bound)) {
    int below = -kInfinity;
    first = kInfinity;
#pragma unroll 1
    while (first - below > 1) {
      const int middle = (first + below) >> 1;
      if (reaches<kNth>(middle, zero, bound))
        first = middle;
      else
        below = middle;
    }
  }
  return scale == 0.f ? 0x7fffu : bits_of_order(first);
}

// The number of thresholds that each of two elements reaches, as halves; `at(nth)` gives two thresholds.
template <class At>
__device__ __forceinline__ __half2 reached(uint32_t pair, At&& at) {
  const __half2 x = ptx::as_half2(pair);
  return __hadd2(__hadd2(__hge2(x, ptx::as_half2(at(0))), __hge2(x, ptx::as_half2(at(1)))), __hge2(x, ptx::as_half2(at(2))));
}

// Bytes of two-bit fields as halves 1024 + byte, which are exact: one FMA adds the fields of two consecutive channels, without shifts.
template <class Places>
struct HalfFields {
  __half2 bytes[Places::kWordsPerRun][2];

  // Adds the codes of one lane row; lane rows are added in order.
  __device__ __forceinline__ void add(int lane_row, const __half2 (&codes)[4]) {
#pragma unroll
    for (int w = 0; w < Places::kWordsPerRun; ++w)
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          const auto from = Places::element(w, b, f);  // byte b + 2 holds the next channel
          if (from.lane_row != lane_row) continue;
          bytes[w][b] = __hfma2(codes[from.channel / 2], __float2half2_rn(1 << 2 * f), f == 0 ? __float2half2_rn(1024.f) : bytes[w][b]);
        }
  }

  __device__ __forceinline__ uint32_t word(int w) const { return __byte_perm(ptx::as_u32(bytes[w][0]), ptx::as_u32(bytes[w][1]), 0x6240); }
};

}  // namespace kvgen
