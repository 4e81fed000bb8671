// The unquantized tokens of a sequence: those in its residual and, in decode, this step's tokens. They are row-major in Element.
#pragma once
#include "kvgen/format/rotate.cuh"
#include "kvgen/host/args.cuh"
#include "kvgen/mainloop/keys.cuh"
#include "kvgen/mainloop/packed_loop.cuh"
#include "kvgen/mainloop/score_modifier.cuh"
#include "kvgen/mainloop/values.cuh"

namespace kvgen {

// Tokens are counted from the end of the packed blocks: token i is at position seqlen.packed_end + i. Tokens of the sink are negative.
template <class Traits>
struct Residual {
  using Format = typename Traits::Format;
  using Element = typename Format::Element;
  using ResidualRows = typename Format::ResidualRows;
  Element* k_residual;
  Element* v_residual;
  Head head;
  int length;  // of the sequence before the step
  int old;     // end of the tokens before the step; negative if they do not fill the sink
  int fresh;   // tokens of the step
  const AttendArgs& args;

  __device__ Residual(const AttendArgs& args_, const Head& head_, int length_)
      : head(head_), length(length_), old(ResidualRows::count(length)), fresh(args_.k_new.data ? args_.q_len : 0), args(args_) {
    const int64_t at = args.cache.residual_offset<Format>(head.sequence, head.head);
    k_residual = static_cast<Element*>(args.cache.k_residual) + at;
    v_residual = static_cast<Element*>(args.cache.v_residual) + at;
  }
  __device__ int count() const { return ResidualRows::kArrival ? 0 : old + fresh; }
  // Whether the step completes a block, and packs it: tokens 0 to kBlock - 1.
  __device__ bool fills_block() const { return !ResidualRows::kArrival && count() >= ResidualRows::kBlock + ResidualRows::kLocal; }
  __device__ const Element* k_row(int token) const { return row(k_residual, args.k_new, token); }
  __device__ const Element* v_row(int token) const { return row(v_residual, args.v_new, token); }
  // The row of a token that the residual holds: of one before the step, or of one that `append` or `keep_rotated` put there.
  __device__ Element* k_held(int token) const { return k_residual + row_of(token) * Format::kHeadDim; }
  __device__ Element* v_held(int token) const { return v_residual + row_of(token) * Format::kHeadDim; }

  // First token of the `number`-th tile of sixteen. The tiles of the sink come first. No tile crosses its end, so that the tokens of a tile
  // are consecutive.
  __device__ int tile_token(int number) const {
    constexpr int kSinkTiles = ceil_div(ResidualRows::kSink, 16);
    if constexpr (kSinkTiles > 0) {
      if (number < kSinkTiles) return number * 16 - ResidualRows::first(length);
    }
    return (number - kSinkTiles) * 16;
  }
  // The end of the tokens that a tile may hold.
  __device__ int tile_limit(int token) const {
    if constexpr (ResidualRows::kSink > 0) {
      if (token < 0) return min(ResidualRows::kSink - ResidualRows::first(length), count());
    }
    return count();
  }

  // Prefetches a tile's rows into L2.
  __device__ void prefetch(int token, int lane) const {
    constexpr int kRowBytes = Format::kHeadDim * static_cast<int>(sizeof(Element)), kLines = ceil_div(kRowBytes, 128);
    for (int at = lane; at < 16 * kLines; at += 32) {
      const int own = min(token + at / kLines, tile_limit(token) - 1), offset = at % kLines * 64;
      ptx::prefetch_l2(k_row(own) + offset);
      ptx::prefetch_l2(v_row(own) + offset);
    }
  }

