// One block, quantized and packed by a CTA. K per channel takes two passes over its tokens (statistics, codes); all else one
// tile of rows at a time. What is read twice comes from the L1 cache the second time.
#pragma once
#include "kvgen/assemble.cuh"
#include "kvgen/ptx.cuh"
#include "kvgen/scaler.cuh"

namespace kvgen {
namespace packing {

__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b, __half) { return ptx::as_u32(__hmin2(ptx::as_half2(a), ptx::as_half2(b))); }
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __half) { return ptx::as_u32(__hmax2(ptx::as_half2(a), ptx::as_half2(b))); }
__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 y = __hmin2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 y = __hmax2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}

__device__ __forceinline__ float2 to_floats(uint32_t x, __half) { return __half22float2(ptx::as_half2(x)); }
__device__ __forceinline__ float2 to_floats(uint32_t x, __nv_bfloat16) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }

// Extremes of two interleaved series of 16-bit elements.
template <class Element>
struct Range {
  uint32_t low, high;

  __device__ __forceinline__ void include(uint32_t other_low, uint32_t other_high) {
    low = smaller(low, other_low, Element());
    high = larger(high, other_high, Element());
  }
  __device__ __forceinline__ void include(uint32_t pair) { include(pair, pair); }
  __device__ __forceinline__ void include_lane(int mask) { include(__shfl_xor_sync(~0u, low, mask), __shfl_xor_sync(~0u, high, mask)); }
  __device__ __forceinline__ float lowest() const {
    const float2 x = to_floats(low, Element());
    return fminf(x.x, x.y);
  }
  __device__ __forceinline__ float highest() const {
    const float2 x = to_floats(high, Element());
    return fmaxf(x.x, x.y);
  }
};

template <class Element>
__device__ __forceinline__ uint4 load16(const Element* address) {
  return *reinterpret_cast<const uint4*>(address);
}
__device__ __forceinline__ uint32_t component(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

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

// --- statistics of K per channel -------------------------------------------------------------------------------------

// Shared memory: extremes of every channel by runs of 16 tokens, then scalers by group.
template <class Format>
struct ChannelStats {
  static constexpr int kDim = Format::kHeadDim;
  static constexpr bool kUsed = Format::Key::kQuantized && Format::Key::kAxis == Axis::channel;
  static constexpr int kRuns = kUsed ? Format::kTokens / 16 : 0;
  static constexpr int kGroups = kUsed ? Format::kTokens / Format::Key::kGroup : 0;
  static constexpr int kHighs = kRuns * kDim * 2;
  static constexpr int kScales = 2 * kHighs;
  static constexpr int kInverses = kScales + kGroups * kDim * 4;
  static constexpr int kZeros = kInverses + kGroups * kDim * 4;
  static constexpr int kBytes = kZeros + kGroups * kDim * 4;
};

template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void channel_ranges(KRow&& k_row, uint8_t* smem) {
  using Stats = ChannelStats<Format>;
  using Element = typename Format::Element;
  constexpr int kRowLanes = Format::kHeadDim / 8;      // lanes that bring a row
  constexpr int kRows = 32 / kRowLanes;                // rows brought at once
  const int lane = threadIdx.x % 32;
  const int row = min(lane / kRowLanes, kRows - 1);    // what is left of the lanes repeats the last row
  const int column = lane % kRowLanes * 8;
#pragma unroll 1
  for (int run = threadIdx.x / 32; run < Stats::kRuns; run += kThreads / 32) {
    Range<Element> range[4];
#pragma unroll
    for (int step = 0; step < 16 / kRows; ++step) {
      const uint4 v = load16<Element>(k_row(run * 16 + step * kRows + row) + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = component(v, i);
        if (step == 0) range[i] = {pair, pair};
        else range[i].include(pair);
      }
    }
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        range[i].include(__shfl_down_sync(~0u, range[i].low, half * kRowLanes), __shfl_down_sync(~0u, range[i].high, half * kRowLanes));
    if (lane < kRowLanes) {
      const int at = (run * Format::kHeadDim + column) * 2;
      *reinterpret_cast<uint4*>(smem + at) = make_uint4(range[0].low, range[1].low, range[2].low, range[3].low);
      *reinterpret_cast<uint4*>(smem + Stats::kHighs + at) = make_uint4(range[0].high, range[1].high, range[2].high, range[3].high);
    }
  }
}

// Scalers of every channel and group, in shared memory and, as params, in the block.
template <class Format, int kThreads>
__device__ __forceinline__ void channel_scalers(uint8_t* block, uint8_t* smem) {
  using Stats = ChannelStats<Format>;
  using Element = typename Format::Element;
  using Key = typename Format::Key;
  using Places = kvgen::Places<Format, Which::key>;
  constexpr int kRunsPerGroup = Stats::kRuns / Stats::kGroups;
  const Element* lows = reinterpret_cast<const Element*>(smem);
  const Element* highs = reinterpret_cast<const Element*>(smem + Stats::kHighs);
#pragma unroll 1
  for (int i = threadIdx.x; i < Stats::kGroups * Format::kHeadDim; i += kThreads) {
    const int group = i / Format::kHeadDim, channel = i % Format::kHeadDim;
    const int first = group * kRunsPerGroup * Format::kHeadDim + channel;
    float low = to_float(lows[first]), high = to_float(highs[first]);
#pragma unroll
    for (int run = 1; run < kRunsPerGroup; ++run) {
      low = fminf(low, to_float(lows[first + run * Format::kHeadDim]));
      high = fmaxf(high, to_float(highs[first + run * Format::kHeadDim]));
    }
    __half params[2];
    const Scaler s = make_scaler<Key>(low, high, params);
    reinterpret_cast<float*>(smem + Stats::kScales)[i] = s.scale;
    reinterpret_cast<float*>(smem + Stats::kInverses)[i] = s.inverse;
    reinterpret_cast<float*>(smem + Stats::kZeros)[i] = s.zero;
#pragma unroll
    for (int kind = 0; kind < Key::kParams; ++kind)
      *reinterpret_cast<__half*>(block + Places::param_offset(kind, group * Key::kGroup, channel)) = params[kind];
  }
}

// Eight neighbouring channels, each with its own scaler.
struct ChannelScalers {
  const float* scales;
  float inverses[8], zeros[8];

  template <class Stats>
  __device__ __forceinline__ static ChannelScalers load(const uint8_t* smem, int at) {
    ChannelScalers s;
    s.scales = reinterpret_cast<const float*>(smem + Stats::kScales) + at;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      reinterpret_cast<float4&>(s.inverses[i]) = *reinterpret_cast<const float4*>(smem + Stats::kInverses + (at + i) * 4);
      reinterpret_cast<float4&>(s.zeros[i]) = *reinterpret_cast<const float4*>(smem + Stats::kZeros + (at + i) * 4);
    }
    return s;
  }
  __device__ __forceinline__ float zero(int i) const { return zeros[i]; }
  __device__ __forceinline__ float inverse(int i) const { return inverses[i]; }
  __device__ __forceinline__ float scale(int i) const { return scales[i]; }
};

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
