// One block, quantized and packed by a CTA. K per channel takes two passes over its tokens (statistics, codes); all else one
// tile of rows at a time. What is read twice comes from the L1 cache the second time.
#pragma once
#include "kvgen/assemble.cuh"
#include "kvgen/channel_scalers.cuh"
#include "kvgen/extremes.cuh"

namespace kvgen {
namespace packing {

// --- statistics per token --------------------------------------------------------------------------------------------

// One scaler for all channels that a lane brings of a row.
struct TokenScaler {
  Scaler s;
  __device__ __forceinline__ float zero(int) const { return s.zero; }
  __device__ __forceinline__ float inverse(int) const { return s.inverse; }
  __device__ __forceinline__ float scale(int) const { return s.scale; }
};

// Scaler of `row`'s channels from 32 * x to the end of the group; lane t = 0 of the row writes the params.
template <class Places, class Element>
__device__ __forceinline__ Scaler token_scaler(const Element* row, int token, int x, uint8_t* block) {
  using Quant = typename Places::Quant;
  constexpr int kGroupXs = Quant::kGroup / 32;
  const int t = threadIdx.x % 4;
  Range<Element> range;
#pragma unroll
  for (int i = 0; i < kGroupXs; ++i) {
    const uint4 v = load16<Element>(row + (x + i) * 32 + t * 8);
    if (i == 0) range = {v.x, v.x};
    range.include(v.x), range.include(v.y), range.include(v.z), range.include(v.w);
  }
  range.include_lane(1);
  range.include_lane(2);
  __half params[2];
  const Scaler s = make_scaler<Quant>(range.lowest(), range.highest(), params);
  if (t == 0) {
#pragma unroll
    for (int kind = 0; kind < Quant::kParams; ++kind)
      *reinterpret_cast<__half*>(block + Places::param_offset(kind, token, x * 32)) = params[kind];
  }
  return s;
}

// --- codes -----------------------------------------------------------------------------------------------------------

template <int kWords>
__device__ __forceinline__ void store_words_at(uint8_t* address, const uint32_t* words) {
  if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(address) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint32_t*>(address) = words[0];
  }
}

template <class Quant, class Element, class Scalers>
__device__ __forceinline__ void encode_row(const uint4& v, const Scalers& scalers, uint32_t (&codes)[8]) {
  float values[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats(component(v, i), Element());
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
  encode<Quant>(values, scalers, codes);
}

// Packs 32 * kCount channels from 32 * x of the tile at `token`. `rows` are the lane's; `scalers(octet, i)` gives what quantizes
// its eight channels of the i-th 32.
template <class Places, class Element, int kCount, class Scalers>
__device__ __forceinline__ void pack_chunk(const Element* const (&rows)[Places::kOctets], int token, int x, uint8_t* block, Scalers&& scalers) {
  using Quant = typename Places::Quant;
  constexpr int kStore = store_words<Places, kCount>();
  const int lane = threadIdx.x % 32;
  uint32_t words[kCount * Places::kWordsPerX];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32_t made[Places::kWordsPerX];
    const auto load = [&](int octet) { return load16<Element>(rows[octet] + (x + i) * 32 + lane % 4 * 8); };
    if constexpr (Quant::kQuantized) {
      Fields<Places> fields;
#pragma unroll
      for (int octet = 0; octet < Places::kOctets; ++octet) {
        uint32_t codes[8];
        encode_row<Quant, Element>(load(octet), scalers(octet, i), codes);
        fields.add(octet, codes);
      }
#pragma unroll
      for (int w = 0; w < Places::kWordsPerX; ++w) made[w] = fields.word(w);
    } else {
      uint32_t pairs[Places::kOctets][4];
#pragma unroll
      for (int octet = 0; octet < Places::kOctets; ++octet)
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[octet][j] = component(load(octet), j);
      assemble_pairs<Places>(pairs, made);
    }
    if constexpr (!Places::kKey) __syncwarp();  // the division may have split the warp
#pragma unroll
    for (int w = 0; w < Places::kWordsPerX; ++w) words[i * Places::kWordsPerX + w] = Places::kKey ? made[w] : ptx::transpose(made[w]);
  }
#pragma unroll
  for (int w = 0; w < kCount * Places::kWordsPerX; w += kStore)
    store_words_at<kStore>(block + Places::word_offset(token, x + w / Places::kWordsPerX, w % Places::kWordsPerX, lane), words + w);
}

template <class Places, class Element, class Row>
__device__ __forceinline__ void lane_rows(Row&& row, int token, const Element* (&rows)[Places::kOctets]) {
#pragma unroll
  for (int octet = 0; octet < Places::kOctets; ++octet) rows[octet] = row(token + octet * 8 + threadIdx.x % 32 / 4);
}

// K per channel, once its scalers are known: warps share (tile, chunk) pairs.
template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void pack_by_channel(KRow&& k_row, uint8_t* block, const uint8_t* smem) {
  using Places = kvgen::Places<Format, Which::key>;
  using Stats = ChannelStats<Format>;
  constexpr int kChunk = chunk_xs<Places>();
  constexpr int kChunks = Places::kXs / kChunk;
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < Format::kTokens / Places::kTileTokens * kChunks; item += kThreads / 32) {
    const int token = item / kChunks * Places::kTileTokens, x = item % kChunks * kChunk;
    const int first = token / Places::Quant::kGroup * Format::kHeadDim + x * 32 + threadIdx.x % 4 * 8;
    const typename Format::Element* rows[Places::kOctets];
    lane_rows<Places>(k_row, token, rows);
    pack_chunk<Places, typename Format::Element, kChunk>(rows, token, x, block, [&](int, int i) { return ChannelScalers::load<Stats>(smem, first + i * 32); });
  }
}

