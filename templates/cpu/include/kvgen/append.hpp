// New tokens into the cache: blocks that are due are quantized and packed, the rest waits in the residual.
#pragma once
#include <vector>

#include "kvgen/cache.hpp"
#include "kvgen/operand.hpp"
#include "kvgen/rotate.hpp"

namespace kvgen {

// Tokens to packed codes: statistics in fp32, params rounded to their storage type first, codes from the rounded params.

template <class C, class Info>
struct Quantizer {
  using Op = Operand<C, Info>;
  using Code = typename Op::Code;
  using Element = typename C::Element;
  using Param = typename Op::Param;

  // Packs the tokens 0 .. C::kTokens - 1 that row(token) points to. `scales`: static ones of the head.
  template <class Row>
  static void pack(uint8_t* block, const float* scales, Row row) {
    if constexpr (Code::quantized && Info::kPerChannel) channel_params(block, row);
    for (int token = 0; token < C::kTokens; token += C::kSubtile) pack_subtile(block, Op::source(block, scales), token, row);
  }

  // Writes the tokens [from, to) and nothing else, where groups lie within one token.
  template <class Row>
  static void write(uint8_t* block, const float* scales, int from, int to, Row row) {
    const uint8_t* params = Op::source(block, scales);
    for (int token = from, next; token < to; token = next) {
      const bool whole = token % C::kSubtile == 0 && token + C::kSubtile <= to;
      next = token + (whole ? C::kSubtile : 1);
      if (whole)
        pack_subtile(block, params, token, row);
      else
        put_token(params, subtile_of(block, token), token % C::kSubtile, row(token));
    }
  }

 private:
  // Its params, unless they are those of channels, and codes.
  template <class Row>
  static void pack_subtile(uint8_t* block, const uint8_t* params, int token, Row row) {
    uint8_t* subtile = subtile_of(block, token);
    if constexpr (Code::quantized && !Op::per_channel)
      for (int t = 0; t < C::kSubtile; ++t) put_token_params(params, subtile, t, row(token + t));
    for (int tile = 0; tile < Op::row_extent / kLanes; ++tile) {
      if constexpr (Info::kRowsAreTokens && C::kBoosted > 0)
        boosted_codes_of_tokens(params, subtile, token, tile, row);
      else if constexpr (Info::kRowsAreTokens)
        codes_of_tokens(params, subtile, token, tile, row);
      else
        codes_of_channels(params, subtile, token, tile, row);
    }
  }

  // One token of a sub-tile. A word of V holds its neighbours, too, whose bits stay; one of K holds its own channels.
  static void put_token(const uint8_t* params, uint8_t* subtile, int token, const Element* x) {
    constexpr int width = 32 / Code::per_word;
    if constexpr (Code::quantized && !Op::per_channel) put_token_params(params, subtile, token, x);
    for (int c = 0; c < C::kHeadDim; c += kLanes) {
      U32 bits;
      if constexpr (Code::quantized)
        bits = Code::encode(load_floats<Element>(x + c), Op::affine_of_token(params, subtile, token, c));
      else
        bits = Code::encode(load_floats<Element>(x + c));
      if constexpr (Info::kRowsAreTokens) {
        uint8_t* words = const_cast<uint8_t*>(Op::codes(subtile, token / kLanes)) + token % kLanes * 4;
        for (int i = 0; i < kLanes; i += Code::per_word) {
          uint32_t word = 0;
          for (int k = 0; k < Code::per_word; ++k) word |= bits[i + k] << (width * k);
          std::memcpy(words + (c + i) / Code::per_word * 64, &word, 4);
        }
      } else {
        uint8_t* words = const_cast<uint8_t*>(Op::codes(subtile, c / kLanes)) + token / Code::per_word * 64;
        const int shift = width * (token % Code::per_word);
        const uint32_t mine = (width == 32 ? ~0u : (1u << width % 32) - 1) << shift;
        store(words, (load<U32>(words) & ~mine) | bits << shift);
      }
    }
  }

  static uint8_t* subtile_of(uint8_t* block, int token) { return block + C::kHeaderBytes + token / C::kSubtile * C::kSubtileBytes; }

