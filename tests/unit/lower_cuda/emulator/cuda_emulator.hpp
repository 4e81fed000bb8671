// Enough of CUDA to run kernels on a CPU: a fibre per thread, one CTA after the other, those of a cluster alternately, warp-wide operations
// as meeting points. A warp whose lanes part in front of such an operation waits for ever.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "checker.hpp"

#ifdef KVGEN_EMULATOR_CHECKS
#define __forceinline__ inline __attribute__((always_inline))  // so that a report names the line of the caller
#define KVGEN_VECTOR(n) alignas(n)
#else
#define __forceinline__ inline
#define KVGEN_VECTOR(n)  // g++ would make moves of it that fault where a kernel casts an array of its own, which is in registers on a GPU
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __builtin_assume(condition)
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct KVGEN_VECTOR(8) float2 { float x, y; };
struct KVGEN_VECTOR(16) float4 { float x, y, z, w; };
struct KVGEN_VECTOR(8) int2 { int x, y; };
struct KVGEN_VECTOR(16) int4 { int x, y, z, w; };
struct KVGEN_VECTOR(8) uint2 { unsigned x, y; };
struct KVGEN_VECTOR(16) uint4 { unsigned x, y, z, w; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) { return std::memset(to, byte, bytes), cudaSuccess; }

inline struct { int x, y, z; } threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int kStack = 1 << 17;

// Memory that prefetches may name.
struct Range {
  const unsigned char* begin;
  long size;
};
inline Range readable[3];
inline long prefetched;              // bytes
inline bool first_load_is_current;   // of a warp at an address, before griddepcontrol.wait; later ones give anything

struct Copy {
  void* to;
  int bytes;
  uint32_t time;  // the checker's
  unsigned char value[16];
};
struct BulkCopy {
  uint32_t to, barrier;
  std::vector<unsigned char> value;
};
struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done = false;
  bool waited = false;            // griddepcontrol.wait was called: the launches before have ended
  std::function<bool()> waiting;  // whether a wait for other CTAs goes on, if there is one
  int arrivals = 0;               // at the cluster's barrier
  std::vector<Copy> open;  // asynchronous copies, and groups of them: they land when they are waited for
  std::deque<std::vector<Copy>> groups;
  std::vector<std::function<void()>> products;  // of a warp group, and groups of them: they read and add when they are waited for
  std::deque<std::vector<std::function<void()>>> product_groups;
};
struct Meeting {
  int size = 0, arrived = 0, round = 0;
  std::set<const int*> loaded;  // by a warp, before griddepcontrol.wait
  std::vector<BulkCopy> bulk;   // to a CTA: they land when a thread waits for their barrier
  unsigned in[32], out[32];
  unsigned words[32][6];
  float sums[32][4];
};

inline std::vector<std::unique_ptr<Fibre>> fibres;
inline std::vector<Meeting> warps;
inline Meeting cta;
inline std::vector<Meeting> groups;  // of warps of the CTA, by the number of their barrier
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int current;
inline int rank;                   // in its cluster, of the CTA that runs
inline int cluster_threads;        // of the cluster that runs
inline std::vector<int> arrivals;  // of its threads at its barrier, by phase
alignas(1024) inline unsigned char shared[232448];  // dynamic shared memory

// Threads that wait for each other; the last one does the work for all. Those that have left the kernel are not waited for.
template <class Work>
void meet(Meeting& meeting, Work work) {
  const checker::Quiet quiet;
  if (++meeting.arrived == meeting.size) {
    work();
    meeting.arrived = 0, ++meeting.round;
    return;
  }
  for (const int round = meeting.round; round == meeting.round;) swapcontext(&fibres[current]->context, &scheduler);
}

// Every lane gives a word and takes that of `from(lane)`.
template <class From>
unsigned exchange(unsigned x, From from) {
  const checker::Quiet quiet;
  Meeting& warp = warps[current / 32];
  warp.in[current % 32] = x;
  meet(warp, [&] {
    for (int i = 0; i < 32; ++i) warp.out[i] = from(warp.in, i);
  });
  return warp.out[current % 32];
}

inline void enter() {
  checker::set_quiet(false);
  body();
  checker::set_quiet(true);
  fibres[current]->done = true;
  swapcontext(&fibres[current]->context, &scheduler);
}

inline void begin_cta(int threads) {
  std::memset(shared, 0xff, sizeof shared);  // NaN
  checker::begin_cta(rank, threads);
  fibres.clear(), warps.assign((threads + 31) / 32, {});
  for (Meeting& warp : warps) warp.size = 32;
  cta = {}, cta.size = threads, groups.assign(16, {});
  for (int i = 0; i < threads; ++i) {
    fibres.push_back(std::make_unique<Fibre>());
    Fibre& fibre = *fibres.back();
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data(), fibre.context.uc_stack.ss_size = kStack, fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
  }
}

