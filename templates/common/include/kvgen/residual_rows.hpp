// Which tokens of a sequence are not quantized, and in which rows of the residual tensors they lie. kvgen/reference/residual.py is the
// same for the host.
#pragma once

#ifdef __CUDACC__
#define KVGEN_ROWS_FN __host__ __device__ static constexpr
#else
#define KVGEN_ROWS_FN static constexpr
#endif

namespace kvgen {

// The unquantized tokens are the first kSink ones and those that no packed block holds: at least the newest kLocal. Block i of a sequence
// holds the positions from kSink + i * kBlock on. kRollback tokens may be taken back; a step has up to kMaxQLen tokens.
template <int kBlock_, int kSink_ = 0, int kLocal_ = 0, int kRollback_ = 0, int kMaxQLen = 1>
struct ResidualRows {
  static constexpr int kBlock = kBlock_, kSink = kSink_, kLocal = kLocal_, kRollback = kRollback_;
  static constexpr int kUnpacked = kSink + kLocal;  // a sequence has a packed block if it is longer than this by kBlock
  // The rows after the sink are a ring buffer (`row`). After kRollback tokens were taken back, up to kLocal + kBlock - 1 tokens before them
  // are unquantized. A step writes its tokens while the older ones are still read, hence kMaxQLen.
  static constexpr int kCapacity = (kBlock + kLocal + (kRollback ? kRollback + kMaxQLen : 0) + 15) / 16 * 16;
  static constexpr int kRows = kSink + kCapacity;  // per sequence and KV head

  KVGEN_ROWS_FN int packed_blocks(int length) { return kUnpacked == 0 || length > kUnpacked ? (length - kUnpacked) / kBlock : 0; }
  // The first position after the packed blocks. All positions from it on are unquantized.
  KVGEN_ROWS_FN int first(int length) { return kSink + packed_blocks(length) * kBlock; }
  // The number of unquantized tokens after the packed blocks. It is negative if the tokens do not fill the sink.
  KVGEN_ROWS_FN int count(int length) { return kUnpacked == 0 ? length % kBlock : length - first(length); }
  // The row of an unquantized token.
  KVGEN_ROWS_FN int row(int position) { return position < kSink ? position : kSink + (position - kSink) % kCapacity; }
  // The same for a token that is counted from the first position after the packed blocks; negative: in the sink. If the capacity is one
  // block, these tokens begin at row kSink.
  KVGEN_ROWS_FN int row_of(int length, int token) {
    return kCapacity == kBlock && (kSink == 0 || token >= 0) ? kSink + token : row(first(length) + token);
  }
};

}  // namespace kvgen
