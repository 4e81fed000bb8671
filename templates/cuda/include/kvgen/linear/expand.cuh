// W = scale * (code - zero) in 16 bits, for products of more rows than a launch takes. A warp writes a run of a tile.
#pragma once
#include "kvgen/linear/reduce.cuh"

namespace kvgen::linear {

template <class Schedule>
struct Expand {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kRowRuns = Schedule::kK / 64;
  static constexpr int64_t kRuns = int64_t{Layout<Schedule>::kTiles} * kRowRuns, kBlocks = (kRuns + kWarps - 1) / kWarps;
  static constexpr int kPitch = 128 + 16;  // bytes of a row of a run: a warp's stores meet no bank twice
};

template <class Schedule>
__global__ void __launch_bounds__(Expand<Schedule>::kThreads) expand_kernel(const uint8_t* packed, uint8_t* out, int64_t out_stride) {
  using E = Expand<Schedule>;
  using Packed = Layout<Schedule>;
  using Element = typename Schedule::Element;
  using Codes = Decoder<Element, Schedule::kBits>;
  constexpr int kUnitRuns = Packed::kUnit / 64;
  __shared__ __align__(16) uint8_t memory[E::kWarps * 16 * E::kPitch];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const int64_t number = int64_t{blockIdx.x} * E::kWarps + warp;
  if (number >= E::kRuns) return;
  const int tile = static_cast<int>(number / E::kRowRuns), run = static_cast<int>(number % E::kRowRuns);
  const uint8_t* unit = packed + tile * Packed::kTileBytes + int64_t{run / kUnitRuns} * Packed::kUnitBytes;
  const auto scale_of = [&](int row) {
    const uint8_t* scales = Packed::kGrouped ? unit + Packed::kScales : packed + Packed::kRowScales + 32 * tile;
    return twice(reinterpret_cast<const uint16_t*>(scales)[row]);
  };
  const auto zero_of = [&](int row) -> uint32_t {
    if constexpr (!Schedule::kZeros) return 1 << (Schedule::kBits - 1);
    return (Packed::kGrouped ? unit + Packed::kZeros : packed + Packed::kRowZeros + 16 * tile)[row];
  };
  uint32_t words[4 * Codes::kWords];
#pragma unroll
  for (int i = 0; i < Codes::kWords; ++i) {
    const uint4 v = *reinterpret_cast<const uint4*>(unit + run % kUnitRuns * Packed::kRunBytes + i * 512 + lane * 16);
    words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
  }
  const Zeros zero = Codes::zeros(zero_of(g), zero_of(g + 8));
  const uint32_t scales[2] = {scale_of(g), scale_of(g + 8)};
  uint8_t* rows = memory + warp * 16 * E::kPitch;
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    uint32_t a[4];
    Codes::expand(&words[f * Codes::kWords], zero, a);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Rows g + 8 come as 16 times whole numbers, which halves hold exactly before and after.
      if (Codes::kFold == 16 && j % 2 == 1) a[j] = multiply<Element>(a[j], twice(0x2c00u));
      *reinterpret_cast<uint32_t*>(rows + (g + j % 2 * 8) * E::kPitch + 2 * (16 * f + j / 2 * 8 + lane % 4 * 2)) =
          multiply<Element>(a[j], scales[j % 2]);
    }
  }
  __syncwarp();
  const int first = Schedule::kEpilogue == Epilogue::silu_mul ? tile % 2 * (Schedule::kN / 2) + tile / 2 * 16 : 16 * tile;
#pragma unroll
  for (int row = lane / 8; row < 16; row += 4)
    *reinterpret_cast<uint4*>(out + (first + row) * out_stride + 128 * run + lane % 8 * 16) =
        *reinterpret_cast<const uint4*>(rows + row * E::kPitch + lane % 8 * 16);
}

}  // namespace kvgen::linear
