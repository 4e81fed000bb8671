// The constants that follow from a schedule and a format: tiles, registers, shared memory. docs/kernels.md defines the terms.
#pragma once
#include <algorithm>

#include "kvgen/format/places.cuh"
#include "kvgen/format/static.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/schedule/work_queue.cuh"

namespace kvgen {

enum class Copy { cp_async, bulk_stage, bulk_tile };  // bulk copies are 1-D, one per stage or one per KV tile
enum class Reduction { last_cta, cluster };           // of the splits of a head

// The schedule as the static kernel runs it.
template <class Schedule_>
struct Static : Schedule_ {
  using Memory = typename Schedule_::StaticMemory;
  static constexpr int kReducedHeads = 1;  // heads whose splits a CTA may have to reduce
};

// The schedule as the planned kernel runs it: the same warps and rings, but no clusters, and cp.async instead of bulk copies, because the
// phases of the bulk copies' barriers would have to be tracked across work tiles.
template <class Schedule_>
struct Planned : Schedule_ {
  using Memory = typename Schedule_::PlannedMemory;
  static constexpr Copy kCopy = Copy::cp_async;
  static constexpr Reduction kReduction = Reduction::last_cta;
  static constexpr int kReducedHeads = 2;  // its first and its last head, reduced at the same time
};

// The channel params of K or V in a KV tile: a set for every kTokens tokens, which lie in one group. The block has one set per group. Where
// tiles neither hold whole groups nor lie within one (48 tokens, or 96 in tiles of 64), a tile may have a copy of its group's set for each
// of several kTokens tokens: it repeats sets.
template <class Quant, int kHeadDim, int kTileTokens>
struct ChannelParams {
  static constexpr int kTokens = greatest_common_divisor(Quant::kGroup, kTileTokens);
  static constexpr int kSetBytes = Quant::kPerChannel ? kHeadDim * Quant::kParams * 2 : 0;
  static constexpr int kBytes = kTileTokens / kTokens * kSetBytes;
  static constexpr bool kRepeats = Quant::kPerChannel && kTokens < Quant::kGroup && kTokens < kTileTokens;
  static_assert(!Quant::kPerChannel || kTokens % 16 == 0);

  // Byte offset of the params of a block's `within`-th tile from the operand's first ones. For tiles that repeat sets it is 0, and
  // `repeated` gives the offset of each set.
  __host__ __device__ static constexpr int offset(int within) {
    return kRepeats ? 0 : within * kTileTokens / std::max(Quant::kGroup, kTileTokens) * kBytes;
  }
  // Byte offset, from the operand's first params, of the set that the tile's `nth` one is a copy of.
  __host__ __device__ static constexpr int repeated(int within, int nth) {
    return (within * kTileTokens + nth * kTokens) / Quant::kGroup * kSetBytes;
  }
};

template <class Format_, class Schedule>
struct Traits : Schedule {
  using Format = Format_;
  using Key = typename Format::Key;
  using Value = typename Format::Value;
  static constexpr int kHeadDim = Format::kHeadDim;
  static constexpr bool kPaged = Format::kPaged;
  static constexpr int kThreads = Schedule::kWarps * 32;
  static constexpr int kReduceThreads = kThreads / Schedule::kReducedHeads;  // threads that reduce the splits of a head

  // Packed-GQA rows are (query, head of the group) pairs, ordered by query. The MMA has them in its 8 columns, so a tile holds 8 rows. A
  // CTA has kQTiles tiles. The rows of a KV head that need more are split into runs, which are CTAs of their own.
  static constexpr int kHeadQRows = Schedule::kGroup * Schedule::kMaxQLen;
  static constexpr int kQTiles = Schedule::kQTiles;
  static constexpr int kRuns = ceil_div(kHeadQRows, 8 * kQTiles);
  static constexpr int kQRows = kRuns == 1 ? kHeadQRows : 8 * kQTiles;  // of a CTA
  // With four query rows or fewer, the 8 columns hold them twice: the first copy serves the tokens of one MMA tile, the second those of the
  // other (or the rounding error of q).
  static constexpr bool kQueryTwice = kQRows <= 4;
  static constexpr int kMTiles = kQueryTwice ? 1 : 2;  // 16-token MMA tiles of a sub-tile whose scores one lane holds
  static constexpr int kTileQRows = kQRows < 8 ? kQRows : 8;
  // K in several groups of channels: the products of both MMA tiles are added in the same registers, each with zeros for the columns that
  // serve the other, since selections would cost more than registers for two queries.
  static constexpr bool kQueryApart = kQueryTwice && Key::Codec::kMix == Mix::none && Key::kPerToken && kHeadDim / Key::kGroup > 1;

