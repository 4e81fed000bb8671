// A lane's rows of a tile, and their scalers where scales are per token.
#pragma once
#include "kvgen/pack/assemble.cuh"
#include "kvgen/pack/extremes.cuh"
#include "kvgen/pack/thresholds.cuh"

namespace kvgen::packing {

// Vectors of eight channels that a lane keeps in registers at once.
constexpr int kMaxHeldVectors = 8;

template <class Places, class Element, class Row>
__device__ __forceinline__ void lane_rows(Row&& row, int token, const Element* (&rows)[Places::kLaneRows]) {
#pragma unroll
  for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) rows[lane_row] = row(token + lane_row * 8 + threadIdx.x % 32 / 4);
}

// A lane's vectors of kCount runs of channels of its rows, from run x on. If they fit, they are loaded together and stay in registers;
// otherwise each is loaded where it is used.
template <class Places, class Element, int kCount>
struct LaneVectors {
  using Runs = typename Places::Runs;
  static constexpr bool kInRegisters = Places::kLaneRows * kCount <= kMaxHeldVectors;
  int first;  // run
  const Element* rows[Places::kLaneRows];
  uint4 registers[kInRegisters ? Places::kLaneRows : 1][kInRegisters ? kCount : 1];

  template <class Row>
  __device__ __forceinline__ LaneVectors(Row&& row, int token, int x) : first(x) {
    lane_rows<Places>(row, token, rows);
#pragma unroll
    for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
      if constexpr (Runs::kHalf == 0) rows[lane_row] = Runs::at(rows[lane_row], x, threadIdx.x % 4);
      if constexpr (kInRegisters) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) registers[lane_row][i] = load(lane_row, i);
      }
    }
  }
  __device__ __forceinline__ uint4 operator()(int lane_row, int i) const {
    if constexpr (kInRegisters)
      return registers[lane_row][i];
    else
      return load(lane_row, i);
  }

 private:
  __device__ __forceinline__ uint4 load(int lane_row, int i) const {
    if constexpr (Runs::kHalf == 0) return load16<Element>(rows[lane_row] + i * 32);
    return load_run(Runs::at(rows[lane_row], first + i, threadIdx.x % 4), Runs::is_half(first + i));
  }
};

// One scaler for all channels of a row.
struct TokenScaler {
  Scaler s;
  __device__ __forceinline__ float zero(int) const { return s.zero; }
  __device__ __forceinline__ float inverse(int) const { return s.inverse; }
  __device__ __forceinline__ Scaler scaler(int) const { return s; }
};

// The same for coding by thresholds.
struct TokenThresholds {
  uint32_t at[3];
  __device__ __forceinline__ uint32_t threshold(int nth, int) const { return at[nth]; }
};
template <class Places, class Element>
using TokenCoder = std::conditional_t<by_thresholds<typename Places::Quant, Element>(), TokenThresholds, TokenScaler>;

// Broadcasts a scaler from the lane that computed it to the lanes of its row.
__device__ __forceinline__ void broadcast(const Scaler& s, int from, TokenScaler& all) {
  all.s = {__shfl_sync(~0u, s.zero, from), __shfl_sync(~0u, s.scale, from), __shfl_sync(~0u, s.inverse, from)};
}
__device__ __forceinline__ void broadcast(const uint32_t (&thresholds)[2], int from, TokenThresholds& all) {
  const uint32_t first = __shfl_sync(~0u, thresholds[0], from), last = __shfl_sync(~0u, thresholds[1], from);
  all = {__byte_perm(first, 0, 0x1010), __byte_perm(first, 0, 0x3232), __byte_perm(last, 0, 0x1010)};
}

// Computes the scalers of a lane's rows, whose vectors belong to one group. The four lanes of a row have the same extremes, so each of them
// computes the scaler of another row and writes its params.
template <class Places, class Element, int kCount>
__device__ __forceinline__ void token_scalers(const LaneVectors<Places, Element, kCount>& vectors, int token, int x, uint8_t* block,
                                              TokenCoder<Places, Element> (&scalers)[Places::kLaneRows]) {
  using Quant = typename Places::Quant;
  constexpr int kLaneRows = Places::kLaneRows;
  const int lane = threadIdx.x % 32, mine = lane % kLaneRows;
  Range<Element> own;
#pragma unroll
  for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
    Range<Element> range;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint4 v = vectors(lane_row, i);
      if (i == 0) range = {v.x, v.x};
      range.include(v.x), range.include(v.y), range.include(v.z), range.include(v.w);
    }
    range.include_lane(1);
    range.include_lane(2);
    if (lane_row == 0 || lane_row == mine) own = range;
  }
  __half params[2];
  const Scaler s = make_scaler<Quant>(own.lowest(), own.highest(), params);
  if (lane % 4 < kLaneRows) {
#pragma unroll
    for (int kind = 0; kind < Quant::kParams; ++kind)
      *reinterpret_cast<__half*>(block + Places::param_offset(kind, token + mine * 8 + lane / 4, Places::Runs::channel(x))) = params[kind];
  }
  const int row = lane / 4 * 4;
  if constexpr (by_thresholds<Quant, Element>()) {
    const uint32_t thresholds[2] = {threshold<1>(s.zero, s.scale) | threshold<2>(s.zero, s.scale) << 16, threshold<3>(s.zero, s.scale)};
    __syncwarp();  // the division or the search may have diverged the warp
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) broadcast(thresholds, row + lane_row, scalers[lane_row]);
  } else {
    __syncwarp();
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) broadcast(s, row + lane_row, scalers[lane_row]);
  }
}

}  // namespace kvgen::packing
