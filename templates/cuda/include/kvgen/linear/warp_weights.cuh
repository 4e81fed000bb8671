// The weights of a warp: kTiles neighbouring tiles, their way to shared memory, and their fragments.
#pragma once
#include "kvgen/linear/reduce.cuh"

namespace kvgen::linear {

template <class Schedule>
struct Traits : Schedule {
  using Packed = Layout<Schedule>;
  static constexpr int kColumns = Schedule::kRows / 8;  // of the MMA, by eights
  static constexpr int kThreads = Schedule::kWarpsN * Schedule::kWarpsK * 32;
  // Channels of a stage: whole units.
  static constexpr int kStage = Schedule::kK % 128 == 0 ? 128 : 64, kUnits = kStage / Packed::kUnit;
  static constexpr int kAllStages = Schedule::kK / kStage;
  static constexpr int kTileStage = kUnits * Packed::kUnitBytes, kWarpStage = Schedule::kTiles * kTileStage;
  static constexpr int kClusterTiles = Schedule::kTiles * Schedule::kWarpsN * Schedule::kShare;
  static constexpr int kBlocks = ceil_div(Packed::kTiles, kClusterTiles) * Schedule::kShare;  // CTAs over n
  static constexpr bool kEarly = Schedule::kRows <= 16;  // the next launch begins with this one, not after its products
  static_assert(kStage % Packed::kUnit == 0 && kTileStage % 16 == 0 && Schedule::kRows % 8 == 0);
};

// A thread's place in its CTA, the rank-th of those that share the channels; the CTA's stages, and those of its k group: `stages`, every
// kWarpsK-th from `first` on.
template <class Schedule>
struct Place {
  using T = Traits<Schedule>;
  int rank, lane, group, member, begin, end, first, stages;

  __device__ __forceinline__ explicit Place(int rank_) : rank(rank_), lane(threadIdx.x % 32) {
    const int warp = threadIdx.x / 32;
    group = warp / T::kWarpsN, member = warp % T::kWarpsN;
    begin = T::kAllStages * rank / T::kSplit, end = T::kAllStages * (rank + 1) / T::kSplit;
    first = begin + group, stages = std::max(0, (end - first + T::kWarpsK - 1) / T::kWarpsK);
  }
};

// Scales of rows g and g + 8 of a tile, each twice in a word.
struct Scales {
  uint32_t low, high;
  bool given;

  template <class Element>
  __device__ __forceinline__ void apply(const uint32_t (&from)[4], uint32_t (&to)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = given ? multiply<Element>(from[j], j % 2 == 0 ? low : high) : from[j];
  }
};

template <class Schedule>
class WarpWeights {
  using T = Traits<Schedule>;
  using Packed = typename T::Packed;
  using Codes = Decoder<typename T::Element, Schedule::kBits>;
  static constexpr bool kWhole = Packed::kTiles % T::kClusterTiles == 0;

  int lane_, tile_;
  const uint8_t* from_;
  uint32_t row_zeros_[T::kTiles];  // of rows g and g + 8, where a row has one zero

 public:
  // Tiles from `tile` on, stages from `stage` on.
  __device__ __forceinline__ void begin(const Arguments& a, int tile, int stage, int lane) {
    lane_ = lane, tile_ = tile;
    from_ = a.packed + tile * Packed::kTileBytes + int64_t{stage} * T::kTileStage + lane * 16;
    if constexpr (!Packed::kGrouped && T::kZeros)
#pragma unroll
      for (int t = 0; t < T::kTiles; ++t) {
        const uint8_t* zeros = a.packed + Packed::kRowZeros + 16 * (tile_ + offset(t)) + lane_ / 4;
        row_zeros_[t] = zeros[0] | zeros[8] << 8;
      }
  }

  // Copies the stage-th stage to shared memory.
  __device__ __forceinline__ void copy(uint32_t shared, int stage) const {
    constexpr int kRows = T::kTileStage / 512 * 512, kRest = (T::kTileStage - kRows) / 16;
    const uint32_t to = shared + lane_ * 16;
#pragma unroll
    for (int t = 0; t < T::kTiles; ++t) {
      const uint8_t* from = from_ + offset(t) * Packed::kTileBytes + int64_t{stage} * T::kTileStage;
#pragma unroll
      for (int at = 0; at < kRows; at += 512) ptx::copy_async16(to + t * T::kTileStage + at, from + at);
      if constexpr (kRest > 0) ptx::copy_async16_if<kRest>(to + t * T::kTileStage + kRows, from + kRows, lane_);
    }
  }

  // The four A fragments of a run of a tile in shared memory, each for 16 channels.
  template <class Use>
  __device__ __forceinline__ void each_fragment(uint32_t run, const Zeros& zero, Use&& use) const {
    uint32_t words[4 * Codes::kWords];
    load_codes(run, words);
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      uint32_t a[4];
      Codes::expand(&words[f * Codes::kWords], zero, a);
      use(f, a);
    }
  }
  __device__ __forceinline__ Zeros zeros(uint32_t tile, int t) const {
    constexpr uint32_t kMiddle = 1 << (T::kBits - 1);
    if constexpr (!T::kZeros)
      return Codes::zeros(kMiddle, kMiddle);
    else if constexpr (!Packed::kGrouped)
      return Codes::zeros(row_zeros_[t] & 0xff, row_zeros_[t] >> 8);
    else
      return Codes::zeros(ptx::load_shared1(tile + Packed::kZeros + lane_ / 4), ptx::load_shared1(tile + Packed::kZeros + lane_ / 4 + 8));
  }
  // The bits of the scale of row g + `row` of a tile.
  __device__ __forceinline__ uint32_t scale(uint32_t tile, int row) const {
    return ptx::load_shared2(tile + Packed::kScales + 2 * (lane_ / 4 + row));
  }
  __device__ __forceinline__ Scales scales(uint32_t tile) const {
    if constexpr (Packed::kGrouped)
      return {twice(scale(tile, 0)), twice(scale(tile, 8)), true};
    else
      return {0, 0, false};
  }

  // The words of a lane of a run.
  __device__ __forceinline__ void load_codes(uint32_t run, uint32_t (&words)[4 * Codes::kWords]) const {
#pragma unroll
    for (int i = 0; i < Codes::kWords; ++i) {
      const uint4 v = ptx::load_shared16(run + i * 512 + lane_ * 16);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }

 private:
  // Tiles beyond the last one are the last one; their products are not stored.
  __device__ __forceinline__ int64_t offset(int t) const { return kWhole ? t : std::min(t, Packed::kTiles - 1 - tile_); }
};

}  // namespace kvgen::linear