  using KeyRuns = ChannelRuns<Key, kHeadDim>;
  using ValueRuns = ChannelRuns<Value, kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;     // k-steps of q * K
  static constexpr int kRowTiles = kHeadDim / 16;  // 16-channel MMA tiles of V
  // Scales of V that multiply the weights after these were transposed, in fp16; others multiply them before, in fp32.
  static constexpr bool kHalfScales = Value::kPerToken && Value::Codec::kHalfScales;
  static constexpr int kValueGroups = Value::kPerToken && !kHalfScales ? kHeadDim / Value::kGroup : 1;  // with weights of their own
  static constexpr int kKeyGroups = Key::kPerToken ? kHeadDim / Key::kGroup : 1;
  static constexpr bool kKeyPerChannel = Key::kPerChannel;
  static constexpr bool kKeyPerToken = Key::kPerToken;
  static constexpr bool kValuePerChannel = Value::kPerChannel;
  static constexpr bool kValuePerToken = Value::kPerToken;
  // Codes that meet the weights with an offset, which is added outside of the MMA.
  static constexpr bool kValueAffine = kValuePerToken || (kStatic<Value> && Value::Codec::kOffset != 0);

  // Without exact q, four rows or fewer meet K's codes of 4 bits or 2 as integers: columns 0..3 have the upper byte of q * scale rounded to
  // 16 bits, columns 4..7 the lower one (keys.cuh). With more rows the integers would take two MMAs, and 8-bit MMAs are slower.
  // q * scale is rounded for every set of channel params of a KV tile, which at 32 tokens or fewer costs more than integers save.
  static constexpr bool kIntegerKeys = kKeyPerChannel && kQueryTwice && !Schedule::kExactQ && Key::Codec::kByteOperands &&
                                       Format::kBoosted == 0 && Schedule::kTileSubtiles > 1 && Key::kGroup % 64 == 0;
  // q * scale is rounded to 16 bits. The rounding error takes part in the MMA where columns are free, or where the schedule pays for more
  // MMAs.
  static constexpr bool kScaledOnce = kStaticAlone<Key> && std::is_same_v<typename Format::Element, Half>;  // bf16 hides that error
  static constexpr bool kCarryError = ((kKeyPerChannel && !kIntegerKeys) || kScaledOnce) && (kQueryTwice || Schedule::kExactQ);
  static constexpr bool kErrorInCopy = kCarryError && kQueryTwice;  // in columns 4..7
  // Products of 4-bit K leave the mixed form after they were added to those with the rounding error, which are half as many.
  static constexpr bool kUnmixedSums = kErrorInCopy && Key::Codec::kMix == Mix::tile;
  // Lanes exchange products through the shared memory of a sub-tile's K codes, if it is large enough.
  static constexpr bool kExchangeShared = (kErrorInCopy || kIntegerKeys) && Key::kCodesBytes >= 1024;
  static constexpr int kClusterSize = Schedule::kReduction == Reduction::cluster ? Schedule::kCluster : 1;  // CTAs of a split
  // A KV tile is the number of tokens that a warp processes at a time.
  static constexpr int kTileTokens = Schedule::kTileSubtiles * 32;
  using KeyChannelParams = ChannelParams<Key, kHeadDim, kTileTokens>;
  using ValueChannelParams = ChannelParams<Value, kHeadDim, kTileTokens>;
  // Sub-tiles that go through the softmax together: they share one overflow test, and independent work hides latency. With one KV tile in
  // flight a step is at most half a tile, so that the other half is in flight. More query rows leave registers for fewer sub-tiles.
  static constexpr bool kShortSteps = (kQTiles == 2 || kValuePerChannel) && Schedule::kTileSubtiles * Schedule::kTilesInFlight < 4;
  static constexpr int kMaxStepSubtiles = kQTiles + kValuePerChannel > 2 || kShortSteps   ? 1
                                          : kQTiles == 2 || Schedule::kTilesInFlight == 1 ? 2
                                                                                          : 4;
  static constexpr int kStepSubtiles = Schedule::kTileSubtiles % 2 ? 1 : std::min(kMaxStepSubtiles, Schedule::kTileSubtiles % 4 ? 2 : 4);
  // K per channel: each group of tokens has its own scales, so a sub-tile has as many sets of query operands as of params. (Two sets may be
  // those of one group.)
  static constexpr int kSubtileKeyGroups = kKeyPerChannel && KeyChannelParams::kTokens == 16 ? 2 : 1;
  // A byte of 2-bit codes of K may have tokens of both groups, and one of two half runs of V channels of two groups.
  static constexpr bool kMixedKeys = kSubtileKeyGroups == 1 || Key::Codec::kMix != Mix::pair;
  static constexpr bool kMixedValues = !ValueRuns::kSplit || Value::Codec::kMix != Mix::pair;
  // Groups of K in a softmax step.
  static constexpr int kStepKeyGroups = kKeyPerChannel ? ceil_div(kStepSubtiles * 32, KeyChannelParams::kTokens) : 1;
  // A KV tile that is longer than a block is gathered from several blocks, which may lie on any pages. Such blocks have no channel params.
  static constexpr bool kGathered = kTileTokens > Format::kTokens;
  static constexpr int kTileBlocks = kGathered ? kTileTokens / Format::kTokens : 1;
  static constexpr int kTilesPerBlock = kGathered ? 1 : Format::kTokens / kTileTokens;
  static constexpr int kTileParamBytes = KeyChannelParams::kBytes + ValueChannelParams::kBytes;
  static constexpr int kTileHeaderBytes = kTileParamBytes + Format::kBoosted;             // channel params and boost index
  static constexpr int kSubtileStride = 32 / Format::kSubtile * Format::kSubtileBytes;    // one sub-tile, or two of 16 tokens
  static constexpr int kHalfStride = Format::kSubtile == 32 ? 0 : Format::kSubtileBytes;  // distance of the two sub-tiles of 16 tokens
  static constexpr int kTileBytes = Schedule::kTileSubtiles * kSubtileStride;
  static constexpr int kSlotBytes = kTileHeaderBytes + kTileBytes;
  // A stage is the unit of waiting and refilling. Sub-tiles of 2-bit codes are stages of their own, so that more bytes are in flight.
  static constexpr int kStageSubtiles =
      Schedule::kCopy == Copy::cp_async && Key::Codec::kNarrow && Value::Codec::kNarrow ? 1 : kStepSubtiles;
  static constexpr int kTileStages = Schedule::kTileSubtiles / kStageSubtiles;
  static constexpr int kStageBytes = kStageSubtiles * kSubtileStride;
  static constexpr int kStages = kTileStages * Schedule::kTilesInFlight;
  static_assert(kGathered ? kTileTokens % Format::kTokens == 0 && Format::kHeaderBytes == 0 && kTileBlocks <= 32
                          : Format::kTokens % kTileTokens == 0,
                "a KV tile lies within a block, or consists of whole ones without channel params");
  static_assert(!kKeyPerToken || Key::kGroup % 16 == 0, "a k-step lies within a K group");
  static_assert(!kValuePerToken || Value::kGroup % 16 == 0, "a row tile lies within a V group");
  static_assert(!kHalfScales || Value::kGroup == 16, "a row tile is a V group");

