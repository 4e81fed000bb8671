// Rotates rows of K, V, query and output.
#pragma once
#include "kvgen/rotation.hpp"
#include "kvgen/simd.hpp"

namespace kvgen {

// A row of kDim channels in registers.
template <class Rotation, int kDim>
struct RotatedRow {
  static constexpr int vectors = kDim / kLanes;
  F32 x[vectors];

  void negate_channels() {
    if constexpr (Rotation::kSigns)
      for (int v = 0; v < vectors; ++v) {
        const uint32_t word = Rotation::sign_word(v * kLanes / 32) >> (v * kLanes % 32);
        alignas(64) float sign[kLanes];
        for (int i = 0; i < kLanes; ++i) sign[i] = word >> i & 1 ? -1.0f : 1.0f;
        x[v] = x[v] * load<F32>(sign);
      }
  }

  // Butterflies of strides 1, 2, 4, ...: of channels in the lanes of a vector, then of vectors.
  void mix() {
    for (int v = 0; v < vectors; v += 2) {
      F32 none{};
      F32 &a = x[v], &b = v + 1 < vectors ? x[v + 1] : none;
      mix_lanes<1>(a, b);
      mix_lanes<2>(a, b);
      mix_lanes<4>(a, b);
      mix_lanes<8>(a, b);
    }
    for (int stride = 1; stride * kLanes < Rotation::kBlock; stride *= 2)
      for (int v = 0; v < vectors; ++v)
        if ((v & stride) == 0) add_and_subtract(x[v], x[v + stride]);
    for (int v = 0; v < vectors; ++v) x[v] = x[v] * Rotation::kFactor;
  }

 private:
  static void add_and_subtract(F32& a, F32& b) {
    const F32 sum = a + b;
    b = a - b;
    a = sum;
  }
  template <int S>
  static void mix_lanes(F32& a, F32& b) {
    swap_halves<S>(a, b);
    add_and_subtract(a, b);
    swap_halves<S>(a, b);
  }
};

// Rotates a row of kDim elements, which is rounded once.
template <class Rotation, int kDim, class Element>
inline void rotate_row(const Element* from, Element* to) {
  RotatedRow<Rotation, kDim> row;
  for (int v = 0; v < row.vectors; ++v) row.x[v] = load_floats<Element>(from + v * kLanes);
  row.negate_channels();
  row.mix();
  for (int v = 0; v < row.vectors; ++v) store_floats<Element>(to + v * kLanes, row.x[v]);
}

// Stores `values` times `factor`, rotated back.
template <class Rotation, int kDim, class Element>
inline void store_rotated_back(const float* values, float factor, Element* to) {
  RotatedRow<Rotation, kDim> row;
  for (int v = 0; v < row.vectors; ++v) row.x[v] = load<F32>(values + v * kLanes) * factor;
  row.mix();
  row.negate_channels();
  for (int v = 0; v < row.vectors; ++v) store_floats<Element>(to + v * kLanes, row.x[v]);
}

}  // namespace kvgen
