// Enough of CUDA to run kernels on a CPU: a fibre per thread, one CTA after the other, warp-wide operations as meeting points.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline struct { int x, y, z; } threadIdx, blockIdx, blockDim;

namespace emulator {

constexpr int kStack = 1 << 17;

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done = false;
};
struct Meeting {
  int size = 0, arrived = 0, round = 0;
  unsigned in[32], out[32];
};

inline std::vector<std::unique_ptr<Fibre>> fibres;
inline std::vector<Meeting> warps;
inline Meeting cta;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int current;

// Threads that wait for each other; the last one does the work for all. Those that have left the kernel are not waited for.
template <class Work>
void meet(Meeting& meeting, Work work) {
  if (++meeting.arrived == meeting.size) {
    work();
    meeting.arrived = 0, ++meeting.round;
    return;
  }
  for (const int round = meeting.round; round == meeting.round;) swapcontext(&fibres[current]->context, &scheduler);
}

// Every lane gives a word and takes what `from(lane)` gave.
template <class From>
unsigned exchange(unsigned x, From from) {
  Meeting& warp = warps[current / 32];
  warp.in[current % 32] = x;
  meet(warp, [&] {
    for (int i = 0; i < 32; ++i) warp.out[i] = from(warp.in, i);
  });
  return warp.out[current % 32];
}

inline void enter() {
  body();
  fibres[current]->done = true;
  swapcontext(&fibres[current]->context, &scheduler);
}

inline void run_cta(int threads) {
  fibres.clear(), warps.assign((threads + 31) / 32, {});
  for (Meeting& warp : warps) warp.size = 32;
  cta = {}, cta.size = threads;
  for (int i = 0; i < threads; ++i) {
    fibres.push_back(std::make_unique<Fibre>());
    Fibre& fibre = *fibres.back();
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data(), fibre.context.uc_stack.ss_size = kStack, fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (current = 0; current < threads; ++current) {
      if (fibres[current]->done) continue;
      busy = true, threadIdx.x = current;
      swapcontext(&scheduler, &fibres[current]->context);
    }
  }
}

// CTAs in the order of their numbers, or against it.
inline bool backwards = false;

inline void launch(dim3 grid, int threads, std::function<void()> kernel) {
  body = std::move(kernel), blockDim.x = threads;
  for (unsigned i = 0; i < grid.x * grid.y; ++i) {
    const unsigned at = backwards ? grid.x * grid.y - 1 - i : i;
    blockIdx.x = static_cast<int>(at % grid.x), blockIdx.y = static_cast<int>(at / grid.x);
    run_cta(threads);
  }
}

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::cta, [] {}); }
inline void __syncwarp() { emulator::meet(emulator::warps[emulator::current / 32], [] {}); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
  return emulator::exchange(x, [=](const unsigned* in, int lane) { return in[lane ^ mask]; });
}
inline unsigned __shfl_down_sync(unsigned, unsigned x, int by) {
  return emulator::exchange(x, [=](const unsigned* in, int lane) { return in[lane + by < 32 ? lane + by : lane]; });
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
