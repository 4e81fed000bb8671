// Stands for the header of the same name. Addresses of shared memory count from its start.
#pragma once
#include <cuda_fp16.h>

#define KVGEN_SM90 1

namespace kvgen::ptx {

inline uint32_t as_u32(__half2 x) { return emulator::bits<uint32_t>(x); }
inline __half2 as_half2(uint32_t x) { return emulator::bits<__half2>(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline uint32_t pack_half2(float low, float high) { return as_u32({__half(low), __half(high)}); }
inline uint32_t not_and_or(uint32_t x, uint32_t mask, uint32_t set) { return (~x & mask) | set; }
inline uint32_t select(uint32_t mask, uint32_t x, uint32_t y) { return (x & mask) | (y & ~mask); }
inline uint32_t odd_bytes(uint32_t x) { return x >> 8 & 0x00ff00ffu; }
template <class T>
T pinned(T x) {
  return x;
}

inline uint32_t transpose(uint32_t x) {
  return emulator::exchange(x, [](const unsigned* in, int lane) {
    unsigned pair = 0;
    for (int i = 0; i < 2; ++i) {
      const int row = lane % 4 * 2 + i, column = lane / 4;
      pair |= (in[row * 4 + column / 2] >> column % 2 * 16 & 0xffff) << 16 * i;
    }
    return pair;
  });
}

inline float half_of(unsigned word, int which) {
  return static_cast<float>(emulator::bits<_Float16>(static_cast<uint16_t>(word >> 16 * which)));
}

// All lanes' operands to sums of products, in fp64. `kOf` gives an element of a word.
template <float (*kOf)(unsigned, int) = half_of>
void multiply(emulator::Meeting& warp) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 2; ++i)
      for (int high = 0; high < 2; ++high) {
        const int k = lane % 4 * 2 + i + 8 * high;
        for (int half = 0; half < 2; ++half) a[lane / 4 + 8 * half][k] = kOf(warp.words[lane][2 * high + half], i);
        b[k][lane / 4] = kOf(warp.words[lane][4 + high], i);
      }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[lane / 4 + i / 2 * 8][k]) * b[k][lane % 4 * 2 + i % 2];
      warp.sums[lane][i] = static_cast<float>(sum);
    }
}
template <float (*kOf)(unsigned, int) = half_of>
void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const checker::Quiet quiet;
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  const int lane = emulator::current % 32;
  const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(warp.words[lane], words, sizeof words);
  emulator::meet(warp, [&] { multiply<kOf>(warp); });
  for (int i = 0; i < 4; ++i) d[i] += warp.sums[lane][i];
  emulator::meet(warp, [] {});  // the next operands come after all lanes have taken their sums
}
inline float bfloat_of(unsigned word, int which) { return emulator::bits<float>((word >> 16 * which & 0xffff) << 16); }
inline void mma_bfloat(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  mma<bfloat_of>(d, a0, a1, a2, a3, b0, b1);
}

// The same of unsigned and signed bytes, in integers, over 32 columns of A or 16.
template <size_t kRegisters>
void multiply_bytes(int (&d)[4], const uint32_t (&mine)[kRegisters]) {
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  const int lane = emulator::current % 32, halves = kRegisters / 3;
  std::memcpy(warp.words[lane], mine, sizeof mine);
  emulator::meet(warp, [&] {
    for (int to = 0; to < 32; ++to)
      for (int i = 0; i < 4; ++i) {
        int sum = 0;
        for (int k = 0; k < 16 * halves; ++k) {
          const int shift = k % 4 * 8, quad = k % 16 / 4, half = k / 16;
          const uint32_t a = warp.words[to / 4 * 4 + quad][2 * half + i / 2],
                         b = warp.words[(to % 4 * 2 + i % 2) * 4 + quad][2 * halves + half];
          sum += static_cast<int>(a >> shift & 0xff) * static_cast<int8_t>(b >> shift & 0xff);
        }
        std::memcpy(&warp.sums[to][i], &sum, 4);
      }
  });
  for (int i = 0; i < 4; ++i) {
    int sum;
    std::memcpy(&sum, &warp.sums[lane][i], 4);
    d[i] += sum;
  }
  emulator::meet(warp, [] {});
}
inline void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_bytes<6>(d, {a0, a1, a2, a3, b0, b1});
}
inline void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) { multiply_bytes<3>(d, {a0, a1, b0}); }

