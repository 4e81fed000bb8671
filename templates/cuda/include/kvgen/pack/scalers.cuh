// Scalers of groups: the extremes of their elements, and params per token and per channel.
#pragma once
#include "kvgen/format/elements.cuh"
#include "kvgen/format/places.cuh"
#include "kvgen/format/static.cuh"
#include "kvgen/pack/words.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen::packing {

// Minimum and maximum of many 16-bit elements, two to a word.

template <class Element>
__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
  const Pair<Element> y = __hmin2(as_pair<Element>(a), as_pair<Element>(b));
  return reinterpret_cast<const uint32_t&>(y);
}
template <class Element>
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  const Pair<Element> y = __hmax2(as_pair<Element>(a), as_pair<Element>(b));
  return reinterpret_cast<const uint32_t&>(y);
}

// Extremes of two interleaved series of 16-bit elements.
template <class Element>
struct Range {
  uint32_t low, high;

  __device__ __forceinline__ void include(uint32_t other_low, uint32_t other_high) {
    low = smaller<Element>(low, other_low);
    high = larger<Element>(high, other_high);
  }
  __device__ __forceinline__ void include(uint32_t pair) { include(pair, pair); }
  __device__ __forceinline__ void include_lane(int mask) { include(__shfl_xor_sync(~0u, low, mask), __shfl_xor_sync(~0u, high, mask)); }
  __device__ __forceinline__ float lowest() const {
    const float2 x = to_floats<Element>(low);
    return fminf(x.x, x.y);
  }
  __device__ __forceinline__ float highest() const {
    const float2 x = to_floats<Element>(high);
    return fmaxf(x.x, x.y);
  }
};

template <class Element>
__device__ __forceinline__ uint4 load16(const Element* address) {
  return *reinterpret_cast<const uint4*>(address);
}
__device__ __forceinline__ uint32_t component(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A lane's rows of a tile, and their scalers where scales are per token.

// Vectors of eight channels that a lane keeps in registers at once.
constexpr int kMaxHeldVectors = 8;

template <class Places, class Element, class Row>
__device__ __forceinline__ void lane_rows(Row&& row, int token, const Element* (&rows)[Places::kLaneRows]) {
#pragma unroll
  for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) rows[lane_row] = row(token + lane_row * 8 + threadIdx.x % 32 / 4);
}

// A lane's vectors of kCount runs of channels of its rows, from run x on. If they fit, they are loaded together and stay in registers;
// otherwise each is loaded where it is used.
template <class Places, class Element, int kCount>
struct LaneVectors {
  using Runs = typename Places::Runs;
  static constexpr bool kInRegisters = Places::kLaneRows * kCount <= kMaxHeldVectors;
  int first;  // run
  const Element* rows[Places::kLaneRows];
  uint4 registers[kInRegisters ? Places::kLaneRows : 1][kInRegisters ? kCount : 1];

  template <class Row>
  __device__ __forceinline__ LaneVectors(Row&& row, int token, int x) : first(x) {
    lane_rows<Places>(row, token, rows);
#pragma unroll
    for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
      if constexpr (Runs::kHalf == 0) rows[lane_row] = Runs::at(rows[lane_row], x, threadIdx.x % 4);
      if constexpr (kInRegisters) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) registers[lane_row][i] = load(lane_row, i);
      }
    }
  }
  __device__ __forceinline__ uint4 operator()(int lane_row, int i) const {
    if constexpr (kInRegisters)
      return registers[lane_row][i];
    else
      return load(lane_row, i);
  }

 private:
  __device__ __forceinline__ uint4 load(int lane_row, int i) const {
    if constexpr (Runs::kHalf == 0) return load16<Element>(rows[lane_row] + i * 32);
    return load_run(Runs::at(rows[lane_row], first + i, threadIdx.x % 4), Runs::is_half(first + i));
  }
};

