// The threads of packing CTAs, and how many CTAs share an SM.
#pragma once
#include "kvgen/pack/words.cuh"

namespace kvgen::packing {

// Threads of a packing CTA: one warp for every tile of 16 tokens, at most eight.
template <class Format>
constexpr int pack_threads() {
  return Format::kTokens >= 128 ? 256 : Format::kTokens * 2;
}

// CTAs per SM that limit the registers. The number depends on the architecture, so it must not be a template argument of a kernel: host
// and device would name different kernels. Coding by thresholds needs few registers, a division for near ties needs more, and so do
// addresses before SM90.
template <class Format>
constexpr int pack_ctas() {
  using Element = typename Format::Element;
  constexpr bool kByThresholds =
      Format::Key::Codec::template kByThresholds<Element> && Format::Value::Codec::template kByThresholds<Element>;
  return (kByThresholds ? 1024 : Format::Key::Codec::kPackThreads) / pack_threads<Format>();
}

}  // namespace kvgen::packing
