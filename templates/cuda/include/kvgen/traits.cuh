// What a schedule means for a format: tiles, registers, shared memory. Words: docs/kernels.md.
#pragma once
#include <algorithm>

#include "kvgen/format.cuh"
#include "kvgen/splits.cuh"

namespace kvgen {

enum class Copy { async, bulk, bulk_unit };               // cp.async; one 1-D bulk copy per sub-tile; one per unit
enum class Combine { last, two_level, cluster, shares };  // shares: no parts, whatever lengths are (share.cuh)

constexpr int kMaxBatch = 1024;  // lengths are kept in shared memory

// The same warps and rings where every CTA works by itself and copies by cp.async: for lengths that are not alike.
template <class Schedule_>
struct Solo : Schedule_ {
  static constexpr Copy kCopy = Copy::async;
  static constexpr Combine kCombine = Combine::last;
};

template <class Schedule_>
constexpr bool kBarriersIn = Schedule_::kCopy != Copy::async;
template <class Schedule_>
constexpr bool kBarriersIn<Solo<Schedule_>> = kBarriersIn<Schedule_>;

// Heads that a CTA may have to add up, in the end, side by side.
template <class Schedule_>
constexpr int kLastHeads = 1;
template <class Schedule_>
constexpr int kLastHeads<Solo<Schedule_>> = 2;

template <class Format_, class Schedule>
struct Traits : Schedule {
  using Alone = Traits<Format_, Solo<Schedule>>;
  using Format = Format_;
  using Key = typename Format::Key;
  using Value = typename Format::Value;
  static constexpr int kHeadDim = Format::kHeadDim;
  static constexpr int kThreads = Schedule::kWarps * 32;
  static constexpr int kAdders = kThreads / kLastHeads<Schedule>;  // threads that add up the parts of a head
  static constexpr int kMostRegisters = std::min(255, 65536 / (kThreads * Schedule::kCtasPerSm));

  // Columns: (query, head of the group) pairs, eight to a tile of the matrix instruction.
  static constexpr int kColumns = Schedule::kGroup * Schedule::kQueries;
  static constexpr int kColumnTiles = ceil_div(kColumns, 8);
  // With four columns or fewer, the two halves of the eight hold the two halves of the rows (or of q's precision).
  static constexpr bool kHalves = kColumns <= 4;
  static constexpr int kParts = kHalves ? 1 : 2;  // 16-row parts of a 32-token sub-tile that a lane scores itself
  static constexpr int kTileColumns = kColumns < 8 ? kColumns : 8;

  static constexpr int kSteps = kHeadDim / 16;     // k-steps of q * K
  static constexpr int kRowTiles = kHeadDim / 16;  // 16-row tiles of V
  static constexpr int kValueGroups = Value::kQuantized && Value::kAxis == Axis::token ? kHeadDim / Value::kGroup : 1;
  static constexpr int kKeyGroups = Key::kQuantized && Key::kAxis == Axis::token ? kHeadDim / Key::kGroup : 1;
  static constexpr bool kKeyPerChannel = Key::kQuantized && Key::kAxis == Axis::channel;
  static constexpr bool kKeyPerToken = Key::kQuantized && Key::kAxis == Axis::token;