// One scaler for all channels of a row.
struct TokenScaler {
  Scaler s;
  __device__ __forceinline__ float zero(int) const { return s.zero; }
  __device__ __forceinline__ float inverse(int) const { return s.inverse; }
  __device__ __forceinline__ Scaler scaler(int) const { return s; }
};

// The same for coding by thresholds.
struct TokenThresholds {
  uint32_t at[3];
  __device__ __forceinline__ uint32_t threshold(int nth, int) const { return at[nth]; }
};
template <class Places, class Element>
using TokenCoder = std::conditional_t<Places::Codec::template kByThresholds<Element>, TokenThresholds, TokenScaler>;

// Broadcasts a scaler from the lane that computed it to the lanes of its row.
__device__ __forceinline__ void broadcast(const Scaler& s, int from, TokenScaler& all) {
  all.s = {__shfl_sync(~0u, s.zero, from), __shfl_sync(~0u, s.scale, from), __shfl_sync(~0u, s.inverse, from)};
}
__device__ __forceinline__ void broadcast(const uint32_t (&thresholds)[2], int from, TokenThresholds& all) {
  const uint32_t first = __shfl_sync(~0u, thresholds[0], from), last = __shfl_sync(~0u, thresholds[1], from);
  all = {__byte_perm(first, 0, 0x1010), __byte_perm(first, 0, 0x3232), __byte_perm(last, 0, 0x1010)};
}

// Which tokens of a tile are written: all.
struct WholeTile {
  static constexpr bool kWhole = true;
};

// Those in [from, to), which count from the block's first: the words that hold their codes have bits of other tokens, too.
struct PartOfTile {
  static constexpr bool kWhole = false;
  int from, to;

  __device__ __forceinline__ bool has(int token) const { return from <= token && token < to; }
  // The bits of these tokens in a lane's word of a run, before words of V are transposed.
  template <class Places>
  __device__ __forceinline__ uint32_t bits(int token, int word) const {
    const int row = token + static_cast<int>(threadIdx.x % 32 / 4);
    if constexpr (!Places::Quant::Codec::kQuantized) return has(row + Places::pair(word).lane_row * 8) ? ~0u : 0;
    uint32_t found = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int f = 0; f < Places::kPerByte; ++f)
        if (has(row + Places::element(word, b, f).lane_row * 8)) found |= ((1u << Places::kBits % 32) - 1) << (8 * b + Places::kBits * f);
    return found;
  }
};

// Computes the scalers of a lane's rows, whose vectors belong to one group. The four lanes of a row have the same extremes, so each of them
// computes the scaler of another row and writes its params. `scales` are the head's static ones.
template <class Places, class Element, int kCount, class Part>
__device__ __forceinline__ void token_scalers(const LaneVectors<Places, Element, kCount>& vectors, int token, int x, uint8_t* block,
                                              const float* scales, TokenCoder<Places, Element> (&scalers)[Places::kLaneRows], Part part) {
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
  using Param = typename Quant::Codec::Param;
  Param params[2];
  const Scaler s = [&] {
    if constexpr (kTwoLevels<Quant>)
      return Quant::Codec::make_scaler(own.lowest(), own.highest(), params, *scales);
    else
      return Quant::Codec::make_scaler(own.lowest(), own.highest(), params);
  }();
  bool writes = lane % 4 < kLaneRows;
  if constexpr (!Part::kWhole) writes = writes && part.has(token + mine * 8 + lane / 4);
  if (writes) {
#pragma unroll
    for (int kind = 0; kind < Quant::kParams; ++kind)
      *reinterpret_cast<Param*>(block + Places::param_offset(kind, token + mine * 8 + lane / 4, Places::Runs::channel(x))) = params[kind];
  }
  const int row = lane / 4 * 4;
  if constexpr (Quant::Codec::template kByThresholds<Element>) {
    const uint32_t thresholds[2] = {threshold<1>(s.zero, s.scale) | threshold<2>(s.zero, s.scale) << 16, threshold<3>(s.zero, s.scale)};
    __syncwarp();  // the division or the search may have diverged the warp
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) broadcast(thresholds, row + lane_row, scalers[lane_row]);
  } else {
    __syncwarp();
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) broadcast(s, row + lane_row, scalers[lane_row]);
  }
}

