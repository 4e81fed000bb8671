// New tokens into the cache: full blocks are quantized and packed, the rest waits in the residual.
#pragma once

#include "kvgen/cache.hpp"
#include "kvgen/quantize.hpp"

namespace kvgen {

// The tokens of one sequence and KV head that are not packed yet: `residual` old ones, then new ones.
template <class C>
class Append {
 public:
  using Element = typename C::Element;

  // `length`: tokens of the sequence before the call.
  Append(const CacheView<C>& cache, const ffi::View<4>& k, const ffi::View<4>& v, int64_t batch, int64_t head, int64_t length,
         int64_t count)
      : cache_(cache), k_(k), v_(v), batch_(batch), head_(head), count_(count), packed_(length / C::block), residual_(length % C::block) {}

  int64_t full_blocks() const { return (residual_ + count_) / C::block; }

  // Packs the i-th block that becomes full.
  void pack(int64_t i) const {
    uint8_t* block = cache_.block(batch_, head_, packed_ + i);
    const auto k_row = [&](int t) -> const Element* { return row(k_, i * C::block + t, cache_.k_slot(batch_, head_, 0)); };
    const auto v_row = [&](int t) -> const Element* { return row(v_, i * C::block + t, cache_.v_slot(batch_, head_, 0)); };
    Quantizer<C, typename C::Key>::pack(block, k_row);
    Quantizer<C, typename C::Value>::pack(block, v_row);
  }

  // Puts what is left into the residual; after every pack.
  void keep_rest() const {
    const int64_t flushed = full_blocks() * C::block;
    for (int64_t at = flushed > residual_ ? flushed : residual_; at < residual_ + count_; ++at) {
      std::memcpy(cache_.k_slot(batch_, head_, at - flushed), row_of<Element>(k_, batch_, at - residual_, head_),
                  sizeof(Element) * C::head_dim);
      std::memcpy(cache_.v_slot(batch_, head_, at - flushed), row_of<Element>(v_, batch_, at - residual_, head_),
                  sizeof(Element) * C::head_dim);
    }
  }

 private:
  const Element* row(const ffi::View<4>& view, int64_t at, const Element* slots) const {
    return at < residual_ ? slots + at * C::head_dim : row_of<Element>(view, batch_, at - residual_, head_);
  }

  const CacheView<C>& cache_;
  const ffi::View<4>&k_, &v_;
  int64_t batch_, head_, count_, packed_, residual_;
};

// Dequantized tokens of one block, in `dtype`, to rows of k and v.
template <class C>
inline void unpack_block(const uint8_t* block, const ffi::View<4>& k, const ffi::View<4>& v, int64_t batch, int64_t head,
                         int64_t position) {
  using Element = typename C::Element;
  using Values = Operand<C, typename C::Value>;
  alignas(64) float floats[(C::head_dim > C::subtile ? C::head_dim : C::subtile) * kLanes];
  for (int token = 0; token < C::block; token += C::subtile) {
    const uint8_t* subtile = block + C::header_bytes + token / C::subtile * C::subtile_bytes;
    for (int tile = 0; tile < C::subtile / kLanes; ++tile) {
      expand_keys<C>(block, subtile, token, tile, floats);
      for (int c = 0; c < C::head_dim; c += kLanes) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load<F32>(floats + (c + i) * kLanes);
        transpose(square);
        for (int i = 0; i < kLanes; ++i)
          store_floats<Element>(row_of<Element>(k, batch, position + token + tile * kLanes + i, head) + c, square[i]);
      }
    }
    for (int tile = 0; tile < C::head_dim / kLanes; ++tile) {
      Values::expand(block, subtile, token, tile, floats);
      for (int t = 0; t < C::subtile; ++t)
        store_floats<Element>(row_of<Element>(v, batch, position + token + t, head) + tile * kLanes, load<F32>(floats + t * kLanes));
    }
  }
}

}  // namespace kvgen