  // Copies tokens [from, to), which the step leaves unquantized although it packs a block, to their rows.
  __device__ void store(int from, int to) const {
    constexpr int kVectors = Format::kHeadDim / 8;
    for (int at = threadIdx.x; at < (to - from) * kVectors; at += Traits::kThreads) {
      const int token = from + at / kVectors, offset = at % kVectors * 8;
      const int place = ResidualRows::row_of(length + fresh, token - ResidualRows::kBlock) * Format::kHeadDim + offset;
      copy16(k_residual + place, k_row(token) + offset);
      copy16(v_residual + place, v_row(token) + offset);
    }
  }
  // Copies tokens [from, to) of the step to their rows, place(token), as the residual holds them.
  template <class Place>
  __device__ void keep_rotated(int from, int to, Place&& place) const {
    if (from >= to) return;
    copy_rotated<typename Traits::Key, Format::kHeadDim, Traits::kThreads>(
        to - from, 0, [&](int i) { return k_row(from + i); }, [&](int i) { return k_residual + place(from + i) * Format::kHeadDim; });
    copy_rotated<typename Traits::Value, Format::kHeadDim, Traits::kThreads>(
        to - from, 0, [&](int i) { return v_row(from + i); }, [&](int i) { return v_residual + place(from + i) * Format::kHeadDim; });
  }
  // The row of a token that stays unquantized although the step packs a block.
  __device__ int later_row_of(int token) const { return ResidualRows::row_of(length + fresh, token - ResidualRows::kBlock); }
  // The row of a token in the residual.
  __device__ int row_of(int token) const { return ResidualRows::row_of(length, token); }

 private:
  __device__ const Element* row(const Element* residual, const Rows& rows, int token) const {
    return token < old ? residual + row_of(token) * Format::kHeadDim : rows.row<const Element>(head.sequence, token - old, head.head);
  }
  __device__ static void copy16(Element* to, const Element* from) { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); }
};

// Sixteen tokens of K and V in registers. Of every run of channels, a lane has its vector of token 8 * half + lane / 4. Rows past the end
// repeat the last token.
template <class Traits>
struct ResidualTile {
  using KeyRuns = typename Traits::KeyRuns;
  using ValueRuns = typename Traits::ValueRuns;
  static constexpr int kTokens = 16;
  int first = 0;  // the first token
  int valid = 0;
  uint4 keys[KeyRuns::kCount][2], values[ValueRuns::kCount][2];

