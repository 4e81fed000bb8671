// Stands for the header of the same name.
#pragma once
#include <cuda_bf16.h>

#include "kvgen/format/elements.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen::linear {

template <class Element>
constexpr float (*kOf)(unsigned, int) = std::is_same_v<Element, Half> ? ptx::half_of : ptx::bfloat_of;

template <class Element>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ptx::mma<kOf<Element>>(d, a[0], a[1], a[2], a[3], b0, b1);
}

__forceinline__ void load_matrices(uint32_t* to, uint32_t address) {
  const uint4 row = ptx::load_shared16(address);
  const checker::Quiet quiet;
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  const int lane = emulator::current % 32;
  std::memcpy(warp.words[lane], &row, sizeof row);
  emulator::meet(warp, [] {});
  for (int i = 0; i < 4; ++i) to[i] = warp.words[8 * i + lane / 4][lane % 4];
  emulator::meet(warp, [] {});
}

inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t set) { return (x & mask) | set; }
template <class Element>
uint32_t as_word(Pair<Element> x) {
  return emulator::bits<uint32_t>(x);
}
template <class Element>
uint32_t subtract(uint32_t x, uint32_t y) {
  return as_word<Element>(__hsub2(as_pair<Element>(x), as_pair<Element>(y)));
}
template <class Element>
uint32_t multiply(uint32_t x, uint32_t y) {
  return as_word<Element>(__hmul2(as_pair<Element>(x), as_pair<Element>(y)));
}

inline void group_sync(int group, int threads) {
  const checker::Quiet quiet;
  emulator::Meeting& meeting = emulator::groups.at(group + 1);
  meeting.size = threads;
  emulator::meet(meeting, [=] { checker::synchronize(emulator::current / threads * threads, threads); });
}

__forceinline__ float4 load_shared_floats(uint32_t address) { return ptx::load_shared<float4>(address); }
__forceinline__ void store_shared_float(uint32_t address, float v) {
  checker::access(emulator::shared + address, sizeof v, checker::kWrite);
  const checker::Quiet quiet;
  std::memcpy(emulator::shared + address, &v, sizeof v);
}
__forceinline__ float4 load_cluster_floats(uint32_t address) {
  const int rank = static_cast<int>(address >> 24);
  if (rank == emulator::rank) return load_shared_floats(address & 0xffffff);
  const checker::Quiet quiet;
  checker::read_far(rank, emulator::shared + (address & 0xffffff), sizeof(float4));
  float4 v;
  std::memcpy(&v, ptx::cluster_memory(address), sizeof v);
  return v;
}
__forceinline__ void copy_bulk_to(uint16_t ctas, uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  for (int rank = 0; ctas >> rank; ++rank)
    if (ctas >> rank & 1) ptx::copy_bulk_to_rank(rank, shared, global, bytes, barrier);
}

// --- products of a warp group: they read shared memory, and add to the sums, as late as the waits allow ---------------------------

inline void wgmma_fence() {}
inline void wgmma_commit() {
  const checker::Quiet quiet;
  auto& fibre = *emulator::fibres[emulator::current];
  fibre.product_groups.push_back(std::move(fibre.products)), fibre.products.clear();
}
template <int kPending>
void wgmma_wait() {
  const checker::Quiet quiet;
  auto& groups = emulator::fibres[emulator::current]->product_groups;
  for (; groups.size() > kPending; groups.pop_front())
    for (const auto& product : groups.front()) product();
}
inline uint64_t wgmma_matrix(uint32_t address) { return address; }

// Rows of B are 128 bytes; bits 4 to 6 of an address are exchanged by bits 7 to 9.
inline const unsigned char* swizzled(uint32_t address) { return emulator::shared + (address ^ (address >> 7 & 7) << 4); }

template <class Element, int kColumns>
__forceinline__ void wgmma(float (&d)[kColumns][4], const uint32_t (&a)[4], uint64_t matrix) {
  const checker::Quiet quiet;
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  const int lane = emulator::current % 32, thread = emulator::current % 128;
  const uint32_t b = static_cast<uint32_t>(matrix);
  std::memcpy(warp.words[lane], a, sizeof a);
  emulator::meet(warp, [] {});
  struct {
    float of[2][16];
  } rows;  // of A, that this lane's sums are over
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 16; ++k) rows.of[half][k] = kOf<Element>(warp.words[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + half], k % 2);
  emulator::meet(warp, [] {});
  // Of B, each thread of the group reads a row.
  uint32_t time = 0;
  if (thread < 8 * kColumns)
    for (int i = 0; i < 2; ++i) time = checker::read_later(swizzled(b + thread * 128 + i * 16), 16);
  emulator::fibres[emulator::current]->products.push_back([&d, rows, b, lane, time] {
    for (int c = 0; c < kColumns; ++c)
      for (int i = 0; i < 2; ++i) {
        const uint32_t column = b + (8 * c + lane % 4 * 2 + i) * 128;
        double sums[2] = {};
        for (int k = 0; k < 16; ++k) {
          uint16_t bits;
          std::memcpy(&bits, swizzled(column + 2 * k), 2);
          const float x = kOf<Element>(bits, 0);
          for (int half = 0; half < 2; ++half) sums[half] += static_cast<double>(rows.of[half][k]) * x;
        }
        for (int half = 0; half < 2; ++half) d[c][2 * half + i] += static_cast<float>(sums[half]);
      }
    if (time > 0) checker::arrived(time);
  });
}

}  // namespace kvgen::linear
