// One block, quantized and packed by a CTA. K per channel takes two passes over its tokens (statistics, codes); all else one
// tile of rows at a time. What is read twice comes from the L1 cache the second time.
#pragma once
#include "kvgen/pack/assemble.cuh"
#include "kvgen/pack/channel_scalers.cuh"
#include "kvgen/pack/extremes.cuh"
#include "kvgen/pack/thresholds.cuh"

namespace kvgen {
namespace packing {

// --- rows --------------------------------------------------------------------------------------------------------------

// LaneVectors, of eight channels each, that a lane keeps at once.
constexpr int kMaxHeldVectors = 8;

template <class Places, class Element, class Row>
__device__ __forceinline__ void lane_rows(Row&& row, int token, const Element* (&rows)[Places::kLaneRows]) {
#pragma unroll
  for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) rows[lane_row] = row(token + lane_row * 8 + threadIdx.x % 32 / 4);
}

// What a lane brings of kCount runs of 32 channels of its rows. Few enough vectors are asked for together, before any of them is
// waited for, and stay in registers; of more, each is loaded where it is used.
template <class Places, class Element, int kCount>
struct LaneVectors {
  static constexpr bool kInRegisters = Places::kLaneRows * kCount <= kMaxHeldVectors;
  const Element* rows[Places::kLaneRows];
  uint4 registers[kInRegisters ? Places::kLaneRows : 1][kInRegisters ? kCount : 1];

  template <class Row>
  __device__ __forceinline__ LaneVectors(Row&& row, int token, int x) {
    lane_rows<Places>(row, token, rows);
#pragma unroll
    for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
      rows[lane_row] += x * 32 + threadIdx.x % 4 * 8;
      if constexpr (kInRegisters) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) registers[lane_row][i] = load16<Element>(rows[lane_row] + i * 32);
      }
    }
  }
  __device__ __forceinline__ uint4 operator()(int lane_row, int i) const {
    if constexpr (kInRegisters)
      return registers[lane_row][i];
    else
      return load16<Element>(rows[lane_row] + i * 32);
  }
};

// --- statistics per token --------------------------------------------------------------------------------------------

// One scaler for all channels that a lane brings of a row.
struct TokenScaler {
  Scaler s;
  __device__ __forceinline__ float zero(int) const { return s.zero; }
  __device__ __forceinline__ float inverse(int) const { return s.inverse; }
  __device__ __forceinline__ Scaler scaler(int) const { return s; }
};

// The same of codes by thresholds.
struct TokenThresholds {
  uint32_t at[3];
  __device__ __forceinline__ uint32_t threshold(int nth, int) const { return at[nth]; }
};
template <class Places, class Element>
using TokenCoder = std::conditional_t<by_thresholds<typename Places::Quant, Element>(), TokenThresholds, TokenScaler>;

// From the lane of the row that run_words it.
__device__ __forceinline__ void broadcast(const Scaler& s, int from, TokenScaler& all) {
  all.s = {__shfl_sync(~0u, s.zero, from), __shfl_sync(~0u, s.scale, from), __shfl_sync(~0u, s.inverse, from)};
}
__device__ __forceinline__ void broadcast(const uint32_t (&thresholds)[2], int from, TokenThresholds& all) {
  const uint32_t first = __shfl_sync(~0u, thresholds[0], from), last = __shfl_sync(~0u, thresholds[1], from);
  all = {__byte_perm(first, 0, 0x1010), __byte_perm(first, 0, 0x3232), __byte_perm(last, 0, 0x1010)};
}