// Scalers of K or V per channel. They need the extremes of the whole block before its first token can be packed. The boosted
// channels of K are chosen before that, too.

// Shared memory: the extremes of every channel in runs of 16 tokens, then the scalers (or thresholds, in the same place) of every group.
template <class Format, Which kWhich>
struct ChannelStats {
  using Quant = typename Places<Format, kWhich>::Quant;
  static constexpr int kDim = Format::kHeadDim;
  static constexpr bool kUsed = Quant::kPerChannel;
  static constexpr int kRuns = kUsed ? Format::kTokens / 16 : 0;
  static constexpr int kGroups = kUsed ? Format::kTokens / Quant::kGroup : 0;
  static constexpr int kScalers = kGroups * kDim;
  static constexpr int kHighs = kRuns * kDim * 2;
  static constexpr int kScales = 2 * kHighs;
  static constexpr int kInverses = kScales + kScalers * 4;
  static constexpr int kZeros = kInverses + kScalers * 4;
  static constexpr int kBytes = kZeros + kScalers * 4;
};

// The largest power of two that is not above n.
constexpr int power_of_two_within(int n) { return n < 2 ? n : 2 * power_of_two_within(n / 2); }

template <class Format, Which kWhich, int kThreads, class Row>
__device__ __forceinline__ void channel_ranges(Row&& token_row, uint8_t* smem) {
  using Stats = ChannelStats<Format, kWhich>;
  using Element = typename Format::Element;
  constexpr int kParts = ceil_div(Format::kHeadDim, 256);     // of a row, which a warp loads one at a time
  constexpr int kRowLanes = Format::kHeadDim / 8 / kParts;    // lanes that load a part
  constexpr int kRows = power_of_two_within(32 / kRowLanes);  // rows per load of the warp
  const int lane = threadIdx.x % 32;
  const int row = min(lane / kRowLanes, kRows - 1);  // surplus lanes repeat the last row
  const int first_column = lane % kRowLanes * 8;
  static_assert(Format::kHeadDim / 8 % kParts == 0);
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < Stats::kRuns * kParts; item += kThreads / 32) {
    const int run = item / kParts, column = first_column + item % kParts * kRowLanes * 8;
    Range<Element> range[4];
#pragma unroll
    for (int step = 0; step < 16 / kRows; ++step) {
      const uint4 v = load16<Element>(token_row(run * 16 + step * kRows + row) + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = component(v, i);
        if (step == 0)
          range[i] = {pair, pair};
        else
          range[i].include(pair);
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

// The smallest and the largest value of a channel in a group.
template <class Format, Which kWhich>
__device__ __forceinline__ float2 channel_extremes(const uint8_t* smem, int group, int channel) {
  using Stats = ChannelStats<Format, kWhich>;
  using Element = typename Format::Element;
  constexpr int kRunsPerGroup = Stats::kRuns / Stats::kGroups;
  const Element* lows = reinterpret_cast<const Element*>(smem);
  const Element* highs = reinterpret_cast<const Element*>(smem + Stats::kHighs);
  const int first = group * kRunsPerGroup * Format::kHeadDim + channel;
  float low = to_float(lows[first]), high = to_float(highs[first]);
#pragma unroll
  for (int run = 1; run < kRunsPerGroup; ++run) {
    low = fminf(low, to_float(lows[first + run * Format::kHeadDim]));
    high = fmaxf(high, to_float(highs[first + run * Format::kHeadDim]));
  }
  return make_float2(low, high);
}

// Computes the scalers of every channel and group: in shared memory and, as params, in the block. `levels(i)` is the largest code of the
// i-th scaler.
template <class Format, Which kWhich, int kThreads, class Levels>
__device__ __forceinline__ void channel_scalers(uint8_t* block, uint8_t* smem, Levels&& levels) {
  using Stats = ChannelStats<Format, kWhich>;
  using Element = typename Format::Element;
  using Places = kvgen::Places<Format, kWhich>;
  using Quant = typename Places::Quant;
#pragma unroll 1
  for (int i = threadIdx.x; i < Stats::kScalers; i += kThreads) {
    const int group = i / Format::kHeadDim, channel = i % Format::kHeadDim;
    const float2 extremes = channel_extremes<Format, kWhich>(smem, group, channel);
    __half params[2];
    const Scaler s = Quant::Codec::make_scaler(extremes.x, extremes.y, params, levels(i));
    if constexpr (Quant::Codec::template kByThresholds<Element>) {
      uint16_t* thresholds = reinterpret_cast<uint16_t*>(smem + Stats::kScales) + i;
      thresholds[0] = threshold<1>(s.zero, s.scale);
      thresholds[Stats::kScalers] = threshold<2>(s.zero, s.scale);
      thresholds[2 * Stats::kScalers] = threshold<3>(s.zero, s.scale);
    } else {
      reinterpret_cast<float*>(smem + Stats::kScales)[i] = s.scale;
      reinterpret_cast<float*>(smem + Stats::kInverses)[i] = s.inverse;
      reinterpret_cast<float*>(smem + Stats::kZeros)[i] = s.zero;
    }
#pragma unroll
    for (int kind = 0; kind < Quant::kParams; ++kind)
      *reinterpret_cast<__half*>(block + Places::param_offset(kind, group * Quant::kGroup, channel)) = params[kind];
  }
}

// The scalers of eight consecutive channels, or of four of a half run, twice. Encoding reads the registers; the rare corrections read
// shared memory.
template <class Stats>
struct ChannelScalers {
  const uint8_t* at;
  bool half;
  float inverses[8], zeros[8];

  __device__ __forceinline__ ChannelScalers(const uint8_t* smem, int channel, bool half_) : at(smem + channel * 4), half(half_) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      reinterpret_cast<float4&>(inverses[i]) = *reinterpret_cast<const float4*>(at + Stats::kInverses + (half ? 0 : i) * 4);
      reinterpret_cast<float4&>(zeros[i]) = *reinterpret_cast<const float4*>(at + Stats::kZeros + (half ? 0 : i) * 4);
    }
  }
  __device__ __forceinline__ float zero(int i) const { return zeros[i]; }
  __device__ __forceinline__ float inverse(int i) const { return inverses[i]; }
  __device__ __forceinline__ Scaler scaler(int i) const {
    if (half) i %= 4;
    return {stored(Stats::kZeros, i), stored(Stats::kScales, i), stored(Stats::kInverses, i)};
  }
  __device__ __forceinline__ float stored(int which, int i) const { return reinterpret_cast<const float*>(at + which)[i]; }
};

// The thresholds of eight consecutive channels, or of four of a half run, twice.
template <class Stats>
struct ChannelThresholds {
  uint4 at[3];

  __device__ __forceinline__ ChannelThresholds(const uint8_t* smem, int channel, bool half) {
#pragma unroll
    for (int nth = 0; nth < 3; ++nth) at[nth] = load_run(smem + Stats::kScales + (nth * Stats::kScalers + channel) * 2, half);
  }
  __device__ __forceinline__ uint32_t threshold(int nth, int pair) const { return component(at[nth], pair); }
};

template <class Format, Which kWhich>
using ChannelCoder = std::conditional_t<Places<Format, kWhich>::Codec::template kByThresholds<typename Format::Element>,
                                        ChannelThresholds<ChannelStats<Format, kWhich>>, ChannelScalers<ChannelStats<Format, kWhich>>>;

}  // namespace kvgen::packing
