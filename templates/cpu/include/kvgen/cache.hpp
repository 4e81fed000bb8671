// Addresses in a cache: blocks, the residual, the tokens of a call.
#pragma once

#include "kvgen/calls.hpp"
#include "kvgen/products.hpp"

namespace kvgen {

template <class C>
struct CacheView {
  using Element = typename C::Element;

  ffi::Cache cache;

  explicit CacheView(const ffi::Cache& c) : cache(c) {}

  uint8_t* block(int64_t batch, int64_t head, int64_t index) const {
    int64_t outer = batch, inner = index, per = cache.blocks;
    if constexpr (C::page_blocks > 0) {
      outer = cache.block_table.template as<int32_t>()[batch * cache.block_table.stride[0] + index / C::page_blocks];
      inner = index % C::page_blocks;
      per = C::page_blocks;
    }
    return cache.packed.template as<uint8_t>() + ((outer * C::kv_heads + head) * per + inner) * C::block_bytes;
  }

  int32_t& length(int64_t batch) const { return cache.lengths.template as<int32_t>()[batch]; }

  Element* k_slot(int64_t batch, int64_t head, int64_t slot) const { return slot_of(cache.k_residual, batch, head, slot); }
  Element* v_slot(int64_t batch, int64_t head, int64_t slot) const { return slot_of(cache.v_residual, batch, head, slot); }

  // Fills `chunk` with up to C::chunk packed tokens of [position, end).
  void locate(int64_t batch, int64_t head, int64_t position, int64_t end, int most, Chunk<C>& chunk) const {
    chunk.position = position;
    chunk.tokens = static_cast<int>(end - position < most ? end - position : most);
    for (int i = 0; i * C::subtile < chunk.tokens; ++i) {
      const int64_t at = position + i * C::subtile, later = at + C::prefetch * C::subtile;
      chunk.block[i] = block(batch, head, at / C::block);
      chunk.subtile[i] = chunk.block[i] + within(at);
      if constexpr (C::prefetch > 0)
        chunk.ahead[i] = later < end ? block(batch, head, later / C::block) + within(later) - chunk.subtile[i] : 0;
    }
  }

  // Raises where a sequence is longer than the cache can hold after `more` tokens, or a page does not exist.
  void check(int64_t batch, int64_t more) const {
    const int64_t now = length(batch), after = now + more, blocks = after / C::block;
    if (now < 0 || more < 0) ffi::fail("ValueError", "sequence %lld has a negative length", (long long)batch);
    if (blocks > cache.blocks)
      ffi::fail("ValueError", "sequence %lld would have %lld tokens, more than the cache holds (%lld blocks of %d)", (long long)batch,
                (long long)after, (long long)cache.blocks, C::block);
    if constexpr (C::page_blocks > 0)
      for (int64_t page = 0; page * C::page_blocks < blocks; ++page) {
        const int32_t at = cache.block_table.template as<int32_t>()[batch * cache.block_table.stride[0] + page];
        if (at < 0 || at >= cache.pages)
          ffi::fail("ValueError", "block_table[%lld][%lld] is %d, the cache has %lld pages", (long long)batch, (long long)page, at,
                    (long long)cache.pages);
      }
  }

 private:
  // The sub-tile of a position, from its block.
  static int64_t within(int64_t position) { return C::header_bytes + position % C::block / C::subtile * C::subtile_bytes; }

  static Element* slot_of(const ffi::View<4>& residual, int64_t batch, int64_t head, int64_t slot) {
    return residual.as<Element>() + ((batch * C::kv_heads + head) * C::block + slot) * C::head_dim;
  }
};

// A row of a strided tensor [batch, token, head, head_dim].
template <class Element>
inline Element* row_of(const ffi::View<4>& view, int64_t batch, int64_t token, int64_t head) {
  return view.as<Element>() + batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

}  // namespace kvgen
