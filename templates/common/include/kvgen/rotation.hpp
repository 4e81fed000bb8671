// The rotation of K or V before it is stored: a normalized Walsh-Hadamard transform of blocks of channels, after fixed signs.
// kvgen/format/rotation.py defines it; every back end does these operations in this order, in fp32, and so gives the same bits.
#pragma once
#include <type_traits>

#include "kvgen/format.hpp"

namespace kvgen {

struct NoRotation {
  static constexpr int kBlock = 0;
};

// `Constants::Key::Rotation` and `Value::Rotation`, where there is one.
template <int kBlock_, bool kSigns_>
struct Hadamard {
  static constexpr int kBlock = kBlock_;
  static constexpr bool kSigns = kSigns_;
  static constexpr float kHalfPower = 0.70710678118654752440f;  // 2^(-1/2)
  // 1 / sqrt(kBlock)
  static constexpr float kFactor = kBlock == 16    ? .25f
                                   : kBlock == 32  ? .25f * kHalfPower
                                   : kBlock == 64  ? .125f
                                   : kBlock == 128 ? .125f * kHalfPower
                                                   : .0625f;

  // Bit i of word w is set where channel 32 * w + i is negated: the last step of MurmurHash3.
  KVGEN_FORMAT_FN uint32_t sign_word(int w) {
    uint32_t x = 0x6b76u + 0x9e3779b9u * static_cast<uint32_t>(w);
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
  }
};

template <class Quant, class = void>
struct RotationOf {
  using type = NoRotation;
};
template <class Quant>
struct RotationOf<Quant, std::void_t<typename Quant::Rotation>> {
  using type = typename Quant::Rotation;
};
template <class Quant>
using Rotation = typename RotationOf<Quant>::type;
template <class Quant>
constexpr bool kRotated = Rotation<Quant>::kBlock > 0;

}  // namespace kvgen
