// Tokens to packed codes: statistics in fp32, params rounded to their storage type first, codes from the rounded params.
#pragma once

#include "kvgen/boost.hpp"

namespace kvgen {

template <class C, class Info>
struct Quantizer {
  using Op = Operand<C, Info>;
  using Code = typename Op::Code;
  using Element = typename C::Element;
  using Param = typename C::Param;
  static constexpr int levels = (1 << (Info::bits == 16 ? 1 : Info::bits)) - 1;
  static constexpr int half = (levels + 1) / 2;  // the unsigned code of a symmetric zero
  static constexpr int boosted_levels = 15;

  // Packs the tokens 0 .. C::block - 1 that row(token) points to.
  template <class Row>
  static void pack(uint8_t* block, Row row) {
    if constexpr (Code::quantized) {
      if constexpr (Info::per_channel)
        channel_params(block, row);
      else
        token_params(block, row);
    }
    for (int token = 0; token < C::block; token += C::subtile) {
      uint8_t* subtile = subtile_of(block, token);
      for (int tile = 0; tile < Op::row_extent / kLanes; ++tile) {
        if constexpr (Info::rows_are_tokens && Info::boosted > 0)
          boosted_codes_of_tokens(block, subtile, token, tile, row);
        else if constexpr (Info::rows_are_tokens)
          codes_of_tokens(block, subtile, token, tile, row);
        else
          codes_of_channels(block, subtile, token, tile, row);
      }
    }
  }

 private:
  static uint8_t* subtile_of(uint8_t* block, int token) { return block + C::header_bytes + token / C::subtile * C::subtile_bytes; }

  struct Range {
    F32 low, high;

    explicit Range(F32 x) : low(x), high(x) {}
    void add(F32 x) {
      low = select(x < low, x, low);
      high = select(x > high, x, high);
    }
  };

  static Param saturated(float x) {
    constexpr float most = sizeof(Param) == 4 ? std::numeric_limits<float>::max() : 65504.0f;
    return from_float<Param>(x > most ? most : x < -most ? -most : x);
  }

  // Scale and zero of a group with this range, as they are stored. `most` is the largest code.
  static void put(Param* at, float low, float high, int most = levels) {
    if constexpr (Info::zero) {
      at[0] = saturated((high - low) / static_cast<float>(most));
      at[Op::param_extent] = saturated(low);
    } else {
      const float magnitude = high > -low ? high : std::fabs(low);  // of zeros it is 0 and not -0
      at[0] = saturated(magnitude / static_cast<float>(half - 1));
    }
  }

  template <class Row>
  static void channel_params(uint8_t* block, Row row) {
    alignas(64) float low[C::head_dim], high[C::head_dim];
    for (int group = 0; group < C::block / Info::group; ++group) {
      const auto row_of_group = [&](int t) { return row(group * Info::group + t); };
      for (int c = 0; c < C::head_dim; c += kLanes) {
        Range range(load_floats<Element>(row_of_group(0) + c));
        for (int t = 1; t < Info::group; ++t) range.add(load_floats<Element>(row_of_group(t) + c));
        store(low + c, range.low);
        store(high + c, range.high);
      }
      Param* at = const_cast<Param*>(Op::param(block, nullptr, group, 0));
      for (int c = 0; c < C::head_dim; ++c) put(at + c, low[c], high[c]);
      if constexpr (Info::boosted > 0) {
        uint8_t* index = const_cast<uint8_t*>(Boost<C>::index(block, group));
        select_boosted<C>(index, row_of_group, low, high);
        for (int i = 0; i < Info::boosted; ++i) put(at + index[i], low[index[i]], high[index[i]], boosted_levels);
      }
    }
  }

  template <class Row>
  static void token_params(uint8_t* block, Row row) {
    for (int token = 0; token < C::block; ++token)
      for (int group = 0; group < C::head_dim / Info::group; ++group) {
        Param* at = const_cast<Param*>(Op::param(nullptr, subtile_of(block, token), group, token % C::subtile));
        put_range(at, row(token) + group * Info::group);
      }
  }

  // Params of `group` neighbours.
  static void put_range(Param* at, const Element* x) {
    if constexpr (Info::group % kLanes == 0) {
      Range range(load_floats<Element>(x));
      for (int i = kLanes; i < Info::group; i += kLanes) range.add(load_floats<Element>(x + i));
      return put(at, -largest_lane(-range.low), largest_lane(range.high));
    }
    float low = to_float(x[0]), high = low;
    for (int i = 1; i < Info::group; ++i) {
      const float value = to_float(x[i]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    put(at, low, high);
  }

  // NaN gives `least`.
  static F32 clamped(F32 x, float least, float most) {
    x = select(x > least, x, splat<F32>(least));
    return select(x < most, x, splat<F32>(most));
  }

  // The unsigned codes of 16 values. `most` is the largest code.
  static U32 code(F32 x, const Affine& a, int most = levels) {
    F32 q;
    if constexpr (Info::zero) {
      q = round_even((x - a.zero) / a.scale);
      q = clamped(q, 0.0f, static_cast<float>(most));
    } else {
      q = round_even(x / a.scale);
      q = clamped(q, static_cast<float>(1 - half), static_cast<float>(half - 1)) + static_cast<float>(half);
    }
    q = select(a.scale == 0.0f, splat<F32>(Info::zero ? 0.0f : static_cast<float>(half)), q);
    return as<U32>(convert<int32_t>(q));
  }

  // Element k of 16 rows, as the bits that go into their words.
  static U32 field(F32 x, const uint8_t* block, const uint8_t* subtile, int token, int tile, int k) {
    if constexpr (Code::quantized) return code(x, Op::affine_at(block, subtile, token, tile, k));
    if constexpr (sizeof(Element) == 4) return as<U32>(x);
    uint16_t half_words[kLanes];
    uint32_t bits[kLanes];
    store_floats<Element>(half_words, x);
    for (int i = 0; i < kLanes; ++i) bits[i] = half_words[i];
    return load<U32>(bits);
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
    for (int c = 0; c < C::head_dim; c += kLanes) {
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
    const int group = (token + tile * kLanes) / Info::group;
    const uint8_t* channel = Upper::index(block, group);
    uint8_t *lower = const_cast<uint8_t*>(Op::codes(subtile, tile)), *upper = const_cast<uint8_t*>(Upper::codes(subtile, tile));
    U32 word{};
    for (int i = 0; i < Upper::slots; ++i) {
      U32 bits{};
      if (i < Upper::channels) {
        const int c = channel[i];
        float x[kLanes];
        for (int t = 0; t < kLanes; ++t) x[t] = to_float(row(token + tile * kLanes + t)[c]);
        bits = code(load<F32>(x), Op::affine_of_one(block, nullptr, group, c), boosted_levels);
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
    for (int t = 0; t < C::subtile; ++t) {
      const F32 x = load_floats<Element>(row(token + t) + tile * kLanes);
      put_field(word, words, t, field(x, block, subtile, token, tile, t));
    }
  }
};

}  // namespace kvgen
