// Appends tokens to a cache: packs every block that becomes full, leaves the rest in the residual, then counts the new lengths.
#pragma once
#include "kvgen/args.cuh"
#include "kvgen/quantize.cuh"

namespace kvgen {
namespace packing {

// Warps of a packing CTA: one for every tile of 16 tokens, at most eight.
template <class Format>
constexpr int pack_threads() {
  return Format::kTokens >= 128 ? 256 : Format::kTokens * 2;
}

// Copies rows [begin, end) of positions to their residual slots.
template <class Format, int kThreads, class Row>
__device__ void fill_residual(Row&& row, void* residual, int begin, int end) {
  using Element = typename Format::Element;
  constexpr int kPieces = Format::kHeadDim / 8;
  for (int i = threadIdx.x; i < (end - begin) * kPieces; i += kThreads) {
    const int position = begin + i / kPieces, channel = i % kPieces * 8;
    Element* slot = static_cast<Element*>(residual) + position % Format::kTokens * Format::kHeadDim + channel;
    *reinterpret_cast<uint4*>(slot) = load16<Element>(row(position) + channel);
  }
}

// A CTA per (head, block that may become full, sequence). The first of a sequence also writes the residual: it alone reads the
// old one.
template <class Format, bool kPaged, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) pack_kernel(const PackArgs args) {
  using Element = typename Format::Element;
  constexpr int kTokens = Format::kTokens;
  __shared__ __align__(16) uint8_t smem[pack_smem_bytes<Format>()];
  const CacheArgs& cache = args.cache;
  const int sequence = blockIdx.y, head = blockIdx.x % cache.kv_heads, nth = blockIdx.x / cache.kv_heads;
  const int length = cache.lengths[sequence], end = length + args.new_lengths[sequence];
  const int block = length / kTokens + nth, full = end / kTokens;
  if (block >= full && nth > 0) return;

  const int64_t slots = (static_cast<int64_t>(sequence) * cache.kv_heads + head) * kTokens * Format::kHeadDim;
  Element* k_residual = static_cast<Element*>(cache.k_residual) + slots;
  Element* v_residual = static_cast<Element*>(cache.v_residual) + slots;
  const auto row = [&](const Rows& fresh, const Element* residual, int position) -> const Element* {
    return position < length ? residual + position % kTokens * Format::kHeadDim : fresh.row<Element>(sequence, position - length, head);
  };
  const auto k_row = [&](int position) { return row(args.k, k_residual, position); };
  const auto v_row = [&](int position) { return row(args.v, v_residual, position); };
  if (block < full) {
    const int start = block * kTokens;
    uint8_t* packed = cache.block<kPaged>(sequence, head, block, Format::kBlockBytes);
    pack_block<Format, kThreads>([&](int token) { return k_row(start + token); }, [&](int token) { return v_row(start + token); }, packed, smem);
  }
  if (nth == 0) {
    const int begin = max(length, full * kTokens);
    fill_residual<Format, kThreads>(k_row, k_residual, begin, end);
    fill_residual<Format, kThreads>(v_row, v_residual, begin, end);
  }
}

// A kernel of its own: every CTA of the one before has read the old lengths.
static __global__ void advance_lengths(int* lengths, const int* new_lengths, int batch) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < batch) lengths[i] += new_lengths[i];
}

}  // namespace packing

template <class Format, bool kPaged>
cudaError_t launch_pack(const PackArgs& args, cudaStream_t stream) {
  if (args.cache.batch == 0 || args.cache.kv_heads == 0 || args.tokens == 0) return cudaSuccess;
  constexpr int kThreads = packing::pack_threads<Format>();
  const dim3 grid(args.cache.kv_heads * ceil_div(args.tokens, Format::kTokens), args.cache.batch);
  packing::pack_kernel<Format, kPaged, kThreads><<<grid, kThreads, 0, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  packing::advance_lengths<<<ceil_div(args.cache.batch, 128), 128, 0, stream>>>(args.cache.lengths, args.new_lengths, args.cache.batch);
  return cudaGetLastError();
}

}  // namespace kvgen
