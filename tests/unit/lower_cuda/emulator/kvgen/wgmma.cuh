// Stands for the header of the same name. A warp's part of a wgmma is an mma of its rows for every tile of columns.
#pragma once
#include "kvgen/ptx.cuh"

namespace kvgen::ptx {

inline uint32_t matrix_descriptor(uint32_t address) {
  if (address % 16) std::abort();
  return address;
}
constexpr uint32_t matrix_distance(int bytes) { return bytes; }
template <bool kAdd, class... Tiles>
void wgmma(const uint32_t (&a)[4], uint32_t b, Tiles&... tiles) {
  uint32_t at = b + emulator::current % 32 * 4;
  const auto one = [&](float (&d)[4]) {
    if (!kAdd) std::fill(d, d + 4, 0.f);
    mma(d, a[0], a[1], a[2], a[3], load_shared4(at), load_shared4(at + 128));
    at += 256;
  };
  (one(tiles), ...);
}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
inline void wgmma_wait() {}
inline void wgmma_store_fence() {}

inline void store_transposed(uint32_t address, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  emulator::Meeting& warp = emulator::warps[emulator::current / 32];
  const int lane = emulator::current % 32, matrix = lane / 8, row = lane % 8;
  const uint32_t words[4] = {x0, x1, x2, x3};
  std::memcpy(warp.words[lane], words, sizeof words);
  emulator::meet(warp, [] {});
  uint32_t stored[4];
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int column) { return warp.words[column * 4 + row / 2][matrix] >> row % 2 * 16 & 0xffff; };
    stored[i] = element(2 * i) | element(2 * i + 1) << 16;
  }
  emulator::meet(warp, [] {});
  store_shared16(address, reinterpret_cast<const int(&)[4]>(stored));
}

}  // namespace kvgen::ptx
