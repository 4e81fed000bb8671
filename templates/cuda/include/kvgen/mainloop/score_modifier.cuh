// The score modifier seam: it changes a score before the mask is applied.
//
// A modifier is a type with
//   kActive           whether it changes scores; an inactive modifier costs no instruction
//   apply(x, place)   the new score. x is scale * q.k in log2 units (times log2 e), and so is the result, which must be finite for masked
//                     tokens, too: their positions may lie beyond the query's
#pragma once
#include "kvgen/mainloop/mask.cuh"

namespace kvgen {

struct NoModifier {
  static constexpr bool kActive = false;
};

// The query head, query and token that a score belongs to.
struct ScorePlace {
  int q_head;
  int position;  // of the query
  int token;     // position of the key
};

// Applies the modifier to the scores of a sub-tile whose first token is at `first`.
template <class Traits>
__device__ __forceinline__ void modify_scores(const SeqlenInfo& seqlen, int first, int tile, int lane, Scores<Traits>& x) {
  using Modifier = typename Traits::ScoreModifier;
  if constexpr (Modifier::kActive) {
#pragma unroll
    for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = q_row<Traits>(tile, lane, i);
        const ScorePlace place{seqlen.q_head<Traits>(row), seqlen.position<Traits>(row),
                               first + first_row<Traits>(m_tile, lane) + i / 2 * 8};
        x.product[m_tile][i] = Modifier::apply(x.relative_to(0.f, m_tile, i), place);
        x.factor[m_tile][i] = 1.f, x.offset[m_tile][i] = 0.f;
      }
  }
}

}  // namespace kvgen
