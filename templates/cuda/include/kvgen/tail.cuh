// The tail of a sequence: its residual and, in decode, this step's new tokens, all in Element and row-major.
#pragma once
#include "kvgen/args.cuh"
#include "kvgen/subtile.cuh"

namespace kvgen {

template <class Traits>
struct Tail {
  using Format = typename Traits::Format;
  using Element = typename Format::Element;
  Element* k_residual;
  Element* v_residual;
  int batch, head;
  int old;    // tokens in the residual before this call
  int fresh;  // new tokens
  const AttendArgs& args;

  __device__ Tail(const AttendArgs& args_, int batch_, int head_, int length)
      : batch(batch_), head(head_), old(length % Format::kTokens), fresh(args_.k_new.data ? args_.q_len : 0), args(args_) {
    const int64_t at = (static_cast<int64_t>(batch) * args.cache.kv_heads + head) * Format::kTokens * Format::kHeadDim;
    k_residual = static_cast<Element*>(args.cache.k_residual) + at;
    v_residual = static_cast<Element*>(args.cache.v_residual) + at;
  }
  __device__ int count() const { return old + fresh; }
  __device__ const Element* k_row(int token) const { return row(k_residual, args.k_new, token); }
  __device__ const Element* v_row(int token) const { return row(v_residual, args.v_new, token); }

  // Stores tokens [from, to) of the tail at residual slots from `slot` on.
  __device__ void store(int from, int to, int slot) const {
    constexpr int kVectors = Format::kHeadDim / 8;
    for (int at = threadIdx.x; at < (to - from) * kVectors; at += Traits::kThreads) {
      const int token = at / kVectors, offset = at % kVectors * 8;
      copy16(k_residual + (slot + token) * Format::kHeadDim + offset, k_row(from + token) + offset);
      copy16(v_residual + (slot + token) * Format::kHeadDim + offset, v_row(from + token) + offset);
    }
  }

 private:
  __device__ const Element* row(const Element* residual, const Rows& rows, int token) const {
    return token < old ? residual + token * Format::kHeadDim : rows.row<const Element>(batch, token - old, head);
  }
  __device__ static void copy16(Element* to, const Element* from) { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); }
};

// Sixteen rows of K and of V in registers: of row 8 * half + lane / 4 a lane has sixteen bytes from channel 32 * vector + 8 * (lane % 4)
// on. The last token stands in for those past the end.
template <class Traits>
struct TailTile {
  static constexpr int kTokens = 16, kVectors = Traits::kHeadDim / 32;
  int first = 0;  // of the tail's tokens
  int valid = 0;
  uint4 keys[kVectors][2], values[kVectors][2];

  // In a loop, so that nothing of the last round is kept for this one.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int x = 0; x < kVectors; ++x)
#pragma unroll
      for (int half = 0; half < 2; ++half) keys[x][half] = values[x][half] = make_uint4(0, 0, 0, 0);
  }

  // Asks for the tokens from `first` on, if there are any.
  __device__ __forceinline__ void fetch(const Tail<Traits>& tail, int first_, int lane) {
    first = first_, valid = min(tail.count() - first, kTokens);
    if (valid <= 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(first + 8 * half + lane / 4, tail.count() - 1);
      const auto *k = tail.k_row(token) + lane % 4 * 8, *v = tail.v_row(token) + lane % 4 * 8;
#pragma unroll
      for (int x = 0; x < kVectors; ++x)
        keys[x][half] = *reinterpret_cast<const uint4*>(k + 32 * x), values[x][half] = *reinterpret_cast<const uint4*>(v + 32 * x);
    }
  }
  // Appends its new tokens to the residual, which nobody reads that far.
  __device__ __forceinline__ void append(const Tail<Traits>& tail, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + lane / 4, token = first + row;
      if (row >= valid || token < tail.old) continue;
      const int64_t at = static_cast<int64_t>(token) * Traits::kHeadDim + lane % 4 * 8;
#pragma unroll
      for (int x = 0; x < kVectors; ++x) {
        *reinterpret_cast<uint4*>(tail.k_residual + at + 32 * x) = keys[x][half];
        *reinterpret_cast<uint4*>(tail.v_residual + at + 32 * x) = values[x][half];
      }
    }
  }
};

