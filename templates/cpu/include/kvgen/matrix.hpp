// Quantizes a matrix [tokens, channels] to 8 bits per channel, and reads it back: the exported functions of a CPU module.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kvgen/matrix/arguments.hpp"
#include "kvgen/simd.hpp"
#include "kvgen/threads.hpp"

namespace kvgen::matrix {

constexpr float kLevels = 127.f;

// q = clamp(rne(x / scale), -127, 127), and 0 where the scale is 0.
inline int8_t code(float x, float scale) {
  const float quotient = __builtin_nearbyintf(scale == 0.f ? 0.f : x / scale);
  return static_cast<int8_t>(static_cast<int32_t>(std::max(-kLevels, std::min(kLevels, quotient))));
}

template <class Config>
class Module {
  using Element = typename Config::Element;

 public:
  static inline Threads threads;

  // scales(x, scales). A maximum does not depend on the order in which threads find it.
  static void scales(const Arguments& a) {
    const int count = std::max(1, static_cast<int>(std::min<int64_t>(threads.count(), (a.tokens + Config::rows - 1) / Config::rows)));
    std::vector<float> tops(static_cast<size_t>(count) * a.channels, 0.f);
#pragma omp parallel for num_threads(count) schedule(static)
    for (int rank = 0; rank < count; ++rank) {
      float* top = tops.data() + rank * a.channels;
      for (int64_t row = a.tokens * rank / count; row < a.tokens * (rank + 1) / count; ++row) raise(top, x_row(a, row), a.channels);
    }
    float* out = a.scales.as<float>();
    for (int64_t j = 0; j < a.channels; ++j) {
      float top = 0.f;
      for (int rank = 0; rank < count; ++rank) top = std::max(top, tops[rank * a.channels + j]);
      out[j] = top / kLevels;
    }
  }

  // quantize(x, scales, codes)
  static void quantize(const Arguments& a) {
    for_tiles(a, [&](int64_t row, int64_t first, int64_t count) {
      const Element* __restrict x = x_row(a, row) + first;
      const float* __restrict scale = a.scales.as<float>() + first;
      int8_t* __restrict codes = code_row(a, row) + first;
      for (int64_t j = 0; j < count; ++j) codes[j] = code(to_float(x[j]), scale[j]);
    });
  }

  // dequantize(codes, scales, out)
  static void dequantize(const Arguments& a) {
    for_tiles(a, [&](int64_t row, int64_t first, int64_t count) {
      Element* __restrict x = x_row(a, row) + first;
      const float* __restrict scale = a.scales.as<float>() + first;
      const int8_t* __restrict codes = code_row(a, row) + first;
      for (int64_t j = 0; j < count; ++j) x[j] = from_float<Element>(static_cast<float>(codes[j]) * scale[j]);
    });
  }

 private:
  static Element* x_row(const Arguments& a, int64_t row) { return a.x.template as<Element>() + row * a.x.stride[0]; }
  static int8_t* code_row(const Arguments& a, int64_t row) { return a.codes.template as<int8_t>() + row * a.codes.stride[0]; }

  static void raise(float* __restrict top, const Element* __restrict x, int64_t channels) {
    for (int64_t j = 0; j < channels; ++j) top[j] = std::max(top[j], std::fabs(to_float(x[j])));
  }

  // Calls `map(row, first channel, channels)` for every row of every tile of Config::rows x Config::channels.
  template <class Map>
  static void for_tiles(const Arguments& a, Map map) {
    const int64_t across = (a.channels + Config::channels - 1) / Config::channels;
    const int64_t tiles = (a.tokens + Config::rows - 1) / Config::rows * across;
#pragma omp parallel for num_threads(static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads.count(), tiles)))) schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = tile / across * Config::rows, first = tile % across * Config::channels;
      const int64_t count = std::min<int64_t>(Config::channels, a.channels - first);
      for (int64_t i = row; i < std::min<int64_t>(a.tokens, row + Config::rows); ++i) map(i, first, count);
    }
  }
};

// Raises where the memory that a call writes overlaps with the memory that it reads: threads write one tile while others read theirs.
inline void check_apart(const Arguments& a, Arguments::Kind kind, int64_t item) {
  const auto apart = [&](const char* name, const auto& written, int64_t size, const char* other_name, const auto& other,
                         int64_t other_size) { ffi::check_apart(a.function, name, written, size, other_name, other, other_size); };
  if (kind == Arguments::Kind::scales) return apart("scales", a.scales, 4, "x", a.x, item);
  if (kind == Arguments::Kind::quantize) {
    apart("codes", a.codes, 1, "x", a.x, item);
    return apart("codes", a.codes, 1, "scales", a.scales, 4);
  }
  apart("out", a.x, item, "codes", a.codes, 1);
  apart("out", a.x, item, "scales", a.scales, 4);
}

template <class Config>
int call(const char* name, Arguments::Kind kind, void (*function)(const Arguments&), const TVMFFIAny* args, int32_t count,
         TVMFFIAny* result) {
  return ffi::guard(result, [&](TVMFFIAny&) {
    const Arguments a(name, args, count, kind, Config::type, kDLCPU);
    check_apart(a, kind, Config::type.bits / 8);
    function(a);
    return false;
  });
}

}  // namespace kvgen::matrix

#define KVGEN_CPU_MATRIX_FUNCTION(Config, name)                                                                                 \
  KVGEN_EXPORT(name) {                                                                                                          \
    using kvgen::matrix::Arguments;                                                                                             \
    return kvgen::matrix::call<Config>(#name, Arguments::Kind::name, kvgen::matrix::Module<Config>::name, args, count, result); \
  }
#define KVGEN_CPU_MATRIX(Config)                \
  KVGEN_CPU_MATRIX_FUNCTION(Config, scales)     \
  KVGEN_CPU_MATRIX_FUNCTION(Config, quantize)   \
  KVGEN_CPU_MATRIX_FUNCTION(Config, dequantize) \
  KVGEN_EXPORT(set_threads) { return kvgen::matrix::Module<Config>::threads.set(args, count, result); }