// Scalers of a lane's rows, whose vectors are those of one group. A row's four lanes know the same extremes: each makes the scaler
// of another row and writes its params.
template <class Places, class Element, int kCount>
__device__ __forceinline__ void token_scalers(const LaneVectors<Places, Element, kCount>& vectors, int token, int x, uint8_t* block,
                                              TokenCoder<Places, Element> (&scalers)[Places::kLaneRows]) {
  using Quant = typename Places::Quant;
  constexpr int kLaneRows = Places::kLaneRows;
  const int lane = threadIdx.x % 32, mine = lane % kLaneRows;
  Range<Element> own;
#pragma unroll
  for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
    Range<Element> range;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint4 v = vectors(lane_row, i);
      if (i == 0) range = {v.x, v.x};
      range.include(v.x), range.include(v.y), range.include(v.z), range.include(v.w);
    }
    range.include_lane(1);
    range.include_lane(2);
    if (lane_row == 0 || lane_row == mine) own = range;
  }
  __half params[2];
  const Scaler s = make_scaler<Quant>(own.lowest(), own.highest(), params);
  if (lane % 4 < kLaneRows) {
#pragma unroll
    for (int kind = 0; kind < Quant::kParams; ++kind)
      *reinterpret_cast<__half*>(block + Places::param_offset(kind, token + mine * 8 + lane / 4, x * 32)) = params[kind];
  }
  const int row = lane / 4 * 4;
  if constexpr (by_thresholds<Quant, Element>()) {
    const uint32_t thresholds[2] = {threshold<1>(s.zero, s.scale) | threshold<2>(s.zero, s.scale) << 16, threshold<3>(s.zero, s.scale)};
    __syncwarp();  // the division, or a search, may have split the warp
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) broadcast(thresholds, row + lane_row, scalers[lane_row]);
  } else {
    __syncwarp();
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) broadcast(s, row + lane_row, scalers[lane_row]);
  }
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

template <class Element>
__device__ __forceinline__ void unpack_vector(const uint4& v, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats(component(v, i), Element());
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

// get(index) of `count` that are in registers, where a loop is not unrolled.
template <int kCount, class Get>
__device__ __forceinline__ auto picked(Get&& get, int index) {
  auto x = get(0);
#pragma unroll
  for (int i = 1; i < kCount; ++i)
    if (i == index) x = get(i);
  return x;
}

// A lane's words of 32 channels. Ties are looked for in all of its rows first: one branch, seldom taken, whose code is small.
template <class Places, class Element, class Vector, class Scalers>
__device__ __forceinline__ void encode_words(Vector&& vector, Scalers&& scalers, uint32_t (&words)[Places::kWordsPerRun]) {
  using Quant = typename Places::Quant;
  Fields<Places> fields;
  float values[8];
  uint32_t codes[8];
  uint32_t close = 0;  // a bit for each lane_row
#pragma unroll
  for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
    unpack_vector<Element>(vector(lane_row), values);
    close |= encode<Quant>(values, scalers(lane_row), codes) ? 1 << lane_row : 0;
    fields.add(lane_row, codes);
  }
  if (close) {
#pragma unroll 1
    for (int pair = 0; pair < Places::kLaneRows * 4; ++pair) {
      const int lane_row = pair / 4, j = pair % 4;
      if ((close >> lane_row & 1) == 0) continue;
      const float2 x = to_floats(component(picked<Places::kLaneRows>(vector, lane_row), j), Element());
      const auto s = picked<Places::kLaneRows>(scalers, lane_row);
      fields.change(lane_row, 2 * j, correction<Quant>(x.x, s, 2 * j));
      fields.change(lane_row, 2 * j + 1, correction<Quant>(x.y, s, 2 * j + 1));
    }
  }
#pragma unroll
  for (int w = 0; w < Places::kWordsPerRun; ++w) words[w] = fields.word(w);
}

// The same by thresholds.
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

