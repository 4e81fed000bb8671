// Heads of more than 256 channels. Accumulators and queries fill a thread's registers, which leaves none for sixteen tokens of the
// residual: its vectors are loaded where they are used.
#pragma once
#include "kvgen/epilogue/workspace.cuh"
#include "kvgen/mainloop/residual.cuh"

namespace kvgen {

// A lane's vectors of two tokens, [run][half], in device memory.
template <class Runs, class Element>
struct RowVectors {
  struct Run {
    const RowVectors& of;
    int x;
    __device__ __forceinline__ uint4 operator[](int half) const { return load_run(Runs::at(of.rows[half], x, of.t), Runs::is_half(x)); }
  };
  const Element* rows[2];
  int t;
  __device__ __forceinline__ Run operator[](int x) const { return {*this, x}; }
};

// This header is included for wide heads alone, so the specialization is for all traits.
template <class Format_, class Schedule>
struct ResidualTile<Traits<Format_, Schedule>> {
  using Own = Traits<Format_, Schedule>;
  using KeyRuns = typename Own::KeyRuns;
  using ValueRuns = typename Own::ValueRuns;
  using Element = typename Own::Format::Element;
  static constexpr int kTokens = 16;
  int first = 0;  // the first token
  int valid = 0;
  RowVectors<KeyRuns, Element> keys;
  RowVectors<ValueRuns, Element> values;

  __device__ __forceinline__ void clear() {}

  // Finds the rows of the tokens from `first` on, if the residual has any.
  __device__ __forceinline__ void fetch(const Residual<Own>& residual, int first_, int lane) {
    const int limit = residual.tile_limit(first_);
    first = first_, valid = min(limit - first, kTokens);
    if (valid <= 0) return;
    keys.t = values.t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(first + 8 * half + lane / 4, limit - 1);
      keys.rows[half] = residual.k_row(token), values.rows[half] = residual.v_row(token);
    }
  }
  // Appends the step's tokens to the residual. No CTA reads these rows in this launch.
  __device__ __forceinline__ void append(const Residual<Own>& residual, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + lane / 4, token = first + row;
      if (row >= valid || token < residual.old) continue;
      const int64_t at = static_cast<int64_t>(residual.row_of(token)) * Own::kHeadDim;
      auto *k = residual.k_residual + at, *v = residual.v_residual + at;
#pragma unroll 4
      for (int x = 0; x < KeyRuns::kCount; ++x) store_run(KeyRuns::at(k, x, lane % 4), keys[x][half], KeyRuns::is_half(x));
#pragma unroll 4
      for (int x = 0; x < ValueRuns::kCount; ++x) store_run(ValueRuns::at(v, x, lane % 4), values[x][half], ValueRuns::is_half(x));
    }
  }
};

}  // namespace kvgen
