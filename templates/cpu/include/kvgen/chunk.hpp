// A run of packed tokens, which is one step of the online softmax.
#pragma once

#include "kvgen/products.hpp"

namespace kvgen {

// Where the sub-tiles of a run of packed tokens lie.
template <class C>
struct Chunk {
  static constexpr int most = C::chunk;
  static constexpr int subtiles = most / C::kSubtile;
  static constexpr int tiles_per_subtile = C::kSubtile / kLanes;

  int64_t position;  // of the first token
  int tokens;
  const uint8_t* block[subtiles];
  const uint8_t* subtile[subtiles];
  int64_t prefetch_offset[subtiles];  // bytes from a sub-tile to the one that comes C::prefetch later

  int in_block(int token) const { return static_cast<int>((position + token) % C::kTokens); }
};

// The end of the run of tokens from `token` on that shares a group of `group` tokens; blocks hold whole groups.
template <class C>
inline int group_end(const Chunk<C>& chunk, int token, int group) {
  const int end = token + group - chunk.in_block(token) % group;
  return end < chunk.tokens ? end : chunk.tokens;
}

}  // namespace kvgen