// Packs 32 * kCount channels from 32 * x of the tile at `token`. `vector(lane_row, i)` gives what the lane brings of the i-th 32,
// `scalers(lane_row, i)` what quantizes it.
template <class Places, class Element, int kCount, class Vector, class Scalers>
__device__ __forceinline__ void pack_chunk(Vector&& vector, int token, int x, uint8_t* block, Scalers&& scalers) {
  using Quant = typename Places::Quant;
  constexpr int kStore = store_words<Places, kCount>();
  uint32_t words[kCount * Places::kWordsPerRun];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32_t run_words[Places::kWordsPerRun];
    const auto run = [&](int lane_row) { return vector(lane_row, i); };
    const auto coders = [&](int lane_row) { return scalers(lane_row, i); };
    if constexpr (by_thresholds<Quant, Element>()) {
      count_words<Places>(run, coders, run_words);
    } else if constexpr (Quant::kQuantized) {
      encode_words<Places, Element>(run, coders, run_words);
    } else {
      uint32_t pairs[Places::kLaneRows][4];
#pragma unroll
      for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row)
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[lane_row][j] = component(run(lane_row), j);
      assemble_pairs<Places>(pairs, run_words);
    }
    if constexpr (!Places::kKey) __syncwarp();  // the division may have split the warp
#pragma unroll
    for (int w = 0; w < Places::kWordsPerRun; ++w)
      words[i * Places::kWordsPerRun + w] = Places::kKey ? run_words[w] : ptx::transpose(run_words[w]);
#pragma unroll
    for (int w = 0; w < kCount * Places::kWordsPerRun; w += kStore)  // as soon as its last word is run_words
      if ((w + kStore - 1) / Places::kWordsPerRun == i)
        store_words_at<kStore>(block + Places::word_offset(token, x + w / Places::kWordsPerRun, w % Places::kWordsPerRun, threadIdx.x % 32),
                               words + w);
  }
}

// K per channel, once its scalers are known: warps share (tile, chunk) pairs.
template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void pack_by_channel(KRow&& k_row, uint8_t* block, const uint8_t* smem) {
  using Places = kvgen::Places<Format, Which::key>;
  using Element = typename Format::Element;
  constexpr int kChunk = greatest_common_divisor(2, Places::kChannelRuns);  // stores are wide, and loads few enough for registers
  constexpr int kChunks = Places::kChannelRuns / kChunk;
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < Format::kTokens / Places::kTileTokens * kChunks; item += kThreads / 32) {
    const int token = item / kChunks * Places::kTileTokens, x = item % kChunks * kChunk;
    const int first = token / Places::Quant::kGroup * Format::kHeadDim + x * 32 + threadIdx.x % 4 * 8;
    const LaneVectors<Places, Element, kChunk> vectors(k_row, token, x);
    pack_chunk<Places, Element, kChunk>(vectors, token, x, block, [&](int, int i) { return ChannelCoder<Format>(smem, first + i * 32); });
  }
}

// K or V per token, or not quantized: each warp packs whole tiles.
template <class Format, Which kWhich, int kThreads, class Row>
__device__ __forceinline__ void pack_by_token(Row&& row, uint8_t* block) {
  using Places = kvgen::Places<Format, kWhich>;
  using Element = typename Format::Element;
  using Quant = typename Places::Quant;
  constexpr int kGroupRuns = Quant::kQuantized ? Quant::kGroup / 32 : greatest_common_divisor(2, Places::kChannelRuns);
  using Group = LaneVectors<Places, Element, kGroupRuns>;
  constexpr int kChunk = Group::kInRegisters ? kGroupRuns : greatest_common_divisor(chunk_runs<Places>(), kGroupRuns);
#pragma unroll 1
  for (int token = threadIdx.x / 32 * Places::kTileTokens; token < Format::kTokens; token += kThreads / 32 * Places::kTileTokens) {
#pragma unroll 1
    for (int start = 0; start < Places::kChannelRuns; start += kGroupRuns) {
      const Group vectors(row, token, start);
      TokenCoder<Places, Element> scalers[Places::kLaneRows];
      if constexpr (Quant::kQuantized) token_scalers(vectors, token, start, block, scalers);
#pragma unroll 1
      for (int x = 0; x < kGroupRuns; x += kChunk)
        pack_chunk<Places, Element, kChunk>([&](int lane_row, int i) { return vectors(lane_row, (Group::kInRegisters ? 0 : x) + i); },
                                            token, start + x, block, [&](int lane_row, int) { return scalers[lane_row]; });
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
