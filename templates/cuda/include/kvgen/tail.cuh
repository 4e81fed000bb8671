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

  __device__ Tail(const AttendArgs& args, int batch_, int head_, int length, int fresh_)
      : batch(batch_), head(head_), old(length % Format::kTokens), fresh(fresh_) {
    const int64_t at = (static_cast<int64_t>(batch) * args.cache.kv_heads + head) * Format::kTokens * Format::kHeadDim;
    k_residual = static_cast<Element*>(args.cache.k_residual) + at;
    v_residual = static_cast<Element*>(args.cache.v_residual) + at;
  }
  __device__ int count() const { return old + fresh; }
  __device__ const Element* k_row(const AttendArgs& args, int token) const { return row(k_residual, args.k_new, token); }
  __device__ const Element* v_row(const AttendArgs& args, int token) const { return row(v_residual, args.v_new, token); }

  // Stores new tokens [from, to) of the tail at residual slots from `slot` on.
  __device__ void store(const AttendArgs& args, int from, int to, int slot) const {
    constexpr int kVectors = Format::kHeadDim / 8;
    for (int at = threadIdx.x; at < (to - from) * kVectors; at += Traits::kThreads) {
      const int token = at / kVectors, offset = at % kVectors * 8;
      copy16(k_residual + (slot + token) * Format::kHeadDim + offset, k_row(args, from + token) + offset);
      copy16(v_residual + (slot + token) * Format::kHeadDim + offset, v_row(args, from + token) + offset);
    }
  }

  // Sixteen bytes of a row, zeros past the end: stale memory may hold anything.
  __device__ __forceinline__ uint4 load(const Element* residual, const Rows& rows, int token, int channel) const {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(row(residual, rows, min(token, count() - 1)) + channel));
    return token < count() ? v : make_uint4(0, 0, 0, 0);
  }

 private:
  __device__ const Element* row(const Element* residual, const Rows& rows, int token) const {
    return token < old ? residual + token * Format::kHeadDim : rows.row<const Element>(batch, token - old, head);
  }
  __device__ static void copy16(Element* to, const Element* from) { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); }
};

// Scores of 32 tail tokens from `first` for a column tile.
template <class Traits>
__device__ __forceinline__ void tail_scores(const AttendArgs& args, const Tail<Traits>& tail, int first, int tile, uint32_t fragments,
                                            const float* column_factors, int lane, Scores<Traits>& x) {
  using Element = typename Traits::Format::Element;
  float products[2][4] = {};
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int vector = 0; vector < Traits::kHeadDim / 32; ++vector) {
      const Element* type = nullptr;
      const int token = first + 16 * part + lane / 4, channel = 32 * vector + lane % 4 * 8;
      const uint4 a = tail.load(tail.k_residual, args.k_new, token, channel), b = tail.load(tail.k_residual, args.k_new, token + 8, channel);
      const uint4 q = ptx::load_shared16(fragments + ((tile * (Traits::kHeadDim / 32) + vector) * 32 + lane) * 16);
      ptx::mma(products[part], half2_from(a.x, type), half2_from(b.x, type), half2_from(a.y, type), half2_from(b.y, type), q.x, q.y);
      ptx::mma(products[part], half2_from(a.z, type), half2_from(b.z, type), half2_from(a.w, type), half2_from(b.w, type), q.z, q.w);
    }
  own_products<Traits, false>(products[0], products[1], lane, x);
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + i % 2;
      const int token = first + first_row<Traits>(part, lane) + i / 2 * 8;
      const int last = tail.count() - args.q_len + column / Traits::kGroup;  // a query sees itself and what came before
      x[part][i] = token <= min(last, tail.count() - 1) ? x[part][i] * column_factors[column] * kCodeUnit<typename Traits::Key> : -INFINITY;
    }
}

// Adds weights * V for 32 tail tokens. Eight-channel loads of V, transposed 8x8, are fragments of V transposed.
template <class Traits>
__device__ __forceinline__ void tail_values(const AttendArgs& args, const Tail<Traits>& tail, int first, const Weights<Traits> (&weights)[Traits::kColumnTiles],
                                            int lane, State<Traits> (&state)[Traits::kColumnTiles]) {
  using Element = typename Traits::Format::Element;
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int vector = 0; vector < Traits::kHeadDim / 32; ++vector) {
      const Element* type = nullptr;
      const int token = first + 16 * part + lane / 4, channel = 32 * vector + lane % 4 * 8;
      const uint4 a = tail.load(tail.v_residual, args.v_new, token, channel), b = tail.load(tail.v_residual, args.v_new, token + 8, channel);
      const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
      uint32_t rows[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i][0] = ptx::transpose(half2_from(low[i], type)), rows[i][1] = ptx::transpose(half2_from(high[i], type));
#pragma unroll
      for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
        const uint32_t(&b_)[2] = weights[tile][0][part];
        ptx::mma(state[tile].out[2 * vector], rows[0][0], rows[1][0], rows[0][1], rows[1][1], b_[0], b_[1]);
        ptx::mma(state[tile].out[2 * vector + 1], rows[2][0], rows[3][0], rows[2][1], rows[3][1], b_[0], b_[1]);
      }
    }
}

// The whole tail of a head, 32 tokens to a warp.
template <class Traits>
__device__ __forceinline__ void attend_tail(const AttendArgs& args, const Tail<Traits>& tail, uint32_t fragments, const float* column_factors, int warp, int lane,
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
  ValueParams<Traits> params;
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int q = 0; q < Traits::kValueGroups; ++q)
      params.scale[part][q][0] = params.scale[part][q][1] = 1.f, params.zero[part][q][0] = params.zero[part][q][1] = 0.f;
#pragma unroll 1
  for (int first = warp * 32; first < tail.count(); first += Traits::kWarps * 32) {
    Weights<Traits> weights[Traits::kColumnTiles];
#pragma unroll
    for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
      Scores<Traits> x;
      tail_scores<Traits>(args, tail, first, tile, fragments, column_factors, lane, x);
      softmax_step<Traits>(x, params, state[tile], weights[tile]);
    }
    tail_values<Traits>(args, tail, first, weights, lane, state);
  }
}

}  // namespace kvgen
