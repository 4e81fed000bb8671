// The order of codes and params in a block, as kvgen/format/places.py has it: how a lane reads its words, and where the packer puts them.
#pragma once
#include <type_traits>

#include "kvgen/codec/integers.cuh"
#include "kvgen/codec/unquantized.cuh"

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

// Visits every (tile, step) pair of an operand in the order of a lane's words: `visit(pair, words)`.
template <class Codec, int kPairs, class Visit>
__device__ __forceinline__ void visit_words(uint32_t codes, int lane, Visit&& visit) {
  constexpr int kWords = Codec::kWords;
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
template <class Codec, int kPairs, int kHalfStride, class Visit>
__device__ __forceinline__ void visit_subtile(uint32_t codes, int lane, Visit&& visit) {
  if constexpr (kHalfStride == 0) {
    visit_words<Codec, kPairs>(codes, lane, visit);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visit_words<Codec, kPairs / 2>(codes + half * kHalfStride, lane,
                                     [&](int pair, const uint32_t* words) { visit(half * (kPairs / 2) + pair, words); });
  }
}

enum class Which { key, value };

// K or V of a format. Tokens come in tiles. Of every run of channels (ChannelRuns), lane (g, t) = (lane / 4, lane % 4) loads its eight
// channels, of the tile's rows g, g + 8, ... (lane rows 0, 1, ...), and stores them as kWordsPerRun words; of a half run it has four
// channels, which are the first half of these words.
template <class Format, Which kWhich>
struct Places {
  static constexpr bool kKey = kWhich == Which::key;
  using Quant = std::conditional_t<kKey, typename Format::Key, typename Format::Value>;
  using Codec = typename Quant::Codec;
  static constexpr int kBits = Codec::kBits, kParamBytes = sizeof(typename Codec::Param);
  static constexpr int kPerByte = Codec::kPerByte;
  using Runs = ChannelRuns<Quant, Format::kHeadDim>;
  static constexpr int kTileTokens = kKey ? Codec::kRows : 16;
  // Params per channel: the tokens of a tile that surely share them, and whether tiles cut groups of tokens.
  static constexpr int kParamTokens = greatest_common_divisor(Quant::kGroup, kTileTokens);
  static constexpr bool kSplitsGroups = Quant::kPerChannel && kParamTokens < Quant::kGroup && kParamTokens < kTileTokens;
  static constexpr int kLaneRows = kTileTokens / 8;
  static constexpr int kTiles = Format::kSubtile / kTileTokens;  // per sub-tile
  static constexpr int kWordsPerRun = kTileTokens * kBits / 32;  // of 32 channels, per lane
  static constexpr int kTileWords = ceil_div(kTileTokens * Format::kHeadDim * kBits, 1024);
  static constexpr bool kSharedWords = Runs::kHalf > 0 && kWordsPerRun == 1;  // by two half runs of a 2-bit V
  static constexpr int kVector = vector_words(kTileWords * kTiles);
  static_assert(kTiles >= 1, "a two-bit K needs blocks of 32 tokens or more");

  __host__ __device__ static constexpr int subtile_offset(int token) {
    return Format::kHeaderBytes + token / Format::kSubtile * Format::kSubtileBytes;
  }

  // Words of a lane in run x.
  __host__ __device__ static constexpr int run_words(int x) { return Runs::is_half(x) ? ceil_div(kWordsPerRun, 2) : kWordsPerRun; }
  // The first bit of run x in every byte of its words: a half run may have the upper half of words whose lower half is another's.
  __host__ __device__ static constexpr int first_bit(int x) { return kSharedWords && Runs::is_half(x) ? Runs::tile(x) % 2 * 4 : 0; }
  // Byte offset in the block of a lane's word. The words of a lane in a sub-tile are ordered by tile, run of channels, and word.
  __host__ __device__ static constexpr int word_offset(int token, int x, int word, int lane) {
    const int before = Runs::kHalf ? Runs::tile(x) * kWordsPerRun / 2 : x * kWordsPerRun;
    const int index = token % Format::kSubtile / kTileTokens * kTileWords + before + word;
    return subtile_offset(token) + Quant::kCodes + ((index / kVector * 32 + lane) * kVector + index % kVector) * 4;
  }

  // The element in a field of a lane's word: field `field` of byte `byte` is the lane's channel `channel` of row g + 8 * `lane_row`. Words
  // of V are transposed afterwards as 8x8 matrices of 16-bit elements, which turns rows = tokens into rows = channels.
  struct Element {
    int lane_row, channel;
  };
  __host__ __device__ static constexpr Element element(int word, int byte, int field) {
    if constexpr (kKey) {
      constexpr int kWords = Codec::kWords;
      return {word % kWords * kPerByte + field, 4 * (word / kWords) + 2 * (byte % 2) + byte / 2};
    } else {
      return {byte % 2, 2 * (word * kPerByte + field) + byte / 2};
    }
  }
  // The same for 16-bit elements: a word has the lane's two channels from 2 * `channel` on, of row g + 8 * `lane_row`.
  __host__ __device__ static constexpr Element pair(int word) {
    if constexpr (kKey) return {word % 2, word / 4 * 2 + word % 4 / 2};
    return {word % 4 / 2, word / 4 * 2 + word % 2};
  }

  // Of a 2-bit K: the byte in the block that has a channel's codes of `token`, one of a tile's first eight, and of the rows 8, 16 and 24
  // further.
  __host__ __device__ static constexpr int byte_offset(int token, int channel) {
    const int x = Runs::run_of(channel / 16), place = channel - Runs::channel(x), each = Runs::lane_channels(x), c = place % each;
    return word_offset(token, x, c / 4, token % 8 * 4 + place / each) + c % 2 * 2 + c % 4 / 2;
  }

  // Byte offset in the block of the scale (kind 0) or zero (kind 1) of an element's group.
  __host__ __device__ static constexpr int param_offset(int kind, int token, int channel) {
    constexpr int kParams = Quant::kParams;
    if constexpr (Quant::kPerChannel) {
      return Quant::kChannelParams + (token / Quant::kGroup * Format::kHeadDim * kParams + channel_param(kind, channel)) * kParamBytes;
    } else {
      const int local = token % Format::kSubtile;
      return subtile_offset(token) + Quant::kTokenParams +
             ((channel / Quant::kGroup * 8 + local % 8) * (Format::kSubtile / 8) + local / 8) * kParams * kParamBytes + kind * kParamBytes;
    }
  }

 private:
  // Index of a channel's param among those of its group of tokens. K: next to the four k-slots that a lane scales. V: lane row g finds rows
  // g, g + 8, ... next to each other.
  __host__ __device__ static constexpr int channel_param(int kind, int channel) {
    constexpr int kParams = Quant::kParams;
    const int x = Runs::run_of(channel / 16), place = channel - Runs::channel(x), each = Runs::lane_channels(x);
    const int tile = Runs::tile(x) + place % each / 4, t = place / each;
    if constexpr (kKey) {
      const int first = Quant::kZero ? 1 - kind : kind;
      return (tile * 4 + t) * 4 * kParams + channel % 4 / 2 * 2 * kParams + first * 2 + channel % 2;
    } else {
      const int row = 16 * tile + channel % 4 / 2 * 8 + 2 * t + channel % 2;
      return (row % 8 * (Format::kHeadDim / 8) + row / 8) * kParams + kind;
    }
  }
};

// The upper bits of boosted channels, in the order of a 2-bit K that has these channels alone: a lane's word of a k-step has rows g, g + 8,
// g + 16 and g + 24 of four boosted channels, one per byte.
template <class Format>
struct BoostPlaces {
  static constexpr int kSteps = Format::kBoosted / 16;
  static constexpr int kVector = vector_words(kSteps);

  // Byte offset in the block of a lane's word, for the 32 tokens from `token` on.
  __host__ __device__ static constexpr int word_offset(int token, int step, int lane) {
    return Places<Format, Which::key>::subtile_offset(token) + Format::kBoostCodes +
           ((step / kVector * 32 + lane) * kVector + step % kVector) * 4;
  }
  // The channel of a byte of that word, as a position in the group's boost index.
  __host__ __device__ static constexpr int position(int step, int lane, int byte) {
    return k_slot_channel(step, 2 * (lane % 4) + byte / 2 + 8 * (byte % 2), Format::kBoosted);
  }
  // Byte offset in the block of the index entry.
  __host__ __device__ static constexpr int index_offset(int token, int position) {
    return Format::kBoostIndex + token / Format::Key::kGroup * Format::kBoosted + position;
  }
};

}  // namespace kvgen