  // q * scale is rounded to 16 bits; the residual of that rounding is carried where columns (or instructions) are free.
  static constexpr bool kResidualQ = kKeyPerChannel && (kHalves || (Schedule::kExactQ && kColumnTiles == 1));
  static constexpr bool kResidualHalves = kResidualQ && kHalves;  // in columns 4..7
  // Lanes exchange products where a sub-tile's K codes were, if these are large enough.
  static constexpr bool kExchangeShared = kResidualHalves && Format::template codes_bytes<Key>() >= 1024;
  static constexpr int kTogether = Schedule::kCombine == Combine::cluster ? Schedule::kCluster : 1;  // CTAs that share a part
  // Equal shares: where they are asked for; and for lengths that are not alike, where CTAs are too few for parts by length, and registers
  // suffice.
  static constexpr bool kAlwaysShares = Schedule::kCombine == Combine::shares;
  static constexpr bool kShares = kAlwaysShares || (Schedule::kCtasPerSm == 1 && kMostRegisters > 200 && kColumnTiles == 1);
  static_assert(!kAlwaysShares || kColumnTiles == 1, "pieces of a share have one column tile");
  // A unit is what a warp takes at a time: tokens that share their K channel params.
  static constexpr int kUnitTokens = Schedule::kUnit * 32;
  // Sub-tiles that go through the softmax together: one test, and more work to hide latency behind. A ring of one unit is
  // gone through by halves; columns take registers.
  static constexpr int kMostSpan = kColumnTiles > 2 || (kColumnTiles == 2 && Schedule::kUnit * Schedule::kDepth < 4) ? 1
                                   : kColumnTiles == 2 || Schedule::kDepth == 1                                      ? 2
                                                                                                                     : 4;
  static constexpr int kSpan = Schedule::kUnit % 2 ? 1 : std::min(kMostSpan, Schedule::kUnit % 4 ? 2 : 4);
  // A unit lies within a block; or it is gathered from several, wherever they lie, if all they have belongs to their tokens.
  static constexpr bool kGathered = kUnitTokens > Format::kTokens;
  static constexpr int kUnitBlocks = kGathered ? kUnitTokens / Format::kTokens : 1;
  static constexpr int kUnitsPerBlock = kGathered ? 1 : Format::kTokens / kUnitTokens;
  static constexpr int kUnitParams = kKeyPerChannel ? kHeadDim * Key::kParams * 2 : 0;  // bytes
  static constexpr int kTileBytes = 32 / Format::kSubtile * Format::kSubtileBytes;      // 32 tokens: a sub-tile, or two of 16
  static constexpr int kApart = Format::kSubtile == 32 ? 0 : Format::kSubtileBytes;     // from one of these two to the other
  static constexpr int kUnitBytes = Schedule::kUnit * kTileBytes;
  static constexpr int kSlotBytes = kUnitParams + kUnitBytes;
  // A stage is what is waited for and refilled at once. Short sub-tiles one by one, so that more bytes are under way.
  static constexpr int kStageSubtiles = Schedule::kCopy == Copy::async && kTileBytes < 3072 ? 1 : kSpan;
  static constexpr int kUnitStages = Schedule::kUnit / kStageSubtiles;
  static constexpr int kStageBytes = kStageSubtiles * kTileBytes;
  static constexpr int kStages = kUnitStages * Schedule::kDepth;
  static_assert(kGathered ? kUnitTokens % Format::kTokens == 0 && Format::kHeaderBytes == 0 && kUnitBlocks <= 32
                          : Format::kTokens % kUnitTokens == 0,
                "a unit lies within a block, or consists of whole ones without K groups");
  static_assert(!kKeyPerChannel || Key::kGroup % kUnitTokens == 0, "a unit lies within a K group");
  static_assert(Value::kAxis == Axis::token || !Value::kQuantized, "V per channel");
  static_assert(!kKeyPerToken || Key::kGroup % 32 == 0, "K groups of fewer than 32 channels");
  static_assert(Value::kGroup % 32 == 0 || !Value::kQuantized, "V groups of fewer than 32 channels");

  // Packed units of `tokens` tokens; of a gathered one, some blocks may be missing.
  __host__ __device__ static constexpr int packed_units(int tokens) {
    return kGathered ? ceil_div(tokens / Format::kTokens, kUnitBlocks) : tokens / Format::kTokens * kUnitsPerBlock;
  }

  // Shared memory, in bytes from the start: ring | barriers | q | merge | lengths | aside | small | inbox.
  static constexpr int kRingBytes = Schedule::kWarps * Schedule::kDepth * kSlotBytes;
  static constexpr int kBarriers = kRingBytes;
  static constexpr int kQuery =
      kBarriers + align_up(kBarriersIn<Schedule> ? Schedule::kWarps * Schedule::kUnit * Schedule::kDepth * 8 : 0, 16);
  static constexpr int kQueryPlainBytes = kColumnTiles * kHeadDim * 16;
  static constexpr int kQueryBytes = kQueryPlainBytes * (kResidualHalves ? 2 : 1);
  static constexpr int kMerge = kQuery + kQueryBytes;
  static constexpr int kMergeStride = kHeadDim + 1;  // floats; odd, so that a warp's columns and rows hit 32 banks
  static constexpr int kMergeBytes = align_up(Schedule::kWarps * kTileColumns * kMergeStride * 4, 16);
  static constexpr int kLengths = kMerge + kMergeBytes;
  static constexpr int kAside = kLengths + kMaxBatch * 4;
  static constexpr int kAsideBytes = 320;
  static constexpr int kSmall = kAside + kAsideBytes;
  static constexpr int kSmallFloats = kColumnTiles * 8 * (1 + kKeyGroups) + Schedule::kWarps * 8 * 2;
  static constexpr int kInbox = align_up(kSmall + kSmallFloats * 4 + 16, 16);
  static constexpr int kInboxBytes =
      Schedule::kCombine == Combine::cluster ? kColumnTiles * (kTileColumns * kHeadDim * 4 + Schedule::kCluster * 64 + 16) : 0;
  static constexpr int kSharedBytes = align_up(kInbox + kInboxBytes, 128);
};

// Rows of codes that share a byte carry powers of two: what a matrix product of undivided fields must be multiplied by.
template <int kBits>
__host__ __device__ constexpr float row_factor(int tile, int half) {
  return kBits == 4 ? (half ? 1.f / 16 : 1.f) : kBits == 2 ? (tile ? (half ? 1.f / 64 : 1.f / 16) : (half ? 1.f / 4 : 1.f)) : 1.f;
}

// Codes read as fp16 bits are denormals: code * 2^-24, exactly.
template <class Quant>
constexpr float kCodeUnit = Quant::kQuantized ? 1.f / 16777216.f : 1.f;

}  // namespace kvgen