// Whether a thread's wait for other CTAs goes on.
inline bool waits(Fibre& fibre) {
  if (fibre.waiting && !fibre.waiting()) fibre.waiting = nullptr;
  return fibre.waiting != nullptr;
}

// Until all threads are done or wait for their cluster; whether all are done.
inline bool run_cta() {
  for (bool busy = true; busy;) {
    busy = false;
    for (current = 0; current < static_cast<int>(fibres.size()); ++current) {
      if (fibres[current]->done || waits(*fibres[current])) continue;
      busy = true, threadIdx.x = current;
      checker::resume(rank, current, fibres[current]->stack.data(), kStack);
      swapcontext(&scheduler, &fibres[current]->context);
    }
  }
  return std::all_of(fibres.begin(), fibres.end(), [](const auto& fibre) { return fibre->done; });
}

// A CTA whose memory is given away before all copies to it have landed is wrong.
inline void end_cta() {
  if (!cta.bulk.empty()) std::fprintf(stderr, "a CTA ends before a copy to it\n"), std::abort();
}

// A CTA of the cluster while others run.
struct Cta {
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Meeting> warps;
  Meeting cta;
  std::vector<Meeting> groups;
  std::vector<unsigned char> shared = std::vector<unsigned char>(sizeof emulator::shared);

  void swap() {
    std::swap(fibres, emulator::fibres), std::swap(warps, emulator::warps), std::swap(cta, emulator::cta), std::swap(groups, emulator::groups);
    std::swap_ranges(shared.begin(), shared.end(), emulator::shared);
  }
};
inline std::vector<Cta> cluster;

// Its CTAs run alternately, each as far as it can.
inline void run_cluster(int ctas, int threads) {
  cluster.clear(), arrivals.clear(), cluster_threads = ctas * threads;
  for (rank = 0; rank < ctas; ++rank) cluster.emplace_back(), begin_cta(threads), cluster.back().swap();
  const int first = blockIdx.x;
  for (bool done = false; !done;) {
    done = true;
    for (rank = 0; rank < ctas; ++rank) {
      cluster[rank].swap();
      blockIdx.x = first + rank;
      if (run_cta())
        end_cta(), std::memset(shared, 0xff, sizeof shared);  // no other CTA may read it any more
      else
        done = false;
      cluster[rank].swap();
    }
  }
  cluster.clear(), rank = 0;
}
inline void arrive_cluster(bool releases = false) {
  const checker::Quiet quiet;
  const size_t phase = fibres[current]->arrivals++;
  checker::arrive_cluster(reinterpret_cast<const void*>(phase), releases);
  if (arrivals.size() <= phase) arrivals.resize(phase + 1);
  ++arrivals[phase];
}
inline void wait_while(std::function<bool()> goes_on) {
  const checker::Quiet quiet;
  Fibre& fibre = *fibres[current];
  for (fibre.waiting = std::move(goes_on); waits(fibre);) swapcontext(&fibre.context, &scheduler);
}
inline void wait_cluster() {
  const checker::Quiet quiet;
  const size_t phase = fibres[current]->arrivals - 1;
  wait_while([phase] { return arrivals[phase] < cluster_threads; });
  checker::wait_cluster(reinterpret_cast<const void*>(phase));
}

// CTAs in the order of their numbers, or against it.
inline bool backwards = false;

