// Scalers of K or V per channel. They need the extremes of the whole block before its first token can be packed. The boosted
// channels of K are chosen before that, too.
#pragma once
#include "kvgen/format/places.cuh"
#include "kvgen/pack/extremes.cuh"
#include "kvgen/pack/thresholds.cuh"

namespace kvgen::packing {

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
  constexpr int kRowLanes = Format::kHeadDim / 8;             // lanes that load a row
  constexpr int kRows = power_of_two_within(32 / kRowLanes);  // rows per load of the warp
  const int lane = threadIdx.x % 32;
  const int row = min(lane / kRowLanes, kRows - 1);  // surplus lanes repeat the last row
  const int column = lane % kRowLanes * 8;
#pragma unroll 1
  for (int run = threadIdx.x / 32; run < Stats::kRuns; run += kThreads / 32) {
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
    const Scaler s = make_scaler<Quant>(extremes.x, extremes.y, params, levels(i));
    if constexpr (by_thresholds<Quant, Element>()) {
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
using ChannelCoder = std::conditional_t<by_thresholds<typename Places<Format, kWhich>::Quant, typename Format::Element>(),
                                        ChannelThresholds<ChannelStats<Format, kWhich>>, ChannelScalers<ChannelStats<Format, kWhich>>>;

}  // namespace kvgen::packing