// K or V per token, or not quantized: each warp packs whole tiles.
template <class Format, Which kWhich, int kThreads, class Row>
__device__ __forceinline__ void pack_by_token(Row&& row, uint8_t* block) {
  using Places = kvgen::Places<Format, kWhich>;
  using Element = typename Format::Element;
  using Quant = typename Places::Quant;
  constexpr int kGroupXs = Quant::kQuantized ? Quant::kGroup / 32 : Places::kXs;
  constexpr int kChunk = greatest_common_divisor(chunk_xs<Places>(), kGroupXs);
#pragma unroll 1
  for (int token = threadIdx.x / 32 * Places::kTileTokens; token < Format::kTokens; token += kThreads / 32 * Places::kTileTokens) {
    const Element* rows[Places::kOctets];
    lane_rows<Places>(row, token, rows);
#pragma unroll 1
    for (int start = 0; start < Places::kXs; start += kGroupXs) {
      TokenScaler scalers[Places::kOctets];
      if constexpr (Quant::kQuantized) {
#pragma unroll
        for (int octet = 0; octet < Places::kOctets; ++octet)
          scalers[octet].s = token_scaler<Places>(rows[octet], token + octet * 8 + static_cast<int>(threadIdx.x % 32 / 4), start, block);
      }
#pragma unroll 1
      for (int x = start; x < start + kGroupXs; x += kChunk)
        pack_chunk<Places, Element, kChunk>(rows, token, x, block, [&](int octet, int) { return scalers[octet]; });
    }
  }
}

// Asks for rows early: they are on their way while K is packed.
template <class Format, int kThreads, class Row>
__device__ __forceinline__ void prefetch_rows(Row&& row) {
  constexpr int kLines = ceil_div(Format::kHeadDim * 2, 128);
#pragma unroll 1
  for (int i = threadIdx.x; i < Format::kTokens * kLines; i += kThreads) ptx::prefetch_l2(row(i / kLines) + i % kLines * 64);
}

}  // namespace packing

// Shared memory that `pack_block` needs, in bytes.
template <class Format>
constexpr int pack_smem_bytes() {
  return packing::ChannelStats<Format>::kBytes > 16 ? packing::ChannelStats<Format>::kBytes : 16;
}

// Quantizes and packs the Format::kTokens tokens of one block of one head. All kThreads threads of the CTA call it; `k_row(token)`
// and `v_row(token)` give the token's channels in global memory, 16-byte aligned; `smem` holds pack_smem_bytes, 16-byte aligned.
// Ends with a barrier.
template <class Format, int kThreads, class KRow, class VRow>
__device__ void pack_block(KRow k_row, VRow v_row, uint8_t* block, uint8_t* smem) {
  static_assert(Format::Value::kAxis == Axis::token || !Format::Value::kQuantized, "V has params per token");
  static_assert(pack_smem_bytes<Format>() <= 96 * 1024 && kThreads % 32 == 0);
  packing::prefetch_rows<Format, kThreads>(v_row);
  if constexpr (packing::ChannelStats<Format>::kUsed) {
    packing::channel_ranges<Format, kThreads>(k_row, smem);
    __syncthreads();
    packing::channel_scalers<Format, kThreads>(block, smem);
    __syncthreads();
    packing::pack_by_channel<Format, kThreads>(k_row, block, smem);
  } else {
    packing::pack_by_token<Format, Which::key, kThreads>(k_row, block);
  }
  packing::pack_by_token<Format, Which::value, kThreads>(v_row, block);
  __syncthreads();
}

}  // namespace kvgen
