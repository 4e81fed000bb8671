// Appends tokens to a cache: packs every block that becomes full, stores the other tokens in the residual, and advances the lengths.
#pragma once
#include <algorithm>

#include "kvgen/format/rotate.cuh"
#include "kvgen/host/args.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/pack/quantize.cuh"
#include "kvgen/pack/write.cuh"

namespace kvgen {
namespace packing {

// The rows of one head: token i at data + i * stride.
template <class Element>
struct TokenRows {
  const Element* data;
  int64_t stride;
  __device__ __forceinline__ const Element* operator()(int token) const { return data + token * stride; }
};

// Puts the tokens of a block into dynamic shared memory, rotated; the first `held` come from the residual, and are rotated already.
template <class Format, int kThreads>
struct Rotate {
  static constexpr int kBytes = Format::kTokens * Format::kHeadDim * 2;
  int held;

  template <class Quant, class Row>
  __device__ __forceinline__ auto rows(Row row) const {
    if constexpr (!kRotated<Quant>) {
      return row;
    } else {
      extern __shared__ __align__(128) uint8_t memory[];
      using Element = typename Format::Element;
      const TokenRows<Element> staged{reinterpret_cast<Element*>(memory), Format::kHeadDim};
      __syncthreads();  // the rows of K are packed
      copy_rotated<Quant, Format::kHeadDim, kThreads>(Format::kTokens, held, row,
                                                      [&](int token) { return const_cast<Element*>(staged(token)); });
      __syncthreads();
      return staged;
    }
  }
};
template <class Format>
constexpr bool kRotates = kRotated<typename Format::Key> || kRotated<typename Format::Value>;
// Copies the first `count` rows to the residual's slots from `slot` on.
template <class Format, int kThreads, class Element>
__device__ __forceinline__ void fill_residual(TokenRows<Element> k, TokenRows<Element> v, Element* k_residual, Element* v_residual,
                                              int slot, int count) {
  if constexpr (kRotates<Format>) {
    if (count <= 0) return;
    const auto row = [&](Element* residual) { return [=](int i) { return residual + (slot + i) * Format::kHeadDim; }; };
    copy_rotated<typename Format::Key, Format::kHeadDim, kThreads>(count, 0, k, row(k_residual));
    return copy_rotated<typename Format::Value, Format::kHeadDim, kThreads>(count, 0, v, row(v_residual));
  }
  constexpr int kVectors = Format::kHeadDim / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < count * kVectors; i += kThreads) {
    const int channel = i % kVectors * 8, place = (slot + i / kVectors) * Format::kHeadDim + channel;
    const uint4 k_vector = load16(k(i / kVectors) + channel), v_vector = load16(v(i / kVectors) + channel);
    *reinterpret_cast<uint4*>(k_residual + place) = k_vector;
    *reinterpret_cast<uint4*>(v_residual + place) = v_vector;
  }
}

// One CTA per (head, block that may become full, sequence). Only the first CTA of a sequence writes to the residual: it completes the block
// that the residual has begun, packs it from there, and stores the tokens behind the last full block.
template <class Format, int kThreads>
__global__ void __launch_bounds__(kThreads, pack_ctas<Format>()) pack_kernel(const PackArgs args) {
  using Element = typename Format::Element;
  constexpr int kTokens = Format::kTokens;
  static_assert(Format::ResidualRows::kRows == kTokens, "pack_blocks_kernel and store_rows_kernel are for more rows");
  static_assert(pack_smem_bytes<Format>() <= 48 * 1024);
  __shared__ __align__(16) uint8_t smem[pack_smem_bytes<Format>()];
  const CacheArgs& cache = args.cache;
  const auto run = TokenRun<kTokens>::of_cta(args);
  if (run.nth < 0) return;
  const int sequence = run.sequence, nth = run.nth, head = run.head;
  const int length = cache.lengths[sequence], more = args.new_lengths[sequence], end = length + more;
  if (!args.fits(sequence, length, more)) {  // nothing is written
    if (threadIdx.x == 0) *args.overflow = 1;
    return;
  }
  const int block = length / kTokens + nth, full = end / kTokens;
  if (block >= full && nth > 0) return;

  const auto scales = StaticScales::of<Format>(args.scales, cache.kv_heads, head);
  const int64_t slots = cache.residual_offset<Format>(sequence, head);
  Element* k_residual = static_cast<Element*>(cache.k_residual) + slots;
  Element* v_residual = static_cast<Element*>(cache.v_residual) + slots;
  const auto fresh = [&](const Rows& rows, int position) -> TokenRows<Element> {
    return {rows.row<Element>(sequence, args.start(sequence) + position - length, head), rows.token_stride};
  };
  const auto keep = [&](int position, int count) {
    fill_residual<Format, kThreads>(fresh(args.k, position), fresh(args.v, position), k_residual, v_residual, position % kTokens, count);
  };
  const bool begun = nth == 0 && length % kTokens != 0;
  if (begun) {
    keep(length, min(end, (block + 1) * kTokens) - length);
    if (block >= full) return;
    __syncthreads();
  }
  if (block < full && block >= WindowPlaces<Format::kWindowPlaces>::first(full)) {  // later blocks take the places of earlier ones
    const TokenRows<Element> k = begun ? TokenRows<Element>{k_residual, Format::kHeadDim} : fresh(args.k, block * kTokens);
    const TokenRows<Element> v = begun ? TokenRows<Element>{v_residual, Format::kHeadDim} : fresh(args.v, block * kTokens);
    if constexpr (kRotates<Format>)
      pack_block<Format, kThreads>(k, v, cache.block<Format>(sequence, head, block), smem, scales,
                                   Rotate<Format, kThreads>{begun ? kTokens : 0});
    else
      pack_block<Format, kThreads>(k, v, cache.block<Format>(sequence, head, block), smem, scales);
  }
  if (nth == 0) keep(full * kTokens, end - full * kTokens);
}

// A cache that keeps a sink, local tokens or tokens for a rollback may have blocks to pack from residual rows that the call's own tokens
// overwrite, so one kernel packs all blocks before a second one stores the tokens that stay unquantized.

// The length of a sequence before and after the call. A sequence whose tokens do not fit keeps its length, and the overflow flag is set.
struct Lengths {
  int before, after;