  // Clears the registers, so that the compiler does not keep the values of the last work tile.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (auto& vector : keys) vector[half] = make_uint4(0, 0, 0, 0);
      for (auto& vector : values) vector[half] = make_uint4(0, 0, 0, 0);
    }
  }

  // Loads the tokens from `first` on, if the residual has any.
  __device__ __forceinline__ void fetch(const Residual<Traits>& residual, int first_, int lane) {
    const int limit = residual.tile_limit(first_);
    first = first_, valid = min(limit - first, kTokens);
    if (valid <= 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(first + 8 * half + lane / 4, limit - 1);
      const auto *k = residual.k_row(token), *v = residual.v_row(token);
#pragma unroll
      for (int x = 0; x < KeyRuns::kCount; ++x) keys[x][half] = load_run(KeyRuns::at(k, x, lane % 4), KeyRuns::is_half(x));
#pragma unroll
      for (int x = 0; x < ValueRuns::kCount; ++x) values[x][half] = load_run(ValueRuns::at(v, x, lane % 4), ValueRuns::is_half(x));
    }
  }
  // Rotates the step's tokens, which the caller gives as they are. K and V that are rotated alike go together: of one token, each alone
  // would leave half of the lanes idle.
  __device__ __forceinline__ void rotate(const Residual<Traits>& residual, int lane) {
    using OfKey = Rotation<typename Traits::Key>;
    using OfValue = Rotation<typename Traits::Value>;
    if constexpr (OfKey::kBlock > 0 && std::is_same_v<OfKey, OfValue> && Traits::kHeadDim <= 128) {
      rotate_new<OfKey, true, true>(residual, lane);
    } else {
      if constexpr (OfKey::kBlock > 0) rotate_new<OfKey, true, false>(residual, lane);
      if constexpr (OfValue::kBlock > 0) rotate_new<OfValue, false, true>(residual, lane);
    }
  }
  // Appends the step's tokens to the residual. No CTA reads these rows in this launch.
  __device__ __forceinline__ void append(const Residual<Traits>& residual, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + lane / 4, token = first + row;
      if (row >= valid || token < residual.old) continue;
      const int64_t at = static_cast<int64_t>(residual.row_of(token)) * Traits::kHeadDim;
      auto *k = residual.k_residual + at, *v = residual.v_residual + at;
#pragma unroll
      for (int x = 0; x < KeyRuns::kCount; ++x) store_run(KeyRuns::at(k, x, lane % 4), keys[x][half], KeyRuns::is_half(x));
#pragma unroll
      for (int x = 0; x < ValueRuns::kCount; ++x) store_run(ValueRuns::at(v, x, lane % 4), values[x][half], ValueRuns::is_half(x));
    }
  }

 private:
  // Loads new tokens anew, as many rows as the warp holds in vectors of eight channels, those of K first: of one token the runs would
  // leave most lanes idle.
  template <class Rotation, bool kKeys, bool kValues>
  __device__ __forceinline__ void rotate_new(const Residual<Traits>& residual, int lane) {
    constexpr int kVectors = Traits::kHeadDim / 8, kAtOnce = std::min(8, 32 / kVectors / (kKeys + kValues));
    using Element = typename Traits::Format::Element;
    const int row = lane / kVectors, channel = lane % kVectors * 8, end = first + valid;
#pragma unroll 1
    for (int token = max(first, residual.old); token < end; token += kAtOnce) {
      const int own = min(token + row % kAtOnce, end - 1);
      const Element* from = kKeys && (!kValues || row < kAtOnce) ? residual.k_row(own) : residual.v_row(own);
      const uint4 v = rotate_vector<Rotation, Element>(load_run(from + channel, false), channel, lane);
      if constexpr (kKeys) take<KeyRuns>(keys, v, 0, token, kAtOnce, lane);
      if constexpr (kValues) take<ValueRuns>(values, v, kKeys ? kAtOnce * kVectors : 0, token, kAtOnce, lane);
    }
  }
  // Takes `count` rows from `token` on out of the vectors of lanes from `base` on.
  template <class Runs>
  __device__ __forceinline__ void take(uint4 (&rows)[Runs::kCount][2], const uint4& v, int base, int token, int count, int lane) const {
    const int low = first + lane / 4 - token, high = low + 8;  // the lane's rows among these tokens
    const bool has_low = low >= 0 && low < count, has_high = high >= 0 && high < count;
    const int from = base + (has_low ? low : has_high ? high : 0) * (Traits::kHeadDim / 8);
#pragma unroll
    for (int x = 0; x < Runs::kCount; ++x) {
      const int at = Runs::lane_channel(x, lane % 4), lane_of = from + at / 8;
      uint4 mine = make_uint4(__shfl_sync(~0u, v.x, lane_of), __shfl_sync(~0u, v.y, lane_of), __shfl_sync(~0u, v.z, lane_of),
                              __shfl_sync(~0u, v.w, lane_of));
      if (Runs::is_half(x)) mine = at % 8 ? make_uint4(mine.z, mine.w, mine.z, mine.w) : make_uint4(mine.x, mine.y, mine.x, mine.y);
      if (has_low) rows[x][0] = mine;
      if (has_high) rows[x][1] = mine;
    }
  }
};