  struct Range {
    F32 low, high;

    explicit Range(F32 x) : low(x), high(x) {}
    void add(F32 x) {
      low = select(x < low, x, low);
      high = select(x > high, x, high);
    }
  };

  template <class Row>
  static void channel_params(uint8_t* block, Row row) {
    alignas(64) float low[C::kHeadDim], high[C::kHeadDim];
    for (int group = 0; group < C::kTokens / Info::kGroup; ++group) {
      const auto row_of_group = [&](int t) { return row(group * Info::kGroup + t); };
      for (int c = 0; c < C::kHeadDim; c += kLanes) {
        Range range(load_floats<Element>(row_of_group(0) + c));
        for (int t = 1; t < Info::kGroup; ++t) range.add(load_floats<Element>(row_of_group(t) + c));
        store(low + c, range.low);
        store(high + c, range.high);
      }
      Param* at = const_cast<Param*>(Op::param(block, nullptr, group, 0));
      for (int c = 0; c < C::kHeadDim; ++c) Code::put_params(at + c, at + c + Op::param_extent, low[c], high[c]);
      if constexpr (Info::kRowsAreTokens && C::kBoosted > 0) {
        uint8_t* index = const_cast<uint8_t*>(Boost<C>::index(block, group));
        select_boosted<C>(index, row_of_group, low, high);
        for (int i = 0; i < C::kBoosted; ++i) {
          const int c = index[i];
          Code::put_params(at + c, at + c + Op::param_extent, low[c], high[c], Code::boosted_most);
        }
      }
    }
  }

  static void put_token_params(const uint8_t* params, uint8_t* subtile, int token, const Element* x) {
    for (int group = 0; group < C::kHeadDim / Info::kGroup; ++group)
      put_range(const_cast<Param*>(Op::param(params, subtile, group, token)), x + group * Info::kGroup, Op::second(params));
  }

