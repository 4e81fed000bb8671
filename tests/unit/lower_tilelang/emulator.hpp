// Runs the text of a generated kernel on a CPU: a fibre per thread, warp-wide
// operations as meeting points. Copies to shared memory land as late as the
// program's waits allow, shared memory starts as NaN.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define CUDART_INF_F std::numeric_limits<float>::infinity()
using std::max;
using std::min;
using uchar = unsigned char;

struct dim3 {
  int x = 0, y = 0, z = 0;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
struct uint1 {
  unsigned x;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint1 make_uint1(unsigned x) { return {x}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

using half_t = _Float16;
struct half2 {
  half_t x, y;
};

alignas(1024) unsigned memory[1 << 16]; // the shared array, by the name that
                                        // programs give it
alignas(1024) uchar buf_dyn_shmem[1 << 18]; // several of them
inline dim3 threadIdx, blockIdx;

namespace emulator {

constexpr int kStack = 1 << 16;

struct Copy {
  void *to;
  uint4 value;
};
struct Meeting { // of `size` threads
  int size = 0, arrived = 0, round = 0;
  float in[32][8];
  unsigned words[32][8], out[32];
  float sums[32][4];
};
struct Fibre {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false, waiting = false; // for the cluster
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

// A CTA of the cluster that is not the one that runs.
struct Cta {
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Meeting> warps;
  Meeting block;
  std::vector<unsigned> memory;
};

inline std::vector<std::unique_ptr<Fibre>> fibres;
inline std::vector<Meeting> warps;
inline Meeting block;
inline std::vector<Cta> cluster;
inline int cluster_round;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int current;

inline Fibre &self() { return *fibres[current]; }
inline Meeting &warp() { return warps[current / 32]; }
inline int lane() { return current % 32; }
inline void yield() { swapcontext(&self().context, &scheduler); }

// All threads of the meeting come by; the last one does the work for all.
template <class Work> void meet(Meeting &meeting, Work work) {
  if (++meeting.arrived == meeting.size) {
    work();
    meeting.arrived = 0, ++meeting.round;
    return;
  }
  for (const int round = meeting.round; round == meeting.round;)
    yield();
}

inline void enter() {
  body();
  self().done = true;
  yield();
}

inline void begin_block(int threads) {
  fibres.clear(), warps.assign(threads / 32, {});
  for (Meeting &each : warps)
    each.size = 32;
  block = {}, block.size = threads;
  std::memset(memory, 0xff, sizeof memory);
  std::memset(buf_dyn_shmem, 0xff, sizeof buf_dyn_shmem);
  for (int i = 0; i < threads; ++i) {
    fibres.push_back(std::make_unique<Fibre>());
    Fibre &fibre = *fibres.back();
    fibre.stack.resize(kStack);
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data(),
    fibre.context.uc_stack.ss_size = kStack, fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
  }
}

// Until all threads are done or wait for the cluster; whether all are done.
inline bool run_block(int threads) {
  for (bool busy = true; busy;) {
    busy = false;
    for (current = 0; current < threads; ++current) {
      if (self().done || self().waiting)
        continue;
      busy = true, threadIdx.x = current;
      swapcontext(&scheduler, &self().context);
    }
  }
  return std::all_of(fibres.begin(), fibres.end(),
                     [](const auto &each) { return each->done; });
}

inline void swap_block(Cta &other) {
  std::swap(fibres, other.fibres), std::swap(warps, other.warps),
      std::swap(block, other.block);
  other.memory.resize(std::size(memory));
  std::swap_ranges(memory, memory + std::size(memory), other.memory.data());
}

// The CTAs of a cluster take turns, and each runs as far as it can.
inline void run_cluster(int ctas, int threads) {
  cluster = std::vector<Cta>(ctas);
  for (Cta &each : cluster)
    begin_block(threads), swap_block(each);
  for (bool done = false; !done; ++cluster_round) {
    done = true;
    for (blockIdx.y = 0; blockIdx.y < ctas; ++blockIdx.y) {
      swap_block(cluster[blockIdx.y]);
      for (auto &each : fibres)
        each->waiting = false;
      done &= run_block(threads);
      swap_block(cluster[blockIdx.y]);
    }
  }
}

template <class Kernel>
void launch(int grid_x, int grid_y, int threads, bool clusters, Kernel kernel) {
  body = kernel;
  for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
    if (clusters) {
      run_cluster(grid_y, threads);
      continue;
    }
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
      begin_block(threads), run_block(threads);
  }
}

inline float half(unsigned bits) {
  _Float16 x;
  const uint16_t narrow = static_cast<uint16_t>(bits);
  std::memcpy(&x, &narrow, 2);
  return static_cast<float>(x);
}
inline unsigned to_half(float x) {
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
inline float bf16(unsigned bits) {
  const unsigned wide = bits << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
inline unsigned to_bf16(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

} // namespace emulator

inline void __syncthreads() {
  emulator::meet(emulator::block, [] {});
}
inline void __syncwarp() {
  emulator::meet(emulator::warp(), [] {});
}
template <class T> T __shfl_sync(unsigned, T x, int from, int = 32) {
  static_assert(sizeof(T) == 4);
  auto &warp = emulator::warp();
  std::memcpy(&warp.in[emulator::lane()][0], &x, 4);
  emulator::meet(warp, [&] {
    for (int i = 0; i < 32; ++i)
      std::memcpy(&warp.sums[i][0], &warp.in[i][0], 4);
  });
  std::memcpy(&x, &warp.sums[from][0], 4);
  return x;
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int by, int = 32) {
  return __shfl_sync(mask, x, emulator::lane() ^ by);
}
inline int __any_sync(unsigned, int x) {
  auto &warp = emulator::warp();
  warp.words[emulator::lane()][0] = x;
  emulator::meet(warp, [&] {
    warp.out[0] = 0;
    for (int i = 0; i < 32; ++i)
      warp.out[0] |= warp.words[i][0] != 0;
  });
  return warp.out[0];
}
inline unsigned __pack_half2(half_t low, half_t high) {
  return emulator::to_half(low) | emulator::to_half(high) << 16;
}
inline float __log2f(float x) { return std::log2(x); }
inline int atomicAdd(int *x, int by) { return (*x += by) - by; }

// Bits of a tensor core's accumulators, which truncate. Few of them show in a short cache what a long one does to 24.
extern "C" int accumulator_bits = 24;

namespace tl {

inline float accumulated(float sum) {
  uint32_t word;
  std::memcpy(&word, &sum, 4);
  word &= ~0u << (24 - accumulator_bits);
  std::memcpy(&sum, &word, 4);
  return sum;
}

enum class DataType { kFloat16, kBFloat16, kFloat32 };

template <DataType kA, DataType, DataType, int, int, int, bool, bool>
void mma_sync(float *c, const unsigned *a, const unsigned *b) {
  auto &warp = emulator::warp();
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i)
    warp.words[lane][i] = a[i];
  for (int i = 0; i < 2; ++i)
    warp.words[lane][4 + i] = b[i];
  emulator::meet(warp, [&] {
    const auto value =
        kA == DataType::kFloat16 ? emulator::half : emulator::bf16;
    float left[16][16], right[16][8];
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 2; ++i)
        for (int high = 0; high < 2; ++high) {
          const int shift = 16 * i, k = l % 4 * 2 + i + 8 * high;
          for (int half = 0; half < 2; ++half)
            left[l / 4 + 8 * half][k] =
                value(warp.words[l][2 * high + half] >> shift & 0xffff);
          right[k][l / 4] = value(warp.words[l][4 + high] >> shift & 0xffff);
        }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        double sum = 0;
        for (int k = 0; k < 16; ++k)
          sum += static_cast<double>(left[l / 4 + i / 2 * 8][k]) *
                 right[k][l % 4 * 2 + i % 2];
        warp.sums[l][i] = static_cast<float>(sum);
      }
  });
  for (int i = 0; i < 4; ++i)
    c[i] = accumulated(c[i] + warp.sums[lane][i]);
}

template <int kBytes> void cp_async_gs(void *shared, const void *global) {
  static_assert(kBytes == 16);
  emulator::Copy copy{shared, {}};
  std::memcpy(&copy.value, global, 16);
  emulator::self().open.push_back(copy);
}
template <int kMatrices, bool kTranspose>
void load_matrices(const void *shared, void *fragments) {
  auto &warp = emulator::warp();
  const int lane = emulator::lane();
  uint16_t rows[32][8];
  static uint16_t all[32][32][8]; // by warp
  auto &mine = all[&warp - emulator::warps.data()];
  std::memcpy(mine[lane], shared, 16);
  emulator::meet(warp, [] {});
  std::memcpy(rows, mine, sizeof rows);
  emulator::meet(warp, [] {});
  for (int i = 0; i < kMatrices; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j)
      pair[j] = kTranspose ? rows[8 * i + lane % 4 * 2 + j][lane / 4]
                           : rows[8 * i + lane / 4][lane % 4 * 2 + j];
    static_cast<unsigned *>(fragments)[i] = pair[0] | pair[1] << 16;
  }
}
inline void ptx_ldmatrix_x4(const void *shared, void *fragments) {
  load_matrices<4, false>(shared, fragments);
}
inline void ptx_ldmatrix_x4_trans(const void *shared, void *fragments) {
  load_matrices<4, true>(shared, fragments);
}
inline void ptx_ldmatrix_x2_trans(const void *shared, void *fragments) {
  load_matrices<2, true>(shared, fragments);
}

inline void cp_async_commit() {
  emulator::self().groups.push_back(std::move(emulator::self().open)),
      emulator::self().open.clear();
}
template <int kPending> void cp_async_wait() {
  auto &groups = emulator::self().groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const auto &copy : groups.front())
      std::memcpy(copy.to, &copy.value, 16);
}

} // namespace tl

namespace kvgen {

namespace ptx {
inline float exp2(float x) { return std::exp2(x); }
inline unsigned pack_half2(float low, float high) {
  return emulator::to_half(low) | emulator::to_half(high) << 16;
}
inline unsigned not_and_or(unsigned x, unsigned mask, unsigned set) { return (~x & mask) | set; }
inline unsigned odd_bytes(unsigned x) { return x >> 8 & 0x00ff00ff; }
inline int pinned(int x) { return x; }
inline int arrive(int *counter) { return (*counter)++; }
inline unsigned transpose(unsigned x) {
  auto &warp = emulator::warp();
  warp.words[emulator::lane()][0] = x;
  emulator::meet(warp, [&] {
    for (int l = 0; l < 32; ++l) {
      unsigned pair[2];
      for (int i = 0; i < 2; ++i) {
        const int row = l % 4 * 2 + i, column = l / 4;
        pair[i] =
            warp.words[row * 4 + column / 2][0] >> column % 2 * 16 & 0xffff;
      }
      warp.out[l] = pair[0] | pair[1] << 16;
    }
  });
  return warp.out[emulator::lane()];
}
} // namespace ptx

template <int kLanes>
void copy_async16_if(void *shared, const void *global, int lane) {
  if (lane < kLanes)
    tl::cp_async_gs<16>(shared, global);
}
inline float reciprocal(float x) { return 1 / x; }
inline void cluster_sync() {
  emulator::meet(emulator::block, [] {});
  const int round = emulator::cluster_round;
  emulator::self().waiting = true;
  while (round == emulator::cluster_round)
    emulator::yield();
}
inline float load_cluster(const void *shared, int rank) {
  const auto *at = static_cast<const unsigned *>(shared);
  float x;
  std::memcpy(&x,
              rank == blockIdx.y
                  ? at
                  : emulator::cluster[rank].memory.data() + (at - memory),
              4);
  return x;
}
inline int64_t load_pair(const float *from) {
  int64_t pair;
  std::memcpy(&pair, from, 8);
  return pair;
}
inline float half_low(unsigned x) { return emulator::half(x & 0xffff); }
inline float half_high(unsigned x) { return emulator::half(x >> 16); }
inline float bf16_low(unsigned x) { return emulator::bf16(x & 0xffff); }
inline float bf16_high(unsigned x) { return emulator::bf16(x >> 16); }
inline unsigned pack_bf16(float low, float high) {
  return emulator::to_bf16(low) | emulator::to_bf16(high) << 16;
}
inline unsigned multiply_half2(unsigned a, unsigned b) {
  return ptx::pack_half2(half_low(a) * half_low(b),
                         half_high(a) * half_high(b));
}
inline unsigned lost_half2(unsigned a, unsigned b, unsigned product) {
  const auto lost = [](float x, float y, float z) {
    return static_cast<float>(static_cast<double>(x) * y - z);
  };
  return ptx::pack_half2(lost(half_low(a), half_low(b), half_low(product)),
                         lost(half_high(a), half_high(b), half_high(product)));
}

} // namespace kvgen

// What `decode` would pack: the block's address, and the tokens of the
// residual before the call and with the new ones.
struct Flush {
  const unsigned *block;
  int old_residual, residual;
};
inline std::vector<Flush> flushes;

inline void flush_block(unsigned *, unsigned *, const unsigned *block, int64_t,
                        int64_t, int64_t, int64_t, int old_residual,
                        int residual, void *, int = 0) {
  if (threadIdx.x == 0)
    flushes.push_back({block, old_residual, residual});
}