  __device__ Lengths(const PackArgs& args, int sequence) : before(args.cache.lengths[sequence]), after(before) {
    const int more = args.new_lengths[sequence];
    if (args.fits(sequence, before, more))
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

  __device__ PositionRows(const PackArgs& args, const void* residual_, const Rows& rows, int sequence, int head, int first_, int length_)
      : residual(static_cast<const Element*>(residual_) + args.cache.residual_offset<Format>(sequence, head)),
        fresh(rows.row<const Element>(sequence, args.start(sequence), head)),
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
  const auto run = TokenRun<Format::kTokens>::of_cta(args);
  if (run.nth < 0) return;
  const int sequence = run.sequence, nth = run.nth, head = run.head;
  const Lengths lengths(args, sequence);
  const int block = ResidualRows::packed_blocks(lengths.before) + nth;
  const int after = ResidualRows::packed_blocks(lengths.after);
  if (block >= after || block < WindowPlaces<Format::kWindowPlaces>::first(after)) return;  // later blocks take the places of earlier ones
  const int first = ResidualRows::kSink + block * Format::kTokens;
  const PositionRows<Format> k_rows(args, cache.k_residual, args.k, sequence, head, first, lengths.before);
  const PositionRows<Format> v_rows(args, cache.v_residual, args.v, sequence, head, first, lengths.before);
  uint8_t* to = cache.block<Format>(sequence, head, block);
  const auto scales = StaticScales::of<Format>(args.scales, cache.kv_heads, head);
  if constexpr (kRotates<Format>)
    pack_block<Format, kThreads>(k_rows, v_rows, to, smem, scales, Rotate<Format, kThreads>{lengths.before - first});
  else
    pack_block<Format, kThreads>(k_rows, v_rows, to, smem, scales);
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
  const auto run = TokenRun<kStoreTokens>::of_cta(args);
  if (run.nth < 0) return;
  const int sequence = run.sequence, head = run.head, from = run.nth * kStoreTokens, origin = args.start(sequence);
  const Lengths lengths(args, sequence);
  const int sink = max(min(lengths.after, ResidualRows::kSink) - lengths.before, 0);
  const int first = max(lengths.before, ResidualRows::first(max(lengths.after - ResidualRows::kRollback, 0)));
  const int count = sink + max(lengths.after - first, 0);
  const int64_t offset = cache.residual_offset<Format>(sequence, head);
  if constexpr (kRotates<Format>) {
    if (from >= count) return;
    const auto position_of = [&](int i) { return from + i < sink ? lengths.before + from + i : first + from + i - sink; };
    const auto given = [&](const Rows& rows) {
      return [&](int i) { return rows.row<const Element>(sequence, origin + position_of(i) - lengths.before, head); };
    };
    const auto row = [&](void* residual) {
      return [=](int i) { return static_cast<Element*>(residual) + offset + ResidualRows::row(position_of(i)) * Format::kHeadDim; };
    };
    const int rows = min(count - from, kStoreTokens);
    copy_rotated<typename Format::Key, Format::kHeadDim, kStoreThreads>(rows, 0, given(args.k), row(cache.k_residual));
    return copy_rotated<typename Format::Value, Format::kHeadDim, kStoreThreads>(rows, 0, given(args.v), row(cache.v_residual));
  }
  for (int i = threadIdx.x; i < kStoreTokens * kVectors; i += kStoreThreads) {
    const int nth = from + i / kVectors, channel = i % kVectors * 8;
    if (nth >= count) return;
    const int position = nth < sink ? lengths.before + nth : first + nth - sink, token = origin + position - lengths.before;
    const int64_t to = offset + ResidualRows::row(position) * Format::kHeadDim + channel;
    *reinterpret_cast<uint4*>(static_cast<Element*>(cache.k_residual) + to) =
        load16(args.k.row<const Element>(sequence, token, head) + channel);
    *reinterpret_cast<uint4*>(static_cast<Element*>(cache.v_residual) + to) =
        load16(args.v.row<const Element>(sequence, token, head) + channel);
  }
}

}  // namespace packing

template <class Format>
cudaError_t launch_pack(const PackArgs& args, cudaStream_t stream) {
  if (args.cache.batch == 0 || args.cache.kv_heads == 0 || args.tokens == 0) return cudaSuccess;
  constexpr int kThreads = packing::pack_threads<Format>();
  const dim3 grid = TokenRun<Format::kTokens>::grid(args, ceil_div(args.tokens, Format::kTokens));
  if constexpr (Format::ResidualRows::kArrival) {
    if (const cudaError_t failed = launch_append<Format>(AppendArgs{args}, stream, false); failed != cudaSuccess) return failed;
  } else if constexpr (packing::kRotates<Format>) {
    constexpr int kBytes = packing::Rotate<Format, kThreads>::kBytes;
    const auto run = [&](auto kernel) {
      // With the static memory, fewer bytes than 48 KiB may be too many.
      const cudaError_t refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      return refused == cudaSuccess ? Launch(grid, kThreads, kBytes, stream, false).run(kernel, args) : refused;
    };
    cudaError_t failed;
    if constexpr (Format::ResidualRows::kRows == Format::kTokens)
      failed = run(packing::pack_kernel<Format, kThreads>);
    else
      failed = run(packing::pack_blocks_kernel<Format, kThreads>);
    if (failed != cudaSuccess) return failed;
  } else if constexpr (Format::ResidualRows::kRows == Format::kTokens) {
    packing::pack_kernel<Format, kThreads><<<grid, kThreads, 0, stream>>>(args);
  } else {
    packing::pack_blocks_kernel<Format, kThreads><<<grid, kThreads, 0, stream>>>(args);
  }
  if constexpr (Format::ResidualRows::kRows != Format::kTokens && !Format::ResidualRows::kArrival) {
    const int stored = std::min(args.tokens, Format::ResidualRows::kRows);
    const dim3 store_grid = TokenRun<packing::kStoreTokens>::grid(args, ceil_div(stored, packing::kStoreTokens));
    packing::store_rows_kernel<Format><<<store_grid, packing::kStoreThreads, 0, stream>>>(args);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  if (!args.advance) return cudaSuccess;
  // A separate kernel, since all CTAs of the previous ones read the old lengths.
  return launch_advance({args.cache.lengths, args.cache.batch, args.new_lengths, 0, false, args.limit, args.overflow}, stream, false);
}

}  // namespace kvgen
