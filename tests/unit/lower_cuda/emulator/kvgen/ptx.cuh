// Stands for the header of the same name.
#pragma once
#include <cuda_fp16.h>

namespace kvgen::ptx {

inline uint32_t as_u32(__half2 x) { return emulator::bits<uint32_t>(x); }
inline __half2 as_half2(uint32_t x) { return emulator::bits<__half2>(x); }

inline void prefetch_l2(const void*) {}

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

}  // namespace kvgen::ptx
