// Assembles code fields into words, on the device and on the host.
#pragma once
#include "kvgen/format/places.cuh"

namespace kvgen {

// Joins the low bytes of four words.
__host__ __device__ __forceinline__ uint32_t join_bytes(uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
#ifdef __CUDA_ARCH__
  return __byte_perm(__byte_perm(b0, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410);
#else
  return (b0 & 0xff) | (b1 & 0xff) << 8 | (b2 & 0xff) << 16 | (b3 & 0xff) << 24;
#endif
}

// The bytes of a lane's words of a run, before they are joined. The lane has eight channels of every lane row; in a half run it has four,
// twice, and the second half of the words is not stored.
template <class Places>
struct Fields {
  uint32_t bytes[Places::kWordsPerRun][4];

  // Adds the fields of one lane row, which are in the low bytes of `codes`. Lane rows are added in order, since the first field of a byte
  // initializes it.
  __host__ __device__ __forceinline__ void add(int lane_row, const uint32_t (&codes)[8]) {
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
  __host__ __device__ __forceinline__ void change(int lane_row, int channel, uint32_t by) {
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

  __host__ __device__ __forceinline__ uint32_t word(int w) const { return join_bytes(bytes[w][0], bytes[w][1], bytes[w][2], bytes[w][3]); }
};

// The same for 16-bit elements, two to a word.
template <class Places>
__host__ __device__ __forceinline__ void assemble_pairs(const uint32_t (&pairs)[Places::kLaneRows][4],
                                                        uint32_t (&words)[Places::kWordsPerRun]) {
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

}  // namespace kvgen
