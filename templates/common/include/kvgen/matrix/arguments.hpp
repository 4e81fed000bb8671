// The arguments of a matrix module's functions, on any device: a matrix x [tokens, channels], its codes, int8 of the same shape, and its
// scales, float32 [channels]. Rows of x and codes may lie apart, as those of one head of a cache do.
#pragma once
#include "kvgen/ffi.hpp"

namespace kvgen::matrix {

constexpr DLDataType kInt8{kDLInt, 8, 1};

struct Arguments : ffi::Args {
  enum class Kind {
    scales,      // (x, scales)
    quantize,    // (x, scales, codes)
    dequantize,  // (codes, scales, x)
  };

  ffi::View<2> x, codes;
  ffi::View<1> scales;
  int64_t tokens = 0, channels = 0;

  Arguments(const char* function, const TVMFFIAny* args, int32_t count, Kind kind, DLDataType type, DLDeviceType on)
      : Args(function, args, count, kind == Kind::scales ? 2 : 3, {on, -1}, 1), item_(type.bits / 8) {
    const bool coded = kind == Kind::dequantize;
    const ffi::View<2> from = coded ? matrix(0, "codes", kInt8) : matrix(0, "x", type);
    tokens = from.size[0], channels = from.size[1];
    scales = tensor<1>(1, "scales", ffi::kFloat32, {channels}, ffi::Memory::contiguous);
    (coded ? codes : x) = from;
    if (kind == Kind::quantize) codes = output("codes", kInt8);
    if (coded) x = output("out", type);
  }

  // Whether every row of a matrix consists of vectors of N elements that are aligned to their size, at most to 16 bytes.
  template <int N>
  bool fits(const ffi::View<2>& view) const {
    return channels % N == 0 && (tokens < 2 || view.stride[0] % N == 0) && starts<N>(view.data, &view == &codes ? 1 : item_);
  }
  template <int N>
  bool aligned(const ffi::View<1>& view) const {
    return starts<N>(view.data, 4);
  }

 private:
  int64_t item_;  // bytes of an element of x

  template <int N>
  static bool starts(const char* data, int64_t item) {
    const int64_t bytes = N * item;
    return reinterpret_cast<uintptr_t>(data) % (bytes < 16 ? bytes : 16) == 0;
  }

  ffi::View<2> matrix(int i, const char* name, DLDataType type, int64_t rows = ffi::kAny, int64_t columns = ffi::kAny) {
    return tensor<2>(i, name, type, {rows, columns}, ffi::Memory::strided);
  }
  ffi::View<2> output(const char* name, DLDataType type) {
    const ffi::View<2> view = matrix(2, name, type, tokens, channels);
    if (tokens > 1 && view.stride[0] < channels)
      ffi::fail("ValueError", "%s: rows of %s must not overlap: one begins %lld elements after the other, and has %lld", function, name,
                (long long)view.stride[0], (long long)channels);
    return view;
  }
};

}  // namespace kvgen::matrix