// Computes the scores of a tile of the residual for a tile of query rows.
template <class Traits>
__device__ __forceinline__ void residual_scores(const ResidualTile<Traits>& rows, const SeqlenInfo& seqlen, int tile, uint32_t fragments,
                                                const float* q_factors, int lane, Scores<Traits>& x) {
  using Plain = Unquantized<typename Traits::Format::Element>;
  float products[2][4] = {};
#pragma unroll
  for (int x = 0; x < Traits::KeyRuns::kCount; ++x) {
    const uint4 &a = rows.keys[x][0], &b = rows.keys[x][1];
    const uint4 q = load_query<Traits>(fragments, tile, x, lane);
    ptx::mma(products[0], Plain::half2(a.x), Plain::half2(b.x), Plain::half2(a.y), Plain::half2(b.y), q.x, q.y);
    if (Traits::KeyRuns::is_half(x)) continue;
    ptx::mma(products[0], Plain::half2(a.z), Plain::half2(b.z), Plain::half2(a.w), Plain::half2(b.w), q.z, q.w);
  }
  own_products<Traits>(products[0], products[1], lane, x.product);
#pragma unroll
  for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.product[m_tile][i] *= q_factors[q_row<Traits>(tile, lane, i)];
      x.factor[m_tile][i] = 1.f, x.offset[m_tile][i] = 0.f;
    }
  modify_scores<Traits>(seqlen, seqlen.packed_end + rows.first, tile, lane, x);
#pragma unroll
  for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row<Traits>(m_tile, lane) + i / 2 * 8, token = seqlen.packed_end + rows.first + row;
      const int position = min(seqlen.position<Traits>(q_row<Traits>(tile, lane, i)), seqlen.length - 1);
      bool visible = token <= position && row < rows.valid;
      if (Traits::Mask::kWindow > 0) visible = visible && token >= Traits::Mask::first_token(position);
      if (!visible) x.product[m_tile][i] = -INFINITY;
    }
}

// Adds weights * V of a residual tile. A lane's vectors of V, transposed as 8x8 matrices, are A fragments of V transposed.
template <class Traits>
__device__ __forceinline__ void residual_values(const ResidualTile<Traits>& rows, const Weights<Traits> (&weights)[Traits::kQTiles][1],
                                                State<Traits> (&state)[Traits::kQTiles]) {
  using Plain = Unquantized<typename Traits::Format::Element>;
#pragma unroll
  for (int x = 0; x < Traits::ValueRuns::kCount; ++x) {
    const bool half = Traits::ValueRuns::is_half(x);
    const int row_tile = Traits::ValueRuns::tile(x);
    const uint4 &a = rows.values[x][0], &b = rows.values[x][1];
    const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
    uint32_t transposed[4][2];
#pragma unroll
    for (int i = 0; i < (half ? 2 : 4); ++i)
      transposed[i][0] = ptx::transpose(Plain::half2(low[i])), transposed[i][1] = ptx::transpose(Plain::half2(high[i]));
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile) {
      const uint32_t(&w)[2] = weights[tile][0][0][0];
      ptx::mma(state[tile].out[row_tile], transposed[0][0], transposed[1][0], transposed[0][1], transposed[1][1], w[0], w[1]);
      if (half) continue;
      ptx::mma(state[tile].out[row_tile + 1], transposed[2][0], transposed[3][0], transposed[2][1], transposed[3][1], w[0], w[1]);
    }
  }
}

// Attends to one tile of the residual.
template <class Traits>
__device__ __forceinline__ void attend_residual_tile(const ResidualTile<Traits>& rows, const SeqlenInfo& seqlen, uint32_t fragments,
                                                     const float* q_factors, int lane, State<Traits> (&state)[Traits::kQTiles]) {
  ValueParams<Traits> params[1];
#pragma unroll
  for (int m_tile = 0; m_tile < Traits::kMTiles; ++m_tile)
#pragma unroll
    for (int q = 0; q < Traits::kValueGroups; ++q)
#pragma unroll
      for (int half = 0; half < 2; ++half) params[0].scale[m_tile][q][half] = 1.f, params[0].zero[m_tile][q][half] = 0.f;
  Weights<Traits> weights[Traits::kQTiles][1];
#pragma unroll
  for (int tile = 0; tile < Traits::kQTiles; ++tile) {
    Scores<Traits> x[1];
    residual_scores<Traits>(rows, seqlen, tile, fragments, q_factors, lane, x[0]);
    softmax_step<Traits>(x, params, state[tile], weights[tile]);
  }
  residual_values<Traits>(rows, weights, state);
}