  // Params of `group` neighbours, in units of a second scale.
  static void put_range(Param* at, const Element* x, float second) {
    if constexpr (Info::kGroup % kLanes == 0) {
      Range range(load_floats<Element>(x));
      for (int i = kLanes; i < Info::kGroup; i += kLanes) range.add(load_floats<Element>(x + i));
      return Code::put_params(at, at + Op::param_extent, -largest_lane(-range.low) / second, largest_lane(range.high) / second);
    }
    float low = to_float(x[0]), high = low;
    for (int i = 1; i < Info::kGroup; ++i) {
      const float value = to_float(x[i]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    Code::put_params(at, at + Op::param_extent, low / second, high / second);
  }

  // Element k of 16 rows, as the bits that go into their words.
  static U32 field(F32 x, const uint8_t* block, const uint8_t* subtile, int token, int tile, int k) {
    if constexpr (Code::quantized)
      return Code::encode(x, Op::affine_at(block, subtile, token, tile, k));
    else
      return Code::encode(x);
  }

  static void put_field(U32& word, uint8_t* words, int k, U32 bits) {
    constexpr int per = Code::per_word;
    word = k % per == 0 ? bits : word | bits << (32 / per * (k % per));
    if (k % per == per - 1) store(words + k / per * 64, word);
  }

  template <class Row>
  static void codes_of_tokens(const uint8_t* block, uint8_t* subtile, int token, int tile, Row row) {
    uint8_t* words = const_cast<uint8_t*>(Op::codes(subtile, tile));
    U32 word{};
    for (int c = 0; c < C::kHeadDim; c += kLanes) {
      F32 square[kLanes];
      for (int t = 0; t < kLanes; ++t) square[t] = load_floats<Element>(row(token + tile * kLanes + t) + c);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) put_field(word, words, c + i, field(square[i], block, subtile, token, tile, c + i));
    }
  }

  // The boosted channels' codes of 4 bits: the lower two replace the code of 2 bits, the upper two are the boost codes.
  template <class Row>
  static void boosted_codes_of_tokens(const uint8_t* block, uint8_t* subtile, int token, int tile, Row row) {
    using Upper = Boost<C>;
    constexpr int per = Code::per_word;
    codes_of_tokens(block, subtile, token, tile, row);
    const int group = (token + tile * kLanes) / Info::kGroup;
    const uint8_t* channel = Upper::index(block, group);
    uint8_t *lower = const_cast<uint8_t*>(Op::codes(subtile, tile)), *upper = const_cast<uint8_t*>(Upper::codes(subtile, tile));
    U32 word{};
    for (int i = 0; i < Upper::slots; ++i) {
      U32 bits{};
      if (i < Upper::channels) {
        const int c = channel[i];
        float x[kLanes];
        for (int t = 0; t < kLanes; ++t) x[t] = to_float(row(token + tile * kLanes + t)[c]);
        bits = Code::encode(load<F32>(x), Op::affine_of_one(block, nullptr, group, c), Code::boosted_most);
        const int shift = 32 / per * (c % per);
        uint8_t* at = lower + c / per * 64;
        store(at, (load<U32>(at) & ~(3u << shift)) | (bits & 3u) << shift);
      }
      put_field(word, upper, i, bits >> 2);
    }
  }

  template <class Row>
  static void codes_of_channels(const uint8_t* block, uint8_t* subtile, int token, int tile, Row row) {
    uint8_t* words = const_cast<uint8_t*>(Op::codes(subtile, tile));
    U32 word{};
    for (int t = 0; t < C::kSubtile; ++t) {
      const F32 x = load_floats<Element>(row(token + t) + tile * kLanes);
      put_field(word, words, t, field(x, block, subtile, token, tile, t));
    }
  }
};

// K or V of the tokens [from, to) of a block, where groups lie within one token; `row` gives them as the caller does.
template <class C, class Op, class Row>
inline void write_tokens(uint8_t* block, const float* scales, int from, int to, Row row) {
  if constexpr (kRotated<Op>) {
    using Element = typename C::Element;
    std::vector<Element> rotated(static_cast<size_t>(to - from) * C::kHeadDim);
    const auto at = [&](int t) { return &rotated[(t - from) * C::kHeadDim]; };
    for (int t = from; t < to; ++t) rotate_row<Rotation<Op>, C::kHeadDim>(row(t), at(t));
    Quantizer<C, Op>::write(block, scales, from, to, at);
  } else {
    Quantizer<C, Op>::write(block, scales, from, to, row);
  }
}

// The new tokens of one sequence and KV head, at the positions from `length` to `after`.
template <class C>
struct Append {
  using Element = typename C::Element;
  using Residual = typename C::ResidualRows;
  const CacheView<C>& cache;
  const ffi::View<4>&k, &v;
  int64_t batch, head;
  int length, after;
  int64_t start = 0;  // where the sequence's tokens begin in k and v

  int64_t due_blocks() const {
    if constexpr (Residual::kArrival) return after > length ? Residual::packed_blocks(after) - length / C::kTokens : 0;
    return Residual::packed_blocks(after) - Residual::packed_blocks(length);
  }

  // Packs the i-th block that is due.
  void pack(int64_t i) const {
    if constexpr (Residual::kArrival) return write(i);
    const int64_t index = Residual::packed_blocks(length) + i, first = Residual::kSink + index * C::kTokens;
    if (index < CacheView<C>::Places::first(Residual::packed_blocks(after))) return;  // later blocks take its place
    uint8_t* block = cache.block(batch, head, index);
    pack_operand<typename C::Key>(
        block, cache.key_scales(head),
        [&](int t) -> const Element* { return first + t < length ? cache.k_row(batch, head, first + t) : fresh(k, first + t); },
        static_cast<int>(length - first));
    pack_operand<typename C::Value>(
        block, cache.value_scales(head),
        [&](int t) -> const Element* { return first + t < length ? cache.v_row(batch, head, first + t) : fresh(v, first + t); },
        static_cast<int>(length - first));
  }

  // Puts into the residual the tokens that are not packed, and tokens whose block a crop may take back; after every pack, which reads the
  // rows of older tokens.
  void keep_rest() const {
    if constexpr (Residual::kArrival) return;
    for (int64_t position = length; position < after && position < Residual::kSink; ++position) keep(position);
    const int64_t first = Residual::first(after > Residual::kRollback ? after - Residual::kRollback : 0);
    for (int64_t position = first > length ? first : length; position < after; ++position) keep(position);
  }

