// New tokens into the cache: blocks that are due are quantized and packed, the rest waits in the residual.
#pragma once

#include "kvgen/cache.hpp"
#include "kvgen/quantize.hpp"

namespace kvgen {

// `count` new tokens of one sequence and KV head, behind the `length` tokens before the call.
template <class C>
class Append {
 public:
  using Element = typename C::Element;
  using Residual = typename C::ResidualRows;

  Append(const CacheView<C>& cache, const ffi::View<4>& k, const ffi::View<4>& v, int64_t batch, int64_t head, int64_t length,
         int64_t count)
      : cache_(cache),
        k_(k),
        v_(v),
        batch_(batch),
        head_(head),
        length_(static_cast<int>(length)),
        after_(static_cast<int>(length + count)) {}

  int64_t due_blocks() const { return CacheView<C>::due_blocks(length_, after_); }

  // Packs the i-th block that is due.
  void pack(int64_t i) const {
    const int64_t index = Residual::packed_blocks(length_) + i, first = Residual::kSink + index * C::kTokens;
    if (index < CacheView<C>::Places::first(Residual::packed_blocks(after_))) return;  // later blocks take its place
    uint8_t* block = cache_.block(batch_, head_, index);
    Quantizer<C, typename C::Key>::pack(block, [&](int t) -> const Element* {
      return first + t < length_ ? cache_.k_row(batch_, head_, first + t) : fresh(k_, first + t);
    });
    Quantizer<C, typename C::Value>::pack(block, [&](int t) -> const Element* {
      return first + t < length_ ? cache_.v_row(batch_, head_, first + t) : fresh(v_, first + t);
    });
  }

  // Puts into the residual the tokens that are not packed, and tokens whose block a crop may take back; after every pack, which reads the
  // rows of older tokens.
  void keep_rest() const {
    for (int64_t position = length_; position < after_ && position < Residual::kSink; ++position) keep(position);
    const int64_t first = Residual::first(after_ > Residual::kRollback ? after_ - Residual::kRollback : 0);
    for (int64_t position = first > length_ ? first : length_; position < after_; ++position) keep(position);
  }

 private:
  const Element* fresh(const ffi::View<4>& view, int64_t position) const {
    return row_of<Element>(view, batch_, position - length_, head_);
  }

  void keep(int64_t position) const {
    std::memcpy(cache_.k_row(batch_, head_, position), fresh(k_, position), sizeof(Element) * C::kHeadDim);
    std::memcpy(cache_.v_row(batch_, head_, position), fresh(v_, position), sizeof(Element) * C::kHeadDim);
  }

  const CacheView<C>& cache_;
  const ffi::View<4>&k_, &v_;
  int64_t batch_, head_;
  int length_, after_;
};

// Dequantized tokens of one block, in `dtype`, to rows of k and v.
template <class C>
inline void unpack_block(const uint8_t* block, const ffi::View<4>& k, const ffi::View<4>& v, int64_t batch, int64_t head,
                         int64_t position) {
  using Element = typename C::Element;
  using Values = Operand<C, typename C::Value>;
  alignas(64) float floats[(C::kHeadDim > C::kSubtile ? C::kHeadDim : C::kSubtile) * kLanes];
  for (int token = 0; token < C::kTokens; token += C::kSubtile) {
    const uint8_t* subtile = block + C::kHeaderBytes + token / C::kSubtile * C::kSubtileBytes;
    for (int tile = 0; tile < C::kSubtile / kLanes; ++tile) {
      expand_keys<C>(block, subtile, token, tile, floats);
      for (int c = 0; c < C::kHeadDim; c += kLanes) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load<F32>(floats + (c + i) * kLanes);
        transpose(square);
        for (int i = 0; i < kLanes; ++i)
          store_floats<Element>(row_of<Element>(k, batch, position + token + tile * kLanes + i, head) + c, square[i]);
      }
    }
    for (int tile = 0; tile < C::kHeadDim / kLanes; ++tile) {
      Values::expand(block, subtile, token, tile, floats);
      for (int t = 0; t < C::kSubtile; ++t)
        store_floats<Element>(row_of<Element>(v, batch, position + token + t, head) + tile * kLanes, load<F32>(floats + t * kLanes));
    }
  }
}

}  // namespace kvgen