// --- shared memory, and copies to it ------------------------------------------------------------------------------------

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulator::shared);
}
template <class T>
__forceinline__ T load_shared(uint32_t address) {
  checker::access(emulator::shared + address, sizeof(T), checker::kRead);
  const checker::Quiet quiet;
  T value;
  std::memcpy(&value, emulator::shared + address, sizeof value);
  return value;
}
__forceinline__ uint4 load_shared16(uint32_t address) { return load_shared<uint4>(address); }
__forceinline__ uint2 load_shared8(uint32_t address) { return load_shared<uint2>(address); }
__forceinline__ uint32_t load_shared4(uint32_t address) { return load_shared<uint32_t>(address); }
__forceinline__ uint32_t load_shared2(uint32_t address) { return load_shared<uint16_t>(address); }
__forceinline__ uint32_t load_shared1(uint32_t address) { return load_shared<uint8_t>(address); }
template <class T>
__forceinline__ void store_shared16(uint32_t address, const T (&v)[4]) {
  checker::access(emulator::shared + address, 16, checker::kWrite);
  const checker::Quiet quiet;
  std::memcpy(emulator::shared + address, v, 16);
}

template <int kBytes>
__forceinline__ void copy_async(uint32_t shared, const void* global) {
  const uint32_t time = checker::copy(emulator::shared + shared, global, kBytes);
  const checker::Quiet quiet;
  emulator::Copy copy{emulator::shared + shared, kBytes, time, {}};
  std::memcpy(copy.value, global, kBytes);
  emulator::fibres[emulator::current]->open.push_back(copy);
}
__forceinline__ void copy_async16(uint32_t shared, const void* global) { copy_async<16>(shared, global); }
template <int kLanes>
__forceinline__ void copy_async16_if(uint32_t shared, const void* global, int lane) {
  if (lane < kLanes) copy_async16(shared, global);
}
inline void copy_commit() {
  const checker::Quiet quiet;
  auto& fibre = *emulator::fibres[emulator::current];
  fibre.groups.push_back(std::move(fibre.open)), fibre.open.clear();
}
template <int kPending>
void copy_wait() {
  const checker::Quiet quiet;
  auto& groups = emulator::fibres[emulator::current]->groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const emulator::Copy& copy : groups.front()) std::memcpy(copy.to, copy.value, copy.bytes), checker::arrived(copy.time);
}
inline void copy_wait_all() {
  copy_commit();
  copy_wait<0>();
}
inline void prefetch_l2(const void*) {}
// Nothing is copied, but prefetched bytes must lie in memory that the launch may read.
inline void prefetch_bulk(const void* global, int bytes) {
  const checker::Quiet quiet;
  const auto* from = static_cast<const unsigned char*>(global);
  const bool there = std::any_of(std::begin(emulator::readable), std::end(emulator::readable), [&](const emulator::Range& r) {
    return from >= r.begin && from + bytes <= r.begin + r.size && (from - r.begin) % 16 == 0;
  });
  if (!there || bytes <= 0 || bytes % 16) std::abort();
  emulator::prefetched += bytes;
}

// --- clusters -----------------------------------------------------------------------------------------------------------

inline void cluster_arrive() { emulator::arrive_cluster(true); }
inline void cluster_arrive_relaxed() { emulator::arrive_cluster(); }
inline void cluster_wait() { emulator::wait_cluster(); }
inline uint32_t cluster_address(uint32_t shared, int rank) { return shared | static_cast<uint32_t>(rank) << 24; }
inline unsigned char* cluster_memory(uint32_t address) {
  const int rank = static_cast<int>(address >> 24);
  return (rank == emulator::rank ? emulator::shared : emulator::cluster[rank].shared.data()) + (address & 0xffffff);
}

// Arrivals and stored bytes that the barrier's phase still waits for.
struct Barrier {
  uint8_t arrivals, of;
  uint16_t phase;
  int bytes;

