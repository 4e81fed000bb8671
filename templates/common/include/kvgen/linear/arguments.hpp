// The arguments of a linear module's function, on any device: x [m, k], the packed weight, bias [n] or None, residual [m, columns] or None,
// out [m, columns], m up to the compiled rows. Rows of x, residual and out may lie apart.
#pragma once
#include "kvgen/ffi.hpp"

namespace kvgen::linear {

enum class Epilogue { none, silu_mul, add };

// C: type, n, k, rows, bias, epilogue; `bytes`: of the packed weight; `row_align`: of rows of x, residual and out, in bytes.
template <class C>
struct Arguments : ffi::Args {
  static constexpr int columns = C::epilogue == Epilogue::silu_mul ? C::n / 2 : C::n;

  ffi::View<2> x, residual, out;
  ffi::View<1> packed, bias;
  int rows = 0;

  Arguments(const TVMFFIAny* args, int32_t count, DLDeviceType on, int64_t bytes, int row_align)
      : Args("linear", args, count, 5, {on, -1}, row_align) {
    x = tensor<2>(0, "x", C::type, {ffi::kAny, C::k}, ffi::Memory::rows);
    packed = tensor<1>(1, "packed", ffi::kUint8, {bytes}, ffi::Memory::contiguous);
    if (x.size[0] > C::rows)
      ffi::fail("ValueError", "linear: x has %lld rows, more than the %d that the kernel is compiled for", (long long)x.size[0], C::rows);
    rows = static_cast<int>(x.size[0]);
    require(2, "bias", C::bias, "the spec's bias is");
    require(3, "residual", C::epilogue == Epilogue::add, "epilogue add is");
    if (C::bias) bias = tensor<1>(2, "bias", C::type, {C::n}, ffi::Memory::contiguous);
    if (C::epilogue == Epilogue::add) residual = tensor<2>(3, "residual", C::type, {rows, columns}, ffi::Memory::rows);
    out = tensor<2>(4, "out", C::type, {rows, columns}, ffi::Memory::rows);
    if (rows > 1 && out.stride[0] < columns)
      ffi::fail("ValueError", "linear: rows of out must not overlap: one begins %lld elements after the other, and has %d",
                (long long)out.stride[0], columns);
  }

 private:
  void require(int i, const char* name, bool wanted, const char* what) const {
    if (given(i) != wanted)
      ffi::fail("ValueError", "linear: %s must be %s: %s %s", name, wanted ? "given" : "None", what, wanted ? "true" : "false");
  }
};

}  // namespace kvgen::linear
