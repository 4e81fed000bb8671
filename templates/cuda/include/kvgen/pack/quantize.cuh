// Quantizes and packs one block, by a CTA. Params per channel take two passes over the tokens (extremes, codes), boosted channels a third;
// other formats take one tile of rows at a time. The second read of an element hits the L1 cache.
#pragma once
#include <algorithm>

#include "kvgen/format/static.cuh"
#include "kvgen/pack/boost.cuh"
#include "kvgen/pack/scalers.cuh"
#include "kvgen/pack/words.cuh"

namespace kvgen {
namespace packing {

template <class Element>
__device__ __forceinline__ void unpack_vector(const uint4& v, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats<Element>(component(v, i));
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

// Returns get(index) of `count` values in registers, which a loop that is not unrolled cannot index.
template <int kCount, class Get>
__device__ __forceinline__ auto picked(Get&& get, int index) {
  auto x = get(0);
#pragma unroll
  for (int i = 1; i < kCount; ++i)
    if (i == index) x = get(i);
  return x;
}

// Encodes eight values. Returns whether one of them is close to a tie. `scalers` gives zero(i) and inverse(i).
template <class Codec, class Scalers>
__device__ __forceinline__ bool encode(const float (&values)[8], const Scalers& scalers, uint32_t (&codes)[8]) {
  bool close = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = Codec::quick_code(values[i], scalers.zero(i), scalers.inverse(i), close);
  return close;
}

// The difference between the exact code and the quick code.
template <class Codec, class Scalers>
__device__ __forceinline__ uint32_t correction(float value, const Scalers& scalers, int i) {
  const Scaler s = scalers.scaler(i);
  bool close;
  return Codec::exact_code(value, s.zero, s.scale) - Codec::quick_code(value, s.zero, s.inverse, close);
}

// Encodes a lane's words of a run. Near ties are corrected after all rows are encoded: one branch, which is rarely taken and short.
template <class Places, class Element, class Vector, class Scalers>
__device__ __forceinline__ void encode_words(Vector&& vector, Scalers&& scalers, uint32_t (&words)[Places::kWordsPerRun]) {
  using Codec = typename Places::Codec;
  Fields<Places> fields;
  float values[8];
  uint32_t codes[8];
  uint32_t close = 0;  // one bit per lane row
#pragma unroll
  for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
    unpack_vector<Element>(vector(lane_row), values);
    close |= encode<Codec>(values, scalers(lane_row), codes) ? 1 << lane_row : 0;
    fields.add(lane_row, codes);
  }
  if (close) {
#pragma unroll 1
    for (int pair = 0; pair < Places::kLaneRows * 4; ++pair) {
      const int lane_row = pair / 4, j = pair % 4;
      if ((close >> lane_row & 1) == 0) continue;
      const float2 x = to_floats<Element>(component(picked<Places::kLaneRows>(vector, lane_row), j));
      const auto s = picked<Places::kLaneRows>(scalers, lane_row);
      fields.change(lane_row, 2 * j, correction<Codec>(x.x, s, 2 * j));
      fields.change(lane_row, 2 * j + 1, correction<Codec>(x.y, s, 2 * j + 1));
    }
  }
#pragma unroll
  for (int w = 0; w < Places::kWordsPerRun; ++w) words[w] = fields.word(w);
}

// The same for coding by thresholds.
template <class Places, class Vector, class Scalers>
__device__ __forceinline__ void count_words(Vector&& vector, Scalers&& scalers, uint32_t (&words)[Places::kWordsPerRun]) {
  HalfFields<Places> fields;
#pragma unroll
  for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
    const uint4 v = vector(lane_row);
    const auto coder = scalers(lane_row);
    __half2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = reached(component(v, i), [&](int nth) { return coder.threshold(nth, i); });
    fields.add(lane_row, codes);
  }
#pragma unroll
  for (int w = 0; w < Places::kWordsPerRun; ++w) words[w] = fields.word(w);
}

// Gives some bits of a word in memory other values. Bits of other tokens of the word may be written at the same time.
__device__ __forceinline__ void replace_bits(uint32_t* at, uint32_t bits, uint32_t value) {
  if (bits == 0) return;
  atomicAnd(at, ~bits);
  atomicOr(at, value & bits);
}

// Packs kCount runs from run x on, of the tile at `token`. `vector(lane_row, i)` gives the lane's vector of the i-th run,
// `scalers(lane_row, i)` its scaler.
template <class Places, class Element, int kCount, class Part = WholeTile, class Vector, class Scalers>
__device__ __forceinline__ void pack_chunk(Vector&& vector, int token, int x, uint8_t* block, Scalers&& scalers, Part part = {}) {
  using Quant = typename Places::Quant;
  constexpr int kStore = store_words<Places, kCount>();
  alignas(16) uint32_t words[kCount * Places::kWordsPerRun];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32_t run_words[Places::kWordsPerRun];
    const auto run = [&](int lane_row) { return vector(lane_row, i); };
    const auto coders = [&](int lane_row) { return scalers(lane_row, i); };
    if constexpr (Quant::Codec::template kByThresholds<Element>) {
      count_words<Places>(run, coders, run_words);
    } else if constexpr (Quant::Codec::kQuantized) {
      encode_words<Places, Element>(run, coders, run_words);
    } else {
      uint32_t pairs[Places::kLaneRows][4];
#pragma unroll
      for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row)
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[lane_row][j] = component(run(lane_row), j);
      assemble_pairs<Places>(pairs, run_words);
    }
    if constexpr (!Places::kKey) __syncwarp();  // the division may have diverged the warp
#pragma unroll
    for (int w = 0; w < Places::kWordsPerRun; ++w)
      words[i * Places::kWordsPerRun + w] = Places::kKey ? run_words[w] : ptx::transpose(run_words[w]);
    if constexpr (!Part::kWhole) {
#pragma unroll
      for (int w = 0; w < Places::kWordsPerRun; ++w) {
        uint32_t mine = part.template bits<Places>(token, w), word = words[i * Places::kWordsPerRun + w];
        if constexpr (!Places::kKey) mine = ptx::transpose(mine);
        if (w >= Places::run_words(x + i)) continue;
        if (Places::kSharedWords && Places::Runs::is_half(x + i)) {
          mine = (mine & 0x0f0f0f0fu) << Places::first_bit(x + i), word = (word & 0x0f0f0f0fu) << Places::first_bit(x + i);
        }
        replace_bits(reinterpret_cast<uint32_t*>(block + Places::word_offset(token, x + i, w, threadIdx.x % 32)), mine, word);
      }
      continue;
    }
#pragma unroll
    for (int w = 0; w < kCount * Places::kWordsPerRun; w += kStore)  // stored as soon as the last word is complete
      if ((w + kStore - 1) / Places::kWordsPerRun == i && w - i * Places::kWordsPerRun < Places::run_words(x + i)) {
        uint8_t* to = block + Places::word_offset(token, x + w / Places::kWordsPerRun, w % Places::kWordsPerRun, threadIdx.x % 32);
        if constexpr (Places::kSharedWords)
          if (Places::Runs::is_half(x + i)) words[w] = share_word<Places>(words[w], x + i, to);
        copy_words<kStore>(to, words + w);
      }
  }
}