  void store(int count) {
    bytes -= count;
    if (arrivals == 0 && bytes == 0) phase ^= 1, arrivals = of;
  }
};
__forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  checker::access(emulator::shared + barrier, sizeof(Barrier), checker::kWrite);
  const checker::Quiet quiet;
  reinterpret_cast<Barrier&>(emulator::shared[barrier]) = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
inline void barrier_init_fence() {
  const checker::Quiet quiet;
  checker::fence_barrier_init();
}
__forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  checker::access(emulator::shared + barrier, sizeof(Barrier), checker::kAtomicUpdate);
  const checker::Quiet quiet;
  checker::arrive_barrier(emulator::shared + barrier);
  Barrier& mine = reinterpret_cast<Barrier&>(emulator::shared[barrier]);
  --mine.arrivals, mine.store(-bytes);
}
// Bulk copies to the CTA land, as late as a wait for their barrier allows.
inline void land(uint32_t barrier) {
  std::erase_if(emulator::cta.bulk, [barrier](const emulator::BulkCopy& copy) {
    if (copy.barrier != barrier) return false;
    std::memcpy(emulator::shared + copy.to, copy.value.data(), copy.value.size());
    reinterpret_cast<Barrier&>(emulator::shared[barrier]).store(copy.value.size());
    return true;
  });
}
__forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  checker::access(emulator::shared + barrier, sizeof(Barrier), checker::kAtomicRead);
  const checker::Quiet quiet;
  emulator::wait_while([barrier, parity] {
    const Barrier& mine = reinterpret_cast<const Barrier&>(emulator::shared[barrier]);
    if (mine.phase == parity) land(barrier);
    return mine.phase == parity;
  });
  checker::wait_barrier(emulator::shared + barrier);
}
template <class Value>
__forceinline__ void send_cluster(uint32_t address, Value value, uint32_t barrier) {
  const checker::Quiet quiet;
  checker::send(static_cast<int>(address >> 24), emulator::shared + (address & 0xffffff), sizeof value,
                emulator::shared + (barrier & 0xffffff));
  std::memcpy(cluster_memory(address), &value, sizeof value);
  reinterpret_cast<Barrier*>(cluster_memory(barrier))->store(sizeof value);
}

inline void copy_bulk_fence() {}
// To a CTA of the cluster.
__forceinline__ void copy_bulk_to_rank(int rank, uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  checker::copy_bulk(rank, emulator::shared + shared, global, bytes, emulator::shared + barrier);
  const checker::Quiet quiet;
  const auto* from = static_cast<const unsigned char*>(global);
  if (bytes <= 0 || bytes % 16 || shared % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
  if (reinterpret_cast<const Barrier*>(cluster_memory(cluster_address(barrier, rank)))->of == 0xff) std::abort();  // no mbarrier yet
  (rank == emulator::rank ? emulator::cta : emulator::cluster.at(rank).cta).bulk.push_back({shared, barrier, {from, from + bytes}});
}
__forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  copy_bulk_to_rank(emulator::rank, shared, global, bytes, barrier);
}

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {
  const checker::Quiet quiet;
  emulator::fibres[emulator::current]->waited = true, checker::end_grid_wait();
}
// Before griddepcontrol.wait memory may hold anything, and two loads of a warp may differ. A value that is no count of anything is far from
// all memory, so that an address made from it ends the process.
constexpr int kNoNumber = -1'000'000'007;
__forceinline__ int load_relaxed(const int* from) {
  checker::access(from, sizeof *from, checker::kAtomicRead);
  const checker::Quiet quiet;
  const bool first = emulator::warps[emulator::current / 32].loaded.insert(from).second;
  if (emulator::fibres[emulator::current]->waited || (emulator::first_load_is_current && first)) return *from;
  const int values[] = {*from, INT32_MAX, kNoNumber};
  return values[(reinterpret_cast<uintptr_t>(from) / 4 + !first) % 3];
}
__forceinline__ int arrive(int* counter) {
  checker::access(counter, sizeof *counter, checker::kAtomicUpdate);
  const checker::Quiet quiet;
  checker::exchange(counter);
  return (*counter)++;
}

}  // namespace kvgen::ptx
