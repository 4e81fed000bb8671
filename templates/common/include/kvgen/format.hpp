// What follows from the constants of a cache (`Constants` in rendered sources): which tokens are not quantized, and where blocks lie.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KVGEN_FORMAT_FN __host__ __device__ static constexpr
#else
#define KVGEN_FORMAT_FN static constexpr
#endif

namespace kvgen {

enum class Select { mean_abs, range, fixed };  // boosted channels: with the largest mean of |x|, with the largest range, or the first ones

// The unquantized tokens are the first kSink ones and those that no packed block holds: at least the newest kLocal. Block i of a sequence
// holds the positions from kSink + i * kBlock on. kRollback tokens may be taken back. The kCapacity rows after the sink are a ring buffer.
// Without any, tokens are quantized as they arrive: none is unquantized, and the last block of a sequence may be partly filled.
template <int kBlock_, int kSink_, int kLocal_, int kRollback_, int kCapacity_>
struct ResidualRows {
  static constexpr int kBlock = kBlock_, kSink = kSink_, kLocal = kLocal_, kRollback = kRollback_, kCapacity = kCapacity_;
  static constexpr int kUnpacked = kSink + kLocal;  // a sequence has a packed block if it is longer than this by kBlock
  static constexpr int kRows = kSink + kCapacity;   // per sequence and KV head
  static constexpr bool kArrival = kCapacity == 0;

  // Blocks that hold packed tokens.
  KVGEN_FORMAT_FN int packed_blocks(int length) {
    if constexpr (kArrival) return length / kBlock + (length % kBlock > 0);
    return kUnpacked == 0 || length > kUnpacked ? (length - kUnpacked) / kBlock : 0;
  }
  // The first position after the packed tokens. All positions from it on are unquantized.
  KVGEN_FORMAT_FN int first(int length) { return kArrival ? length : kSink + packed_blocks(length) * kBlock; }
  // The number of unquantized tokens after the packed blocks. It is negative if the tokens do not fill the sink.
  KVGEN_FORMAT_FN int count(int length) { return kArrival ? 0 : kUnpacked == 0 ? length % kBlock : length - first(length); }
  // The row of an unquantized token.
  KVGEN_FORMAT_FN int row(int position) {
    return position < kSink || kArrival ? position : kSink + (position - kSink) % (kArrival ? 1 : kCapacity);
  }
  // The same for a token that is counted from the first position after the packed blocks; negative: in the sink. If the capacity is one
  // block, these tokens begin at row kSink.
  KVGEN_FORMAT_FN int row_of(int length, int token) {
    return kCapacity == kBlock && (kSink == 0 || token >= 0) ? kSink + token : row(first(length) + token);
  }
};

// Where the blocks of a sequence lie. With a sliding window in a contiguous cache they take kPlaces places in turn; 0: each has its own.
template <int kPlaces>
struct WindowPlaces {
  static constexpr bool kInTurn = kPlaces > 0;

  KVGEN_FORMAT_FN int64_t place(int64_t block) {
    if constexpr (kInTurn) return static_cast<uint32_t>(block) % static_cast<uint32_t>(kPlaces);
    return block;
  }
  // The oldest block that is still stored, of a sequence that had at most `packed` packed blocks.
  KVGEN_FORMAT_FN int first(int packed) { return kInTurn && packed > kPlaces ? packed - kPlaces : 0; }
};

}  // namespace kvgen
