// The exported functions of a matrix module: scales, quantize, dequantize (docs/abi.md).
#pragma once
#include "kvgen/host/checks.cuh"
#include "kvgen/matrix/arguments.hpp"
#include "kvgen/matrix/kernels.cuh"

namespace kvgen::matrix {

template <class Schedule>
class Module {
  using Element = typename Schedule::Element;
  static constexpr int kVector = Schedule::kVector;

 public:
  // scales(x, scales)
  static int scales(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const Arguments a("scales", args, count, Arguments::Kind::scales, Schedule::kType, kDLCUDA);
      const detail::DeviceCall on(a);
      int sms = 0;
      on.check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, a.device.device_id));
      if (a.channels == 0) return false;
      const auto launch = a.fits<kVector>(a.x) ? launch_scales<Schedule, kVector> : launch_scales<Schedule, 1>;
      launch(matrix<const Element>(a.x), a.scales.template as<float>(), a.tokens, a.channels, sms, on.stream);
      on.check(cudaGetLastError());
      return false;
    });
  }

  // quantize(x, scales, codes)
  static int quantize(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return map<ToCode, Element, int8_t>("quantize", Arguments::Kind::quantize, args, count, result);
  }

  // dequantize(codes, scales, out)
  static int dequantize(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return map<FromCode, int8_t, Element>("dequantize", Arguments::Kind::dequantize, args, count, result);
  }

 private:
  template <class T>
  static Matrix<T> matrix(const ffi::View<2>& view) {
    return {reinterpret_cast<T*>(view.data), view.stride[0]};
  }

  template <template <class, int> class Map, class From, class To>
  static int map(const char* function, Arguments::Kind kind, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const Arguments a(function, args, count, kind, Schedule::kType, kDLCUDA);
      if (a.tokens == 0 || a.channels == 0) return false;
      const detail::DeviceCall on(a);
      const bool wide = a.fits<kVector>(a.x) && a.fits<kVector>(a.codes) && a.aligned<kVector>(a.scales);
      wide ? run<Map, kVector, From, To>(a, kind, on.stream) : run<Map, 1, From, To>(a, kind, on.stream);
      on.check(cudaGetLastError());
      return false;
    });
  }

  template <template <class, int> class Map, int kWide, class From, class To>
  static void run(const Arguments& a, Arguments::Kind kind, cudaStream_t stream) {
    const int64_t ctas = ctas_of<Schedule, kWide>(a.tokens, a.channels);
    if (ctas > kMostCtas)
      ffi::fail("ValueError", "%s: a matrix of %lld x %lld takes %lld CTAs, and a launch has at most 2^31 - 1", a.function,
                (long long)a.tokens, (long long)a.channels, (long long)ctas);
    const bool coding = kind == Arguments::Kind::quantize;
    launch_map<Map, Schedule, kWide, From, To>(matrix<const From>(coding ? a.x : a.codes), matrix<To>(coding ? a.codes : a.x),
                                               a.scales.template as<float>(), a.tokens, a.channels, stream);
  }
};

}  // namespace kvgen::matrix

#define KVGEN_EXPORT_MATRIX(Module)                                        \
  KVGEN_EXPORT(scales) { return Module::scales(args, count, result); }     \
  KVGEN_EXPORT(quantize) { return Module::quantize(args, count, result); } \
  KVGEN_EXPORT(dequantize) { return Module::dequantize(args, count, result); }