// Assigns the tiles of a head's residual to CTAs and warps, and attends to them.

// The position of a CTA among those that share a head.
struct SplitPlace {
  int rank, ctas;
};

// First token of a warp's `round`-th tile of 16 unquantized tokens. Tiles go to the CTAs and warps in reverse order, since the last ones
// have the fewest KV tiles.
template <class Traits>
__device__ __forceinline__ int residual_tile(const Residual<Traits>& residual, const SplitPlace& place, int round, int warp) {
  return residual.tile_token((round * Traits::kWarps + Traits::kWarps - 1 - warp) * place.ctas + place.ctas - 1 - place.rank);
}

// Loads the warp's first tile of the residual, and prefetches its later ones into L2: both before the ring is filled, because the loads
// would wait behind the ring's traffic. Without sink, local or rollback tokens nearly all warps have one tile.
template <class Traits>
__device__ __forceinline__ void fetch_residual(const Residual<Traits>& residual, const SplitPlace& place, int warp, int lane,
                                               ResidualTile<Traits>& tile) {
  if constexpr (Traits::kArrival) return;
  tile.fetch(residual, residual_tile<Traits>(residual, place, 0, warp), lane);
  if constexpr (Traits::Format::ResidualRows::kRows > Traits::Format::kTokens) {
#pragma unroll 1
    for (int round = 1;; ++round) {
      const int token = residual_tile<Traits>(residual, place, round, warp);
      if (token >= residual.tile_limit(token)) break;
      residual.prefetch(token, lane);
    }
  }
}

// Rotates the step's tokens in a tile: in the first one before q is there, since its warp would wait then.
template <class Traits>
__device__ __forceinline__ void rotate_tile(const Residual<Traits>& residual, int lane, ResidualTile<Traits>& tile) {
  if constexpr (!Traits::kArrival && (kRotated<typename Traits::Key> || kRotated<typename Traits::Value>)) tile.rotate(residual, lane);
}

// Attends to the warp's tiles of the residual, the first of which is already loaded and rotated. The warp that has the step's tokens in
// registers appends them (in the first run of packed-GQA rows), unless the step packs a block: then `flush` takes them from the caller's
// tensors, because the rows of the tokens behind the block may be those of the block. With rollback each token has a row of its own, which
// is read again if the block is taken back.
template <class Traits>
__device__ __forceinline__ void attend_residual(const Shared<Traits>& shared, const Residual<Traits>& residual, ResidualTile<Traits>& tile,
                                                const SplitPlace& place, const SeqlenInfo& seqlen, int warp, int lane,
                                                State<Traits> (&state)[Traits::kQTiles]) {
  if constexpr (Traits::kArrival) return;
  if (tile.valid <= 0) return;
#pragma unroll 1
  for (int round = 1; tile.valid > 0; ++round) {
    if (residual.fresh && (Traits::Format::ResidualRows::kRollback > 0 || !residual.fills_block()) &&
        (Traits::kRuns == 1 || seqlen.run == 0))
      tile.append(residual, lane);
    attend_residual_tile<Traits>(tile, seqlen, shared.query(), shared.factors, lane, state);
    tile.fetch(residual, residual_tile<Traits>(residual, place, round, warp), lane);
    rotate_tile<Traits>(residual, lane, tile);
  }
  if constexpr (kStatic<typename Traits::Value>)
    divide_values<Traits>(
        state, StaticScales::of<typename Traits::Format>(residual.args.scales, residual.args.cache.kv_heads, residual.head.head).value,
        lane);
#pragma unroll
  for (int i = 0; i < Traits::kQTiles; ++i) mix_values<Traits>(state[i]);
}

}  // namespace kvgen