// Packs K or V per channel, whose scalers are known. The warps distribute (tile, chunk) pairs.
template <class Format, Which kWhich, int kThreads, class Row>
__device__ __forceinline__ void pack_by_channel(Row&& row, uint8_t* block, const uint8_t* smem) {
  using Places = kvgen::Places<Format, kWhich>;
  using Element = typename Format::Element;
  using Runs = typename Places::Runs;
  constexpr int kChunk = greatest_common_divisor(2, Runs::kCount);  // wide stores, and few enough loads for the registers
  constexpr int kChunks = Runs::kCount / kChunk;
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < Format::kTokens / Places::kTileTokens * kChunks; item += kThreads / 32) {
    const int token = item / kChunks * Places::kTileTokens, x = item % kChunks * kChunk;
    const int group = token / Places::Quant::kGroup * Format::kHeadDim;
    const int begin = Places::kSplitsGroups ? token % Places::Quant::kGroup : 0;
    const LaneVectors<Places, Element, kChunk> vectors(row, token, x);
    // A tile of a 2-bit K holds 32 tokens, which may be of two groups: two lane rows are of one.
    pack_chunk<Places, Element, kChunk>(vectors, token, x, block, [&](int lane_row, int i) {
      const int of_row = group + (begin + lane_row / 2 * 16) / Places::Quant::kGroup * Format::kHeadDim;
      return ChannelCoder<Format, kWhich>(smem, of_row + Runs::lane_channel(x + i, threadIdx.x % 4), Runs::is_half(x + i));
    });
  }
}

