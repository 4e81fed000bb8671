// y = epilogue(x W^T) of a packed weight: the exported function of a CPU module.
#pragma once

#include <cstdlib>
#include <new>

#include "kvgen/linear/arguments.hpp"
#include "kvgen/linear/products.hpp"
#include "kvgen/threads.hpp"

namespace kvgen::linear {

// Memory of the calling thread that its next call takes again.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  char* of(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

template <class C>
class Module {
  using L = Layout<C>;
  using Element = typename C::Element;
  static constexpr bool bytes = C::dot == Dot::int16 && kVnni;

  static constexpr int kHeight = 4;                                 // most rows whose sums lie in registers
  static constexpr int64_t kAlone = 1 << 14;                        // elements of x that the calling thread prepares without the others
  static constexpr int64_t kShare = 16 << 10;                       // bytes of the weight that are worth a thread
  static constexpr bool pairs = C::epilogue == Epilogue::silu_mul;  // a tile of gate rows and one of up rows

 public:
  static inline Threads threads;
  using Call = Arguments<C>;

  static void linear(const Call& a) {
    if (a.rows == 0) return;
#ifdef KVGEN_AMX
    if (C::dot == Dot::int16 && a.rows >= C::amx_rows && amx_allowed())
      return run<Parts<C>>(a, kAmxRows, [&](const Rows& x, int first, int last) { run_amx(a, x, first, last); });
#endif
    run<std::conditional_t<bytes, Bytes<C>, Floats<C>>>(
        a, kHeight, [&](const Rows& x, int first, int last) { run_heights(a, x, first, last, std::integral_constant<int, kHeight>{}); });
  }

 private:
  // Calls multiply(x, first tile, last tile) on every thread, x in blocks of up to `most` rows.
  template <class Numbers, class F>
  static void run(const Call& a, int most, F multiply) {
    const int blocks = (a.rows + most - 1) / most, height = (a.rows + blocks - 1) / blocks;
    const X<Numbers> x(a, blocks, height);
    const int64_t items = int64_t{blocks} * height * L::units;
    const bool alone = int64_t{a.rows} * C::k <= kAlone;
    if (alone) x.prepare(0, items);
    constexpr int step = pairs ? 2 : 1, steps = L::tiles / step;
    const int team = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>({threads.count(), steps, L::bytes / kShare})));
#pragma omp parallel num_threads(team)
    {
      const int64_t count = omp_get_num_threads(), rank = omp_get_thread_num();
      if (!alone) {
        x.prepare(items * rank / count, items * (rank + 1) / count);
#pragma omp barrier
      }
      multiply(x, static_cast<int>(steps * rank / count) * step, static_cast<int>(steps * (rank + 1) / count) * step);
    }
  }

  // The rows of x for the products, in the calling thread's memory.
  template <class Numbers>
  class X : public Rows {
   public:
    X(const Call& a, int blocks, int height) : a_(a) {
      static thread_local Scratch scratch;
      this->blocks = blocks, this->height = height;
      notes_at = Numbers::run_bytes(height) * L::units * L::runs;
      stride = notes_at + (int64_t{L::units} * height * Numbers::notes * 4 + 63) / 64 * 64;
      data = own_ = scratch.of(blocks * stride);
    }

    // Items are the units of all rows.
    void prepare(int64_t first, int64_t last) const {
      while (first < last) {
        const int row = static_cast<int>(first / L::units), unit = static_cast<int>(first % L::units);
        const int end = static_cast<int>(std::min<int64_t>(L::units, unit + last - first));
        const Element* from = row < a_.rows ? a_.x.template as<Element>() + row * a_.x.stride[0] : nullptr;
        char* to = own_ + row / height * stride;
        Numbers::put(from, height, row % height, unit, end, to, reinterpret_cast<float*>(to + notes_at));
        first += end - unit;
      }
    }

   private:
    const Call& a_;
    char* own_;
  };

  // Tiles that so many rows share: their sums leave registers to codes and weights. Steps take more, so that memory is read in order.
  static constexpr int shared_tiles(int rows, int most) {
    constexpr int vectors = kRegisterBytes == 64 ? 32 : 16, each = kRegisterBytes < 64 ? 64 / kRegisterBytes : 1;
    int tiles = most;
    while (tiles > 1 && tiles * rows * each * (bytes ? 2 : 1) > vectors * 3 / 4) tiles /= 2;
    return tiles;
  }

  // Calls f(integral_constant<T>, tile) for steps of T tiles, fewer at the ends of blocks.
  template <int T, class F>
  KVGEN_INLINE static void for_tiles(int first, int last, F f) {
    while (first < last) {
      const int end = std::min(last, first / kBlockTiles * kBlockTiles + kBlockTiles);
      first = steps_of<T>(first, end, f);
    }
  }
  template <int T, class F>
  KVGEN_INLINE static int steps_of(int first, int end, F f) {
    for (; first + T <= end; first += T) f(std::integral_constant<int, T>{}, first);
    if constexpr (T > (pairs ? 2 : 1)) return steps_of<T / 2>(first, end, f);
    return first;
  }

  // Blocks may have rows of zeros at their ends.
  template <int T>
  using Totals = F32[C::rows + C::rows / kHeight + 1][T];

  template <int H>
  static void run_heights(const Call& a, const Rows& x, int first, int last, std::integral_constant<int, H>) {
    if constexpr (H > 1)
      if (x.height < H) return run_heights(a, x, first, last, std::integral_constant<int, H - 1>{});
    for_tiles<C::tiles>(first, last, [&](auto width, int tile) { run_tiles<H, width.value>(a, x, tile); });
  }

  template <int H, int T>
  static __attribute__((noinline)) void run_tiles(const Call& a, const Rows& x, int tile) {
    constexpr int S = shared_tiles(H, T);
    Stream<C> weight(a.packed.template as<uint8_t>(), tile);
    Totals<T> total;
    for (int m = 0; m < x.blocks * H; ++m)
      for (int t = 0; t < T; ++t) total[m][t] = F32{};
    for (int u = 0; u < L::units; ++u, weight.next())
      for (int block = 0; block < x.blocks; ++block)
        for (int first = 0; first < T; first += S) {
#ifdef __AVX512VNNI__
          if constexpr (bytes)
            multiply_bytes<C, H, S>(weight, x, block, u, first, total + block * H);
          else
#endif
            multiply_floats<C, H, S>(weight, x, block, u, first, total + block * H);
        }
    for (int m = 0; m < a.rows; ++m) finish<T>(a, weight, total[m], tile, m);
  }

