// Which tokens a query sees: the mask seam, and causal masking.
//
// A mask is a type with
//   kWindow                 tokens of its sliding window, 0 if there is none; the host's plan skips the tiles before it
//   first_token(position)   the first token that a query at this position sees
// No query sees a token after its own position.
#pragma once
#include "kvgen/mainloop/softmax.cuh"

namespace kvgen {

struct CausalMask {
  static constexpr int kWindow = 0;
  __device__ static constexpr int first_token(int) { return 0; }
};

// Positions of a step's queries and tokens.
struct SeqlenInfo {
  int head;    // KV head
  int length;  // of the sequence, with the step's tokens; its last q_len positions are the queries'
  int q_len;
  int packed;  // tokens in packed blocks

  // Position of the query of a packed-GQA row.
  template <class Traits>
  __device__ __forceinline__ int position(int row) const {
    return length - q_len + row / Traits::kGroup;
  }
};

// The mask of packed tokens.
template <class Traits>
struct PackedMask {
  using Mask = typename Traits::Mask;
  static constexpr bool kCausal = Traits::kMaxQLen > 1, kWindowed = Mask::kWindow > 0;
  static constexpr bool kActive = kCausal || kWindowed || Traits::kGathered;
  SeqlenInfo seqlen;

  // The first tile that every row sees from its first token on.
  __device__ __forceinline__ int first_clear_tile() const { return ceil_div(Mask::first_token(seqlen.length - 1), Traits::kTileTokens); }
  // The end of those that every row sees to their last token.
  __device__ __forceinline__ int end_clear_tile() const {
    int tokens = kCausal ? max(seqlen.length - seqlen.q_len + 1, 0) : seqlen.packed;
    if (Traits::kGathered) tokens = min(tokens, seqlen.packed);
    return tokens / Traits::kTileTokens;
  }
  // Gives scores of unseen tokens minus infinity. `first` is the position of the sub-tile.
  __device__ __forceinline__ void apply(int first, int tile, int lane, Scores<Traits>& x) const {
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first + first_row<Traits>(m_tile, lane) + i / 2 * 8;
        const int position = seqlen.position<Traits>(q_row<Traits>(tile, lane, i));
        if (kCausal && token > position) x.offset[m_tile][i] = -INFINITY;
        if (kWindowed && token < Mask::first_token(position)) x.offset[m_tile][i] = -INFINITY;
        if (Traits::kGathered && token >= seqlen.packed) x.offset[m_tile][i] = -INFINITY;  // of the last tile, some blocks are missing
      }
  }
};

}  // namespace kvgen