  // The runs of a step, and the row of a KV head that a CTA's row is.
  __host__ __device__ static constexpr int runs(int q_len) { return kRuns == 1 ? 1 : ceil_div(Schedule::kGroup * q_len, kQRows); }
  __device__ static constexpr int head_row(int run, int row) { return kRuns == 1 ? row : run * kQRows + row; }

  // Tokens that are quantized as they arrive: the last tile of a sequence may be partly filled, and no token is unquantized.
  static constexpr bool kArrival = Format::ResidualRows::kArrival;
  // The tokens that packed tiles hold in a step that appends `fresh` tokens to `length`.
  __host__ __device__ static constexpr int packed_length(int length, int fresh) { return kArrival ? length + fresh : length; }

  static_assert(Schedule::kMaxQLen <= Format::kTokens, "a step packs one block at most");
  static_assert(Schedule::Mask::kWindow == 0 || Format::ResidualRows::kSink == 0, "a sliding window hides the sink");

  // KV tiles of a sequence of `length` tokens. A gathered tile may have fewer blocks than kTileBlocks.
  __host__ __device__ static constexpr int packed_tiles(int length) {
    if constexpr (kArrival) return ceil_div(length, kTileTokens);
    const int blocks = Format::ResidualRows::packed_blocks(length);
    return kGathered ? ceil_div(blocks, kTileBlocks) : blocks * kTilesPerBlock;
  }

  // The arrays of shared memory lie where the rendered source says (`Memory`, kvgen/lower/cuda/shared.py).
  static constexpr int kQueryPlainBytes = kQTiles * kHeadDim * 16;  // a second copy of q follows with kErrorInCopy
  static constexpr int kMergeStride = kHeadDim + 1;  // floats; odd, so that the rows and channels of a warp fall into 32 banks
  static constexpr int kPageEntries = kPaged ? 2 * Schedule::kTilesInFlight * kTileBlocks : 0;  // of a warp
  using Memory = typename Schedule::Memory;
  static_assert(kSlotBytes == Memory::kSlot && Memory::kScalars - Memory::kWorkTiles == Schedule::kWarps * WorkQueue::kWarpBytes);
  static_assert(Memory::kFlags - Memory::kScalars == (kQTiles * 8 * (1 + kKeyGroups + kStatic<Key>)+Schedule::kWarps * 8 * 2) * 4);
  static_assert(Memory::kMerge - Memory::kQuery >= kQueryPlainBytes * (kScaledOnce && !kQueryTwice         ? 3
                                                                       : kErrorInCopy || kStaticAlone<Key> ? 2
                                                                                                           : 1));
  static_assert(Memory::kPages - Memory::kMerge >= Schedule::kWarps * kTileQRows * kMergeStride * 4);
};

}  // namespace kvgen
