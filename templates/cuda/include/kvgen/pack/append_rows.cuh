// Appends tokens to a cache that keeps a sink, local tokens or tokens for a rollback. A call may pack blocks from residual rows
// that its own tokens overwrite, so one kernel packs all blocks before a second one stores the tokens that stay unquantized.
#pragma once
#include "kvgen/host/args.cuh"
#include "kvgen/pack/occupancy.cuh"
#include "kvgen/pack/quantize.cuh"

namespace kvgen {
namespace packing {

// The length of a sequence before and after the call. A sequence whose tokens do not fit keeps its length, and the overflow flag is set.
struct Lengths {
  int before, after;

  __device__ Lengths(const PackArgs& args, int sequence) : before(args.cache.lengths[sequence]), after(before) {
    const int more = args.new_lengths[sequence];
    if (args.fits(before, more))
      after = before + more;
    else if (threadIdx.x == 0)
      *args.overflow = 1;
  }
};

// The rows of one head's tokens from position `first` on: those of the residual, and behind them the call's.
template <class Format>
struct PositionRows {
  using Element = typename Format::Element;
  const Element *residual, *fresh;
  int64_t stride;  // of `fresh`
  int first, length;

  __device__ PositionRows(const CacheArgs& cache, const void* residual_, const Rows& rows, int sequence, int head, int first_, int length_)
      : residual(static_cast<const Element*>(residual_) + cache.residual_offset<Format>(sequence, head)),
        fresh(rows.row<const Element>(sequence, 0, head)),
        stride(rows.token_stride),
        first(first_),
        length(length_) {}
  __device__ __forceinline__ const Element* operator()(int token) const {
    const int position = first + token;
    return position < length ? residual + Format::ResidualRows::row(position) * Format::kHeadDim : fresh + (position - length) * stride;
  }
};

// One CTA per (head, block that may become full, sequence).
template <class Format, int kThreads>
__global__ void __launch_bounds__(kThreads, pack_ctas<Format>()) pack_blocks_kernel(const PackArgs args) {
  using ResidualRows = typename Format::ResidualRows;
  static_assert(pack_smem_bytes<Format>() <= 48 * 1024);
  __shared__ __align__(16) uint8_t smem[pack_smem_bytes<Format>()];
  const CacheArgs& cache = args.cache;
  const int sequence = blockIdx.y, head = blockIdx.x % cache.kv_heads, nth = blockIdx.x / cache.kv_heads;
  const Lengths lengths(args, sequence);
  const int block = ResidualRows::packed_blocks(lengths.before) + nth;
  const int after = ResidualRows::packed_blocks(lengths.after);
  if (block >= after || block < WindowPlaces<Format::kWindowPlaces>::first(after)) return;  // later blocks take the places of earlier ones
  const int first = ResidualRows::kSink + block * Format::kTokens;
  pack_block<Format, kThreads>(PositionRows<Format>(cache, cache.k_residual, args.k, sequence, head, first, lengths.before),
                               PositionRows<Format>(cache, cache.v_residual, args.v, sequence, head, first, lengths.before),
                               cache.block<Format>(sequence, head, block), smem);
}

constexpr int kStoreThreads = 256;
constexpr int kStoreTokens = 32;  // of a CTA

// Stores the call's tokens of the sink, and those that are unquantized now or would be after a rollback. One CTA per (head, kStoreTokens of
// these tokens, sequence).
template <class Format>
__global__ void __launch_bounds__(kStoreThreads) store_rows_kernel(const PackArgs args) {
  using Element = typename Format::Element;
  using ResidualRows = typename Format::ResidualRows;
  constexpr int kVectors = Format::kHeadDim / 8;
  const CacheArgs& cache = args.cache;
  const int sequence = blockIdx.y, head = blockIdx.x % cache.kv_heads, from = blockIdx.x / cache.kv_heads * kStoreTokens;
  const Lengths lengths(args, sequence);
  const int sink = max(min(lengths.after, ResidualRows::kSink) - lengths.before, 0);
  const int first = max(lengths.before, ResidualRows::first(max(lengths.after - ResidualRows::kRollback, 0)));
  const int count = sink + max(lengths.after - first, 0);
  const int64_t offset = cache.residual_offset<Format>(sequence, head);
  for (int i = threadIdx.x; i < kStoreTokens * kVectors; i += kStoreThreads) {
    const int nth = from + i / kVectors, channel = i % kVectors * 8;
    if (nth >= count) return;
    const int position = nth < sink ? lengths.before + nth : first + nth - sink, token = position - lengths.before;
    const int64_t to = offset + ResidualRows::row(position) * Format::kHeadDim + channel;
    *reinterpret_cast<uint4*>(static_cast<Element*>(cache.k_residual) + to) =
        load16(args.k.row<const Element>(sequence, token, head) + channel);
    *reinterpret_cast<uint4*>(static_cast<Element*>(cache.v_residual) + to) =
        load16(args.v.row<const Element>(sequence, token, head) + channel);
  }
}

}  // namespace packing
}  // namespace kvgen