template <class Kernel>
void launch(dim3 grid, int threads, const Kernel& kernel, int cluster_size = 1, bool overlaps = false) {
  body = std::ref(kernel), blockDim.x = threads;
  checker::begin_launch(overlaps);
  gridDim = {static_cast<int>(grid.x), static_cast<int>(grid.y), static_cast<int>(grid.z)};
  const unsigned clusters = grid.x * grid.y * grid.z / cluster_size;
  for (unsigned i = 0; i < clusters; ++i) {
    const unsigned at = (backwards ? clusters - 1 - i : i) * cluster_size;
    blockIdx = {static_cast<int>(at % grid.x), static_cast<int>(at / grid.x % grid.y), static_cast<int>(at / grid.x / grid.y)};
    if (cluster_size > 1)
      run_cluster(cluster_size, threads);
    else
      begin_cta(threads), run_cta(), end_cta();
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

inline void __syncthreads() {
  emulator::meet(emulator::cta, [] { checker::synchronize(0, static_cast<int>(emulator::fibres.size())); });
}
inline void __syncwarp() {
  const int warp = emulator::current / 32;
  emulator::meet(emulator::warps[warp], [warp] { checker::synchronize(warp * 32, 32); });
}
template <class T, class From>
T exchange_lanes(T x, From from) {
  if constexpr (sizeof(T) == 8) {
    uint2 words = emulator::bits<uint2>(x);
    words.x = exchange_lanes(words.x, from), words.y = exchange_lanes(words.y, from);
    return emulator::bits<T>(words);
  } else {
    return emulator::bits<T>(emulator::exchange(emulator::bits<unsigned>(x), [=](const unsigned* in, int lane) { return in[from(lane)]; }));
  }
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return exchange_lanes(x, [=](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  return exchange_lanes(x, [=](int lane) { return lane + by < 32 ? lane + by : lane; });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
  return exchange_lanes(x, [=](int lane) { return lane >= by ? lane - by : lane; });
}
template <class T>
T __shfl_sync(unsigned, T x, int from) {  // lanes may ask for different ones
  const checker::Quiet quiet;
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  std::memcpy(warp.words[emulator::current % 32], &x, sizeof x);
  emulator::meet(warp, [] {});
  std::memcpy(&x, warp.words[from], sizeof x);
  emulator::meet(warp, [] {});
  return x;
}
inline unsigned __ballot_sync(unsigned, int x) {
  return emulator::exchange(x != 0, [](const unsigned* in, int) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= in[i] << i;
    return all;
  });
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
template <class Join>
int reduce_lanes(int x, Join join) {
  return static_cast<int>(emulator::exchange(static_cast<unsigned>(x), [=](const unsigned* in, int) {
    int all = static_cast<int>(in[0]);
    for (int i = 1; i < 32; ++i) all = join(all, static_cast<int>(in[i]));
    return static_cast<unsigned>(all);
  }));
}
inline int __reduce_add_sync(unsigned, int x) { return reduce_lanes(x, [](int a, int b) { return a + b; }); }
inline int __reduce_min_sync(unsigned, int x) { return reduce_lanes(x, [](int a, int b) { return std::min(a, b); }); }
inline int __reduce_max_sync(unsigned, int x) { return reduce_lanes(x, [](int a, int b) { return std::max(a, b); }); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class Update>
__forceinline__ int update(int* x, Update made) {
  checker::access(x, sizeof *x, checker::kAtomicUpdate);
  const checker::Quiet quiet;
  const int before = *x;
  return *x = made(before), before;
}
__forceinline__ int atomicAdd(int* x, int by) { return update(x, [=](int before) { return before + by; }); }
__forceinline__ unsigned atomicAnd(unsigned* x, unsigned y) {
  return update(reinterpret_cast<int*>(x), [=](int before) { return static_cast<int>(before & y); });
}
__forceinline__ unsigned atomicOr(unsigned* x, unsigned y) {
  return update(reinterpret_cast<int*>(x), [=](int before) { return static_cast<int>(before | y); });
}
__forceinline__ int atomicMin(int* x, int y) { return update(x, [=](int before) { return std::min(before, y); }); }
__forceinline__ int atomicMax(int* x, int y) { return update(x, [=](int before) { return std::max(before, y); }); }
template <class T>
__forceinline__ T* aligned(T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) std::fprintf(stderr, "misaligned access of %zu bytes\n", sizeof(T)), std::abort();
  return at;
}
template <class T>
__forceinline__ T __ldcg(const T* from) { return *aligned(from); }
template <class T>
__forceinline__ void __stcg(T* to, T x) { *aligned(to) = x; }
template <class T>
__forceinline__ T __ldcs(const T* from) { return *aligned(from); }
template <class T>
__forceinline__ void __stcs(T* to, T x) { *aligned(to) = x; }
inline float __log2f(float x) { return std::log2(x); }
inline float __expf(float x) { return std::exp(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline int __float2int_rn(float x) {  // saturates, and NaN is 0
  const double whole = std::nearbyint(static_cast<double>(x));
  return std::isnan(x) ? 0 : whole >= 2147483647.0 ? 2147483647 : whole <= -2147483648.0 ? -2147483647 - 1 : static_cast<int>(whole);
}
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }

// --- runtime functions that a launch calls -----------------------------------------------------------------------------

struct cudaLaunchAttribute {
  int id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 1, cudaLaunchAttributeClusterDimension = 2,
               cudaFuncAttributeMaxDynamicSharedMemorySize = 0, cudaDevAttrMultiProcessorCount = 0,
               cudaDevAttrMaxSharedMemoryPerMultiprocessor = 1, cudaDevAttrReservedSharedMemoryPerBlock = 2;
namespace emulator {
inline int processors = 4, shared_per_sm = 0;  // with 0, a CTA gets the shared memory that it needs
inline size_t dynamic_bytes = 0;               // of shared memory that the last launch asked for
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  const int values[] = {emulator::processors, emulator::shared_per_sm, 0};
  return *value = values[attribute], cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int bytes) { return bytes <= static_cast<int>(sizeof emulator::shared) ? cudaSuccess : static_cast<cudaError_t>(1); }
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t*) { return *clusters = emulator::processors / 2, cudaSuccess; }
template <class Kernel, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Arguments&... arguments) {
  emulator::dynamic_bytes = config->dynamicSmemBytes;
  unsigned cluster = 1;
  bool overlaps = false;  // whether launches may; here one ends before the next
  for (int i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
    else
      overlaps = config->attrs[i].val.programmaticStreamSerializationAllowed;
  emulator::launch(config->gridDim, config->blockDim.x, [&] { kernel(arguments...); }, cluster, overlaps);
  return cudaSuccess;
}