 private:
  const Element* fresh(const ffi::View<4>& view, int64_t position) const {
    return row_of<Element>(view, batch, start + position - length, head);
  }

  // Writes the new tokens of the i-th block that has any.
  void write(int64_t i) const {
    const int64_t number = length / C::kTokens + i, first = number * C::kTokens;
    const int from = static_cast<int>(length > first ? length - first : 0);
    const int to = static_cast<int>(after < first + C::kTokens ? after - first : C::kTokens);
    uint8_t* block = cache.block(batch, head, number);
    write_tokens<C, typename C::Key>(block, cache.key_scales(head), from, to, [&](int t) { return fresh(k, first + t); });
    write_tokens<C, typename C::Value>(block, cache.value_scales(head), from, to, [&](int t) { return fresh(v, first + t); });
  }

  // Packs K or V of a block; tokens from `held` on are the caller's, which are rotated first.
  template <class Op, class Row>
  static void pack_operand(uint8_t* block, const float* scales, Row row, int held) {
    if constexpr (kRotated<Op>) {
      std::vector<Element> rotated(static_cast<size_t>(C::kTokens) * C::kHeadDim);
      for (int t = 0; t < C::kTokens; ++t)
        if (t < held)
          std::memcpy(&rotated[t * C::kHeadDim], row(t), sizeof(Element) * C::kHeadDim);
        else
          rotate_row<Rotation<Op>, C::kHeadDim>(row(t), &rotated[t * C::kHeadDim]);
      Quantizer<C, Op>::pack(block, scales, [&](int t) -> const Element* { return &rotated[t * C::kHeadDim]; });
    } else {
      Quantizer<C, Op>::pack(block, scales, row);
    }
  }

  void keep(int64_t position) const {
    keep<typename C::Key>(cache.k_row(batch, head, position), fresh(k, position));
    keep<typename C::Value>(cache.v_row(batch, head, position), fresh(v, position));
  }
  template <class Op>
  static void keep(Element* to, const Element* from) {
    if constexpr (kRotated<Op>)
      rotate_row<Rotation<Op>, C::kHeadDim>(from, to);
    else
      std::memcpy(to, from, sizeof(Element) * C::kHeadDim);
  }
};

// The first `count` tokens of one block, all but where tokens are quantized as they arrive: dequantized, in `dtype`, to rows of k and v.
template <class C>
inline void unpack_block(const CacheView<C>& cache, const uint8_t* block, const ffi::View<4>& k, const ffi::View<4>& v, int64_t batch,
                         int64_t head, int64_t position, int64_t count) {
  const auto there = [&](int token) { return !C::ResidualRows::kArrival || token < count; };
  using Element = typename C::Element;
  using Values = Operand<C, typename C::Value>;
  alignas(64) float floats[(C::kHeadDim > C::kSubtile ? C::kHeadDim : C::kSubtile) * kLanes];
  for (int token = 0; token < C::kTokens; token += C::kSubtile) {
    const uint8_t* subtile = block + C::kHeaderBytes + token / C::kSubtile * C::kSubtileBytes;
    for (int tile = 0; tile < C::kSubtile / kLanes; ++tile) {
      expand_keys<C>(block, cache.key_scales(head), subtile, token, tile, floats);
      for (int c = 0; c < C::kHeadDim; c += kLanes) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load<F32>(floats + (c + i) * kLanes);
        transpose(square);
        for (int i = 0; i < kLanes; ++i)
          if (there(token + tile * kLanes + i))
            store_floats<Element>(row_of<Element>(k, batch, position + token + tile * kLanes + i, head) + c, square[i]);
      }
    }
    for (int tile = 0; tile < C::kHeadDim / kLanes; ++tile) {
      Values::expand(Values::source(block, cache.value_scales(head)), subtile, token, tile, floats);
      for (int t = 0; t < C::kSubtile && there(token + t); ++t)
        store_floats<Element>(row_of<Element>(v, batch, position + token + t, head) + tile * kLanes, load<F32>(floats + t * kLanes));
    }
  }
}

}  // namespace kvgen