// Static scales: what saturates is clamped before it is encoded, as encoding expects no more than the largest code. In place of a zero the
// coder has the largest magnitude.
template <class Codec_>
struct Saturating : Codec_ {
  __device__ __forceinline__ static float clamped(float x, float most) { return fminf(fmaxf(x, -most), most); }
  __device__ __forceinline__ static uint32_t quick_code(float value, float most, float inverse, bool& close) {
    return Codec_::quick_code(clamped(value, most), 0.f, inverse, close);
  }
  __device__ __forceinline__ static uint32_t exact_code(float value, float most, float scale) {
    return Codec_::exact_code(clamped(value, most), 0.f, scale);
  }
};
template <class Places_>
struct StaticPlaces : Places_ {
  using Codec = Saturating<typename Places_::Codec>;
};
template <class Codec>
struct StaticScalers {
  const float* at;  // the scales of eight consecutive channels, or of four of a half run, twice
  bool half;

  __device__ __forceinline__ float scale(int i) const { return at[half ? i % 4 : i]; }
  __device__ __forceinline__ float zero(int i) const { return scale(i) * Codec::kMaxCode; }
  __device__ __forceinline__ float inverse(int i) const { return __frcp_rn(scale(i)); }
  __device__ __forceinline__ Scaler scaler(int i) const { return {zero(i), scale(i), inverse(i)}; }
};

// Packs a tile of K or V that has no params per channel, by one warp: all of its tokens, or some. `scales` are the head's static ones.
template <class Format, Which kWhich, class Row, class Part = WholeTile>
__device__ __forceinline__ void pack_tile(Row&& row, int token, uint8_t* block, const float* scales, Part part = {}) {
  using Element = typename Format::Element;
  using Quant = typename Places<Format, kWhich>::Quant;
  if constexpr (kStaticAlone<Quant>) {
    using Places = StaticPlaces<kvgen::Places<Format, kWhich>>;
    using Runs = typename Places::Runs;
    constexpr int kChunk = greatest_common_divisor(2, Runs::kCount);
#pragma unroll 1
    for (int x = 0; x < Runs::kCount; x += kChunk)
      pack_chunk<Places, Element, kChunk>(
          LaneVectors<Places, Element, kChunk>(row, token, x), token, x, block,
          [&](int, int i) {
            return StaticScalers<typename Places::Codec>{scales + Runs::lane_channel(x + i, threadIdx.x % 4), Runs::is_half(x + i)};
          },
          part);
  } else {
    using Places = kvgen::Places<Format, kWhich>;
    constexpr int kRuns = Places::Runs::kCount;
    constexpr int kGroupRuns = Quant::Codec::kQuantized ? kRuns * Quant::kGroup / Format::kHeadDim : greatest_common_divisor(2, kRuns);
    using Group = LaneVectors<Places, Element, kGroupRuns>;
    constexpr int kChunk = Group::kInRegisters ? kGroupRuns : greatest_common_divisor(chunk_runs<Places>(), kGroupRuns);
#pragma unroll 1
    for (int start = 0; start < kRuns; start += kGroupRuns) {
      const Group vectors(row, token, start);
      TokenCoder<Places, Element> scalers[Places::kLaneRows];
      if constexpr (Quant::Codec::kQuantized) token_scalers(vectors, token, start, block, scales, scalers, part);
#pragma unroll 1
      for (int x = 0; x < kGroupRuns; x += kChunk)
        pack_chunk<Places, Element, kChunk>([&](int lane_row, int i) { return vectors(lane_row, (Group::kInRegisters ? 0 : x) + i); },
                                            token, start + x, block, [&](int lane_row, int) { return scalers[lane_row]; }, part);
    }
  }
}