// Scores of a tile of the tail, which has `count` tokens in all, for a column tile.
template <class Traits>
__device__ __forceinline__ void tail_scores(const TailTile<Traits>& rows, int count, int q_len, int tile, uint32_t fragments,
                                            const float* column_factors, int lane, Scores<Traits>& x) {
  const typename Traits::Format::Element* type = nullptr;
  float products[2][4] = {};
#pragma unroll
  for (int vector = 0; vector < Traits::kHeadDim / 32; ++vector) {
    const uint4 &a = rows.keys[vector][0], &b = rows.keys[vector][1];
    const uint4 q = ptx::load_shared16(fragments + ((tile * (Traits::kHeadDim / 32) + vector) * 32 + lane) * 16);
    ptx::mma(products[0], half2_from(a.x, type), half2_from(b.x, type), half2_from(a.y, type), half2_from(b.y, type), q.x, q.y);
    ptx::mma(products[0], half2_from(a.z, type), half2_from(b.z, type), half2_from(a.w, type), half2_from(b.w, type), q.z, q.w);
  }
  own_products<Traits>(products[0], products[1], lane, x.product);
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + i % 2;
      const int token = rows.first + first_row<Traits>(part, lane) + i / 2 * 8;
      const int last = min(count - 1, count - q_len + column / Traits::kGroup);  // a query sees itself and what came before
      x.product[part][i] = token <= last && token < rows.first + rows.valid ? x.product[part][i] * column_factors[column] : -INFINITY;
      x.factor[part][i] = 1.f, x.offset[part][i] = 0.f;
    }
}

// Adds weights * V for a tile. Eight-channel loads of V, transposed 8x8, are fragments of V transposed.
template <class Traits>
__device__ __forceinline__ void tail_values(const TailTile<Traits>& rows, const Weights<Traits> (&weights)[Traits::kColumnTiles][1],
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
  const typename Traits::Format::Element* type = nullptr;
#pragma unroll
  for (int vector = 0; vector < Traits::kHeadDim / 32; ++vector) {
    const uint4 &a = rows.values[vector][0], &b = rows.values[vector][1];
    const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
    uint32_t turned[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      turned[i][0] = ptx::transpose(half2_from(low[i], type)), turned[i][1] = ptx::transpose(half2_from(high[i], type));
#pragma unroll
    for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
      const uint32_t(&w)[2] = weights[tile][0][0][0];
      ptx::mma(state[tile].out[2 * vector], turned[0][0], turned[1][0], turned[0][1], turned[1][1], w[0], w[1]);
      ptx::mma(state[tile].out[2 * vector + 1], turned[2][0], turned[3][0], turned[2][1], turned[3][1], w[0], w[1]);
    }
  }
}

// One tile of the tail, which has `count` tokens in all.
template <class Traits>
__device__ __forceinline__ void attend_tile(const TailTile<Traits>& rows, int count, int q_len, uint32_t fragments,
                                            const float* column_factors, int lane, State<Traits> (&state)[Traits::kColumnTiles]) {
  ValueParams<Traits> params[1];
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int q = 0; q < Traits::kValueGroups; ++q)
#pragma unroll
      for (int half = 0; half < 2; ++half) params[0].scale[part][q][half] = 1.f, params[0].zero[part][q][half] = 0.f;
  Weights<Traits> weights[Traits::kColumnTiles][1];
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    Scores<Traits> x[1];
    tail_scores<Traits>(rows, count, q_len, tile, fragments, column_factors, lane, x[0]);
    softmax_step<Traits>(x, params, state[tile], weights[tile]);
  }
  tail_values<Traits>(rows, weights, state);
}

}  // namespace kvgen
