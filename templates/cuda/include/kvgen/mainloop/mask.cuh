// The mask seam, and causal masking.
//
// A mask is a type with
//   kWindow                 tokens of its sliding window, 0 without one; the plan skips the tiles before the window
//   first_token(position)   the first token that a query at this position attends to: 0 without a window, else not before
//                           position - kWindow + 1, from which the plan takes its first tile; it never decreases as `position` grows
// Every mask is causal: no query attends to a token after its own position.
#pragma once
#include "kvgen/mainloop/softmax.cuh"

namespace kvgen {

struct CausalMask {
  static constexpr int kWindow = 0;
  __device__ static constexpr int first_token(int) { return 0; }
};

// The positions of a step's queries and tokens.
struct SeqlenInfo {
  int head;    // KV head
  int length;  // of the sequence, including the step's tokens; the queries have its last q_len positions
  int q_len;
  int packed_end;  // the first position after the packed blocks
  int run;         // of packed-GQA rows

  // Position of the query that a packed-GQA row belongs to.
  template <class Traits>
  __device__ __forceinline__ int position(int row) const {
    return length - q_len + Traits::head_row(run, row) / Traits::kGroup;
  }
  template <class Traits>
  __device__ __forceinline__ int q_head(int row) const {
    return head * Traits::kGroup + Traits::head_row(run, row) % Traits::kGroup;
  }
};

// Masks packed tokens. The tiles between first_clear_tile and end_clear_tile need no mask.
template <class Traits>
struct PackedMask {
  using Mask = typename Traits::Mask;
  using ResidualRows = typename Traits::Format::ResidualRows;
  // The newest kLocal tokens are not packed, so the packed ones may be older than all queries.
  static constexpr bool kCausal = Traits::kMaxQLen > 1 + ResidualRows::kLocal, kWindowed = Mask::kWindow > 0;
  // The last tile may have places of no token: of blocks that are not there, or of a block that is partly filled.
  static constexpr bool kOpenEnd = Traits::kGathered || Traits::kArrival;
  static constexpr bool kActive = kCausal || kWindowed || kOpenEnd;
  SeqlenInfo seqlen;

  // The first tile of which every row attends to the first token.
  __device__ __forceinline__ int first_clear_tile() const { return ceil_div(Mask::first_token(seqlen.length - 1), Traits::kTileTokens); }
  // The end of the tiles of which every row attends to the last token.
  __device__ __forceinline__ int end_clear_tile() const {
    int tokens = kCausal ? max(seqlen.length - seqlen.q_len + 1, 0) : seqlen.packed_end;
    if (kOpenEnd) tokens = min(tokens, seqlen.packed_end);
    return (tokens - ResidualRows::kSink) / Traits::kTileTokens;
  }
  // Adds minus infinity to the scores of masked tokens, which must be finite: +inf would become NaN. `first` is the position of the
  // sub-tile.
  __device__ __forceinline__ void apply(int first, int tile, int lane, Scores<Traits>& x) const {
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first + first_row<Traits>(m_tile, lane) + i / 2 * 8;
        const int position = seqlen.position<Traits>(q_row<Traits>(tile, lane, i));
        if (kCausal && token > position) x.offset[m_tile][i] = -INFINITY;
        if (kWindowed && token < Mask::first_token(position)) x.offset[m_tile][i] = -INFINITY;
        if (kOpenEnd && token >= seqlen.packed_end) x.offset[m_tile][i] = -INFINITY;
        if (Traits::kArrival && token >= seqlen.packed_end) x.product[m_tile][i] = 0.f;  // which may be NaN, since anything lies there
      }
  }
  // Gives the places of no token scales and zeros of V with which a weight of 0 makes nothing: anything may lie there.
  __device__ __forceinline__ void clean(int first, int lane, ValueParams<Traits>& params) const {
    if constexpr (Traits::kArrival && Traits::kValuePerToken) {
#pragma unroll
      for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (first + first_row<Traits>(m_tile, lane) + half * 8 >= seqlen.packed_end)
#pragma unroll
            for (int q = 0; q < Traits::kValueGroups; ++q) params.scale[m_tile][q][half] = 1.f, params.zero[m_tile][q][half] = 0.f;
    }
  }
};

// Sliding window attention: a query attends to itself and the kTokens - 1 tokens before it.

template <int kTokens>
struct SlidingWindow {
  static constexpr int kWindow = kTokens;
  __device__ static constexpr int first_token(int position) { return position < kTokens ? 0 : position - kTokens + 1; }
};

}  // namespace kvgen