// Packs K or V without params per channel: each warp packs whole tiles.
template <class Format, Which kWhich, int kThreads, class Row>
__device__ __forceinline__ void pack_tiles(Row&& row, uint8_t* block, const float* scales) {
  constexpr int kTile = Places<Format, kWhich>::kTileTokens;
#pragma unroll 1
  for (int token = threadIdx.x / 32 * kTile; token < Format::kTokens; token += kThreads / 32 * kTile)
    pack_tile<Format, kWhich>(row, token, block, scales);
}

template <class Format, Which kWhich, int kThreads, class Row>
__device__ __forceinline__ void pack_operand(Row&& row, uint8_t* block, uint8_t* smem, const float* scales) {
  constexpr bool kBoosted = Format::kBoosted > 0 && kWhich == Which::key;
  if constexpr (ChannelStats<Format, kWhich>::kUsed) {
    channel_ranges<Format, kWhich, kThreads>(row, smem);
    __syncthreads();
    if constexpr (kBoosted) select_boosted<Format, kThreads>(row, block, smem);
    channel_scalers<Format, kWhich, kThreads>(block, smem, [&](int i) { return levels_of<Format, kWhich>(smem, i); });
    __syncthreads();
    pack_by_channel<Format, kWhich, kThreads>(row, block, smem);
    if constexpr (kBoosted) {
      __syncthreads();
      pack_boosted<Format, kThreads>(row, block, smem);
    }
  } else {
    pack_tiles<Format, kWhich, kThreads>(row, block, scales);
  }
}

// Threads of a packing CTA: one warp for every tile of 16 tokens, at most eight.
template <class Format>
constexpr int pack_threads() {
  return Format::kTokens >= 128 ? 256 : Format::kTokens * 2;
}

// CTAs per SM that limit the registers. The number depends on the architecture, so it must not be a template argument of a kernel: host
// and device would name different kernels. Coding by thresholds needs few registers, a division for near ties needs more, and so do
// addresses before SM90.
template <class Format>
constexpr int pack_ctas() {
  using Element = typename Format::Element;
  constexpr bool kByThresholds =
      Format::Key::Codec::template kByThresholds<Element> && Format::Value::Codec::template kByThresholds<Element>;
  return (kByThresholds ? 1024 : Format::Key::Codec::kPackThreads) / pack_threads<Format>();
}

// Prefetches the rows of V into L2 while K is packed.
template <class Format, int kThreads, class Row>
__device__ __forceinline__ void prefetch_rows(Row&& row) {
  constexpr int kLines = ceil_div(Format::kHeadDim * 2, 128);
#pragma unroll 1
  for (int i = threadIdx.x; i < Format::kTokens * kLines; i += kThreads) ptx::prefetch_l2(row(i / kLines) + i % kLines * 64);
}

}  // namespace packing

// Bytes of shared memory that `pack_block` needs.
template <class Format>
constexpr int pack_smem_bytes() {
  return std::max({16, packing::BoostStats<Format>::kEnd, packing::ChannelStats<Format, Which::value>::kBytes});
}

// Rows that need no staging: those of a format without rotation, or rotated ones.
struct AsGiven {
  template <class Quant, class Row>
  __device__ __forceinline__ Row& rows(Row& row) const {
    return row;
  }
};

// Quantizes and packs the Format::kTokens tokens of one block of one head. All kThreads threads of the CTA call it. `k_row(token)` and
// `v_row(token)` give a token's channels in global memory, 16-byte aligned, and `stage` the rows that are packed in their place; `smem`
// holds pack_smem_bytes, 16-byte aligned; `scales` are the head's static ones. The function ends with a barrier.
template <class Format, int kThreads, class KRow, class VRow, class Stage = AsGiven>
__device__ void pack_block(KRow k_row, VRow v_row, uint8_t* block, uint8_t* smem, StaticScales scales = {}, Stage stage = {}) {
  static_assert(pack_smem_bytes<Format>() <= 96 * 1024 && kThreads % 32 == 0);
  packing::prefetch_rows<Format, kThreads>(v_row);
  packing::pack_operand<Format, Which::key, kThreads>(stage.template rows<typename Format::Key>(k_row), block, smem, scales.key);
  if constexpr (Format::Key::kPerChannel && Format::Value::kPerChannel) __syncthreads();  // K's scalers are read
  packing::pack_operand<Format, Which::value, kThreads>(stage.template rows<typename Format::Value>(v_row), block, smem, scales.value);
  __syncthreads();
}

}  // namespace kvgen
