// Boosted channels of K (Kitty): chooses them for every group of tokens, and packs their codes of 4 bits.
#pragma once
#include "kvgen/format/places.cuh"
#include "kvgen/pack/scalers.cuh"

namespace kvgen::packing {

// Shared memory behind that of ChannelStats: sums of |x| over a quarter of a group's tokens each, a sort key per channel of a group, and
// per group which channels are chosen and the boost index.
template <class Format>
struct BoostStats {
  static constexpr bool kUsed = Format::kBoosted > 0;
  static constexpr int kDim = Format::kHeadDim;
  static constexpr int kGroups = ChannelStats<Format, Which::key>::kGroups;
  static constexpr int kSlices = kUsed && Format::kSelect == Select::mean_abs ? 4 : 0;
  static constexpr int kSums = ChannelStats<Format, Which::key>::kBytes;
  static constexpr int kKeys = kSums + kSlices * kDim * 8;
  static constexpr int kChosen = kKeys + (kUsed && Format::kSelect != Select::fixed ? kDim * 8 : 0);
  static constexpr int kIndex = kChosen + (kUsed ? kGroups * kDim : 0);
  static constexpr int kEnd = kIndex + (kUsed ? kGroups * Format::kBoosted : 0);
};

// The largest code of the i-th scaler of K or V.
template <class Format, Which kWhich>
__device__ __forceinline__ float levels_of(const uint8_t* smem, int i) {
  using Codec = typename Places<Format, kWhich>::Codec;
  if constexpr (Format::kBoosted > 0 && kWhich == Which::key)
    return smem[BoostStats<Format>::kChosen + i] ? Codec::kMaxBoosted : Codec::kMaxCode;
  return Codec::kMaxCode;
}

// Numbers that are not negative, as integers of the same order. NaN is ordered as well, so the number of chosen channels is fixed.
__device__ __forceinline__ uint64_t sort_key(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }

// Sums |x| of every channel over a slice of a group's tokens. fp64 sums of fp16 are exact, so their order does not matter.
template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void sum_magnitudes(KRow&& k_row, int group, uint8_t* smem) {
  using Stats = BoostStats<Format>;
  using Element = typename Format::Element;
  constexpr int kPairs = Stats::kDim / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < Stats::kSlices * kPairs; i += kThreads) {
    const int slice = i / kPairs, channel = i % kPairs * 2;
    double sums[2] = {0, 0};
#pragma unroll 8
    for (int token = slice; token < Format::Key::kGroup; token += Stats::kSlices) {
      const Element* at = k_row(group * Format::Key::kGroup + token) + channel;
      const float2 x = to_floats<Element>(*reinterpret_cast<const uint32_t*>(at));
      sums[0] += static_cast<double>(fabsf(x.x)), sums[1] += static_cast<double>(fabsf(x.y));
    }
    double* to = reinterpret_cast<double*>(smem + Stats::kSums) + slice * Stats::kDim + channel;
    to[0] = sums[0], to[1] = sums[1];
  }
}

// Computes the sort keys of a group's channels, by which the largest are chosen.
template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void channel_keys(KRow&& k_row, int group, uint8_t* smem) {
  using Stats = BoostStats<Format>;
  constexpr bool kMean = Format::kSelect == Select::mean_abs;
  if constexpr (kMean) {
    sum_magnitudes<Format, kThreads>(k_row, group, smem);
    __syncthreads();
  }
  const double* sums = reinterpret_cast<const double*>(smem + Stats::kSums);
  for (int channel = threadIdx.x; channel < Stats::kDim; channel += kThreads) {
    double key = 0;
    if constexpr (kMean) {
      for (int slice = 0; slice < Stats::kSlices; ++slice) key += sums[slice * Stats::kDim + channel];
    } else {
      const float2 extremes = channel_extremes<Format, Which::key>(smem, group, channel);
      key = __fsub_rn(extremes.y, extremes.x);
    }
    reinterpret_cast<uint64_t*>(smem + Stats::kKeys)[channel] = sort_key(key);
  }
}

// The number of channels that are chosen before this one: those with larger keys, and of equal ones the lower.
template <class Format>
__device__ __forceinline__ int rank_of(const uint8_t* smem, int channel) {
  using Stats = BoostStats<Format>;
  if constexpr (Format::kSelect == Select::fixed) return channel;
  const uint64_t* keys = reinterpret_cast<const uint64_t*>(smem + Stats::kKeys);
  const uint64_t mine = keys[channel];
  int rank = 0;
#pragma unroll 4
  for (int other = 0; other < Stats::kDim; ++other) rank += keys[other] > mine || (keys[other] == mine && other < channel);
  return rank;
}

// Chooses the boosted channels of every group: in shared memory and, as boost index, in the block. Ends with a barrier.
template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void select_boosted(KRow&& k_row, uint8_t* block, uint8_t* smem) {
  using Stats = BoostStats<Format>;
#pragma unroll 1
  for (int group = 0; group < Stats::kGroups; ++group) {
    uint8_t *chosen = smem + Stats::kChosen + group * Stats::kDim, *index = smem + Stats::kIndex + group * Format::kBoosted;
    if constexpr (Format::kSelect != Select::fixed) {
      channel_keys<Format, kThreads>(k_row, group, smem);
      __syncthreads();
    }
    for (int channel = threadIdx.x; channel < Stats::kDim; channel += kThreads)
      chosen[channel] = rank_of<Format>(smem, channel) < Format::kBoosted;
    __syncthreads();
    for (int channel = threadIdx.x; channel < Stats::kDim; channel += kThreads) {
      if (!chosen[channel]) continue;
      int position = 0;
      for (int other = 0; other < channel; ++other) position += chosen[other];
      index[position] = block[BoostPlaces<Format>::index_offset(group * Format::Key::kGroup, position)] = channel;
    }
  }
  __syncthreads();
}

// Packs the boosted channels, after the codes of 2 bits of all channels and a barrier: the lower two bits replace theirs, the upper two
// are the boost codes. A lane packs rows g, g + 8, g + 16 and g + 24 of four channels; their lower bits are one byte per channel.
template <class Format, int kThreads, class KRow>
__device__ __forceinline__ void pack_boosted(KRow&& k_row, uint8_t* block, const uint8_t* smem) {
  using Key = typename Format::Key;
  using Places = kvgen::Places<Format, Which::key>;
  using Boost = BoostPlaces<Format>;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < Format::kTokens / 32 * Boost::kSteps; item += kThreads / 32) {
    const int token = item / Boost::kSteps * 32, step = item % Boost::kSteps, row = token + lane / 4;
    const uint8_t* index = smem + BoostStats<Format>::kIndex + token / Key::kGroup * Format::kBoosted;
    uint32_t word = 0;
#pragma unroll 1
    for (int byte = 0; byte < 4; ++byte) {
      const int channel = index[Boost::position(step, lane, byte)];
      const float scale = to_float(*reinterpret_cast<const __half*>(block + Places::param_offset(0, token, channel)));
      const float zero = to_float(*reinterpret_cast<const __half*>(block + Places::param_offset(1, token, channel)));
      uint32_t low = 0, high = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = Key::Codec::template exact_code<Key::Codec::kMaxBoosted>(to_float(k_row(row + 8 * i)[channel]), zero, scale);
        low |= (code & 3) << 2 * i, high |= code >> 2 << 2 * i;
      }
      block[Places::byte_offset(row, channel)] = static_cast<uint8_t>(low);
      word |= high << 8 * byte;
    }
    *reinterpret_cast<uint32_t*>(block + Boost::word_offset(token, step, lane)) = word;
  }
}

}  // namespace kvgen::packing
