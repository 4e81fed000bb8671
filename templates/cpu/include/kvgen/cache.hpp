// Addresses in a cache: blocks, the residual, the tokens of a call.
#pragma once
#include <algorithm>

#include "kvgen/calls.hpp"
#include "kvgen/format.hpp"
#include "kvgen/operand.hpp"

namespace kvgen {

template <class C>
struct CacheView {
  using Element = typename C::Element;
  using Residual = typename C::ResidualRows;
  using Places = WindowPlaces<C::kWindowPlaces>;

  ffi::Cache cache;

  explicit CacheView(const ffi::Cache& c) : cache(c) {}

  uint8_t* block(int64_t batch, int64_t head, int64_t index) const {
    int64_t outer = batch, inner = Places::place(index), per = cache.blocks;
    if constexpr (C::kPageBlocks > 0) {
      outer = page(batch, index / C::kPageBlocks);
      inner = index % C::kPageBlocks;
      per = C::kPageBlocks;
    }
    return cache.packed.template as<uint8_t>() + ((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes;
  }

  // The first packed block that is still there, of a sequence of this length.
  static int first_held(int64_t length) {
    return Places::first(Residual::packed_blocks(static_cast<int>(std::min<int64_t>(length + Residual::kRollback, INT32_MAX))));
  }

  // The static scales of a head's K or V, one per channel; null where blocks hold them.
  const float* key_scales(int64_t head) const { return cache.scales ? cache.scales.template as<float>() + head * C::kHeadDim : nullptr; }
  const float* value_scales(int64_t head) const { return cache.scales ? key_scales(C::kv_heads + head) : nullptr; }

  // Whether a block is there: pages that a sliding window has passed need not be.
  bool holds(int64_t batch, int64_t index) const {
    if constexpr (C::kPageBlocks > 0) return page(batch, index / C::kPageBlocks) >= 0;
    return true;
  }

  int32_t& length(int64_t batch) const { return cache.lengths.template as<int32_t>()[batch]; }

  // The residual of a sequence.
  int64_t slot(int64_t batch) const { return cache.residual_slots ? cache.residual_slots.template as<int32_t>()[batch] : batch; }

  // K and V of an unquantized token.
  Element* k_row(int64_t batch, int64_t head, int64_t position) const { return residual_row(cache.k_residual, batch, head, position); }
  Element* v_row(int64_t batch, int64_t head, int64_t position) const { return residual_row(cache.v_residual, batch, head, position); }

  // Fills `chunk` with up to `most` packed tokens of [position, end), which count from the end of the sink. Prefetches go on to `packed`,
  // the end of the sequence's packed tokens: most often the next work tile begins at `end`.
  void locate(int64_t batch, int64_t head, int64_t position, int64_t end, int64_t packed, int most, Chunk<C>& chunk) const {
    chunk.position = position;
    chunk.key_scales = key_scales(head), chunk.value_scales = value_scales(head);
    chunk.tokens = static_cast<int>(end - position < most ? end - position : most);
    for (int i = 0; i * C::kSubtile < chunk.tokens; ++i) {
      const int64_t at = position + i * C::kSubtile, later = at + C::prefetch * C::kSubtile;
      chunk.block[i] = block(batch, head, at / C::kTokens);
      chunk.subtile[i] = chunk.block[i] + within(at);
      if constexpr (C::prefetch > 0) {
        chunk.prefetch_offset[i] = later < packed ? block(batch, head, later / C::kTokens) + within(later) - chunk.subtile[i] : 0;
        if (later < packed) prefetch_params(chunk.subtile[i] + chunk.prefetch_offset[i], later);
      }
    }
  }

  // The first token that a query at a position sees.
  static int64_t first_visible(int64_t position) { return C::window > 0 && position >= C::window ? position - C::window + 1 : 0; }

  // Raises where a sequence of `length` tokens is longer than the cache can hold after `more` tokens, a token that a query from position
  // `first_query` on sees is gone, or a page does not exist. Pages of blocks that no such query sees may be absent (-1).
  void check(int64_t batch, int64_t length, int64_t more, int64_t first_query) const {
    const int64_t after = length + more;
    if (length < 0 || more < 0) ffi::fail("ValueError", "sequence %lld has a negative length", (long long)batch);
    if (slot(batch) < 0 || slot(batch) >= cache.k_residual.size[0])
      ffi::fail("ValueError", "residual_slots[%lld] is %lld, the cache has %lld residuals", (long long)batch, (long long)slot(batch),
                (long long)cache.k_residual.size[0]);
    const int64_t blocks = Residual::packed_blocks(static_cast<int>(std::min<int64_t>(after, INT32_MAX)));
    if (int64_t{first_held(length)} * C::kTokens > first_visible(first_query))
      ffi::fail("ValueError", "sequence %lld: tokens from %lld on are needed, and the cache holds %d blocks of a sliding window",
                (long long)batch, (long long)first_visible(first_query), C::kWindowPlaces);
    if ((Places::kInTurn && blocks > C::kWindowPlaces ? C::kWindowPlaces : blocks) > cache.blocks)
      ffi::fail("ValueError", "sequence %lld would have %lld tokens, more than the cache holds (%lld blocks of %d)", (long long)batch,
                (long long)after, (long long)cache.blocks, C::kTokens);
    if constexpr (C::kPageBlocks > 0) {
      const int64_t first_page = first_visible(first_query) / C::kTokens / C::kPageBlocks;
      for (int64_t i = 0; i * C::kPageBlocks < blocks; ++i) {
        const int32_t at = page(batch, i);
        if (at == -1 && i < first_page) continue;
        if (at < 0 || at >= cache.pages)
          ffi::fail("ValueError", "block_table[%lld][%lld] is %d, the cache has %lld pages", (long long)batch, (long long)i, at,
                    (long long)cache.pages);
      }
    }
  }

 private:
  int32_t page(int64_t batch, int64_t index) const {
    return cache.block_table.template as<int32_t>()[batch * cache.block_table.stride[0] + index];
  }

  // The scales and zeros of a sub-tile, and of its block where it is the block's first; the inner loop prefetches codes alone.
  static void prefetch_params(const uint8_t* subtile, int64_t position) {
    const auto lines = [](const uint8_t* from, int bytes) {
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, kSecondLevel);
    };
    if (position % C::kTokens == 0) lines(subtile - C::kHeaderBytes, C::kHeaderBytes);
    lines(subtile + C::Key::kTokenParams, C::Key::kTokenParamsBytes);
    lines(subtile + C::Value::kTokenParams, C::Value::kTokenParamsBytes);
  }

  // The sub-tile of a position, from its block.
  static int64_t within(int64_t position) { return C::kHeaderBytes + position % C::kTokens / C::kSubtile * C::kSubtileBytes; }

  Element* residual_row(const ffi::View<4>& residual, int64_t batch, int64_t head, int64_t position) const {
    const int64_t row = Residual::row(static_cast<int>(position));
    return residual.as<Element>() + ((slot(batch) * C::kv_heads + head) * Residual::kRows + row) * C::kHeadDim;
  }
};

// A row of a strided tensor [batch, token, head, head_dim].
template <class Element>
inline Element* row_of(const ffi::View<4>& view, int64_t batch, int64_t token, int64_t head) {
  return view.as<Element>() + batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

// The lengths of a call's sequences: how they are checked, and the calls that change nothing else.

inline int64_t longest(const int32_t* lengths, int64_t batch) {
  int64_t most = 0;
  for (int64_t b = 0; b < batch; ++b) most = std::max<int64_t>(most, lengths[b]);
  return most;
}

inline void check_length(int64_t b, int64_t length) {
  if (length < 0) ffi::fail("ValueError", "sequence %lld has a negative length", (long long)b);
}

[[noreturn]] inline void refuse_overflow(const char* function, int64_t b, int64_t tokens, int64_t limit) {
  ffi::fail("ValueError", "%s: sequence %lld would have %lld tokens, more than the limit of %lld", function, (long long)b,
            (long long)tokens, (long long)limit);
}

inline void check_limit(const char* function, int64_t b, int64_t length, int64_t more, int64_t limit) {
  if (more > limit - length) refuse_overflow(function, b, length + more, limit);
}

// An empty sequence stays empty, unless it has tokens of its own count.
inline void advance(const ffi::Advance& call) {
  const int64_t batch = call.lengths.size[0];
  int32_t* lengths = call.lengths.as<int32_t>();
  const int32_t* counts = call.counts.as<int32_t>();
  const auto more = [&](int64_t b) { return counts ? counts[b] : lengths[b] > 0 ? call.tokens : 0; };
  for (int64_t b = 0; b < batch; ++b) {
    check_length(b, lengths[b]);
    if (more(b) < 0) ffi::fail("ValueError", "advance: counts[%lld] is %d, must be at least 0", (long long)b, more(b));
    check_limit("advance", b, lengths[b], more(b), call.limit);
  }
  for (int64_t b = 0; b < batch; ++b) lengths[b] += more(b);
}

// Between two crops lengths only grow, so the length that a crop finds is the longest since the last one. `most` is the largest rollback
// that the residual has rows for.
inline void crop(const ffi::Crop& call, int most) {
  if (call.rollback > most) ffi::fail("ValueError", "crop: rollback is %d, this kernel keeps tokens for %d", call.rollback, most);
  const int64_t batch = call.lengths.size[0];
  int32_t *lengths = call.lengths.as<int32_t>(), *least = call.least.as<int32_t>();
  const int32_t* counts = call.counts.as<int32_t>();
  const auto fewer = [&](int64_t b) { return counts ? counts[b] : lengths[b] > 0 ? call.tokens : 0; };
  const auto floor = [&](int64_t b) { return std::max(least[b], lengths[b] - call.rollback); };
  for (int64_t b = 0; b < batch; ++b) {
    check_length(b, lengths[b]);
    if (least[b] < 0) ffi::fail("ValueError", "crop: least[%lld] is %d, must be at least 0", (long long)b, least[b]);
    if (fewer(b) < 0 || fewer(b) > lengths[b] - floor(b))
      ffi::fail("ValueError", "crop: sequence %lld has %d tokens, of which %d can be taken back, not %d", (long long)b, lengths[b],
                lengths[b] - floor(b), fewer(b));
  }
  for (int64_t b = 0; b < batch; ++b) {
    least[b] = floor(b);
    lengths[b] -= fewer(b);
  }
}

}  // namespace kvgen