#ifdef KVGEN_AMX
  static void run_amx(const Call& a, const Rows& x, int first, int last) {
    const AmxRegisters registers(x.height);
    for_tiles<C::tiles>(first, last, [&](auto width, int tile) {
      constexpr int T = width.value;
      const Stream<C> weight(a.packed.template as<uint8_t>(), tile);
      Totals<T> total;
      for (int m = 0; m < x.blocks * x.height; ++m)
        for (int t = 0; t < T; ++t) total[m][t] = F32{};
      AmxProducts<C, T>(weight, x, total);
      for (int m = 0; m < a.rows; ++m) finish<T>(a, weight, total[m], tile, m);
    });
  }
#endif

  // Scales of whole rows, bias, epilogue, output.
  template <int T>
  KVGEN_INLINE static void finish(const Call& a, const Stream<C>& weight, F32 (&y)[T], int tile, int row) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      if (L::row) y[t] *= weight.scale(t);
      if (C::bias) y[t] += load_floats<Element>(a.bias.template as<Element>() + first_row(tile + t));
    }
    if constexpr (pairs) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t += 2) put(a, row, first_row(tile + t), silu(y[t]) * y[t + 1]);
    } else {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) put(a, row, first_row(tile + t), y[t]);
    }
  }

  // The weight's row of a tile's first lane.
  static int first_row(int tile) { return kLanes * (pairs ? tile / 2 + tile % 2 * (L::tiles / 2) : tile); }

  KVGEN_INLINE static void put(const Call& a, int row, int column, F32 y) {
    if constexpr (C::epilogue == Epilogue::add)
      y += load_floats<Element>(a.residual.template as<Element>() + row * a.residual.stride[0] + column);
    Element* to = a.out.template as<Element>() + row * a.out.stride[0] + column;
    if constexpr (std::is_same_v<Element, Bfloat>)
      store(to, rounded(y));
    else
      store_floats<Element>(to, y);
  }

  // As from_float<Bfloat>, lane by lane without a branch.
  KVGEN_INLINE static auto rounded(F32 y) {
    const U32 bits = as<U32>(y), up = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return convert<uint16_t>(select(y == y, up, bits >> 16 | 0x40u));
  }

  KVGEN_INLINE static F32 silu(F32 x) {
    const F32 power = x * -1.4426950f;
    return x / (1.0f + exp2(select(power < 127.0f, power, splat<F32>(127.0f))));
  }
};

// Raises where out overlaps with what a call reads: threads write a part while others read. Epilogue add may write over its residual.
template <class C>
void check_apart(const Arguments<C>& a) {
  constexpr int64_t item = sizeof(typename C::Element);
  ffi::check_apart(a.function, "out", a.out, item, "x", a.x, item);
  ffi::check_apart(a.function, "out", a.out, item, "packed", a.packed, 1);
  ffi::check_apart(a.function, "out", a.out, item, "bias", a.bias, item);
  const bool same = a.residual.data == a.out.data && (a.rows < 2 || a.residual.stride[0] == a.out.stride[0]);
  if (!same) ffi::check_apart(a.function, "out", a.out, item, "residual", a.residual, item);
}

template <class C>
int call(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  return ffi::guard(result, [&](TVMFFIAny&) {
    const Arguments<C> a(args, count, kDLCPU, Layout<C>::bytes, 1);
    check_apart(a);
    Module<C>::linear(a);
    return false;
  });
}

}  // namespace kvgen::linear

#define KVGEN_CPU_LINEAR(Config)                                                    \
  KVGEN_EXPORT(linear) { return kvgen::linear::call<Config>(args, count, result); } \
  KVGEN_EXPORT(set_threads) { return kvgen::linear::Module<Config>::threads.set(args, count, result); }
