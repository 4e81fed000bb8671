// Writes tokens that are quantized as they arrive: whole tiles as the packer packs them, and of other tiles the bits of the new tokens
// alone.
#pragma once
#include "kvgen/format/rotate.cuh"
#include "kvgen/host/args.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/pack/quantize.cuh"

namespace kvgen {

// New tokens that go behind the present ones.
struct AppendArgs {
  PackArgs pack;               // without new_lengths, every sequence gets `tokens` tokens
  const int* empty = nullptr;  // of a plan: the number of empty sequences, which get no tokens if there are any; null without a plan
};

// Tokens that go to places which the caller names.
struct WriteArgs {
  uint8_t* packed = nullptr;
  int64_t outer_stride_bytes = 0;  // from one sequence or page to the next
  int64_t head_stride_bytes = 0;
  Rows k, v;  // of one sequence
  const int64_t* slots = nullptr;
  int tokens = 0, kv_heads = 0;
  int blocks = 0;                 // of a sequence or page
  int64_t places = 0;             // tokens that `packed` holds
  const float* scales = nullptr;  // as in AttendArgs
};

namespace packing {

// Tokens that one warp writes, at most: those of a tile of K, and of one or two tiles of V.
template <class Format>
constexpr int kWrittenTokens = Places<Format, Which::key>::kTileTokens;

// Shared memory for these tokens of K or V, rotated.
template <class Format>
using RotatedTokens =
    typename Format::Element[kRotated<typename Format::Key> || kRotated<typename Format::Value> ? kWrittenTokens<Format> * Format::kHeadDim
                                                                                                : 8];

// Writes K or V of tokens [from, to) of a block, by one warp, as `row` gives them. Lanes of other tokens repeat one of these.
template <class Format, Which kWhich, class Row>
__device__ __forceinline__ void write_rows(Row&& row, int from, int to, uint8_t* block, const float* scales) {
  constexpr int kTile = Places<Format, kWhich>::kTileTokens;
  const auto near = [&](int token) { return row(min(max(token, from), to - 1)); };
#pragma unroll 1
  for (int token = from / kTile * kTile; token < to; token += kTile) {
    if (from <= token && token + kTile <= to)
      pack_tile<Format, kWhich>(near, token, block, scales);
    else
      pack_tile<Format, kWhich>(near, token, block, scales, PartOfTile{from, to});
  }
}

// The same of tokens as the caller gives them.
template <class Format, Which kWhich, class Row>
__device__ __forceinline__ void write_operand(Row&& row, int from, int to, uint8_t* block, const float* scales,
                                              RotatedTokens<Format>& rotated) {
  using Quant = typename Places<Format, kWhich>::Quant;
  if constexpr (kRotated<Quant>) {
    const auto staged = [&](int i) { return rotated + i * Format::kHeadDim; };
    __syncwarp();  // the rows of K are written
    copy_rotated<Quant, Format::kHeadDim, 32>(to - from, 0, [&](int i) { return row(from + i); }, staged);
    __syncwarp();
    write_rows<Format, kWhich>([&](int token) -> const typename Format::Element* { return staged(token - from); }, from, to, block, scales);
  } else {
    write_rows<Format, kWhich>(row, from, to, block, scales);
  }
}

// One warp per (head, run of kWrittenTokens positions that has new tokens, sequence).
template <class Format>
__global__ void __launch_bounds__(32) append_kernel(const AppendArgs args) {
  using Element = typename Format::Element;
  constexpr int kMost = kWrittenTokens<Format>;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const PackArgs& pack = args.pack;
  const CacheArgs& cache = pack.cache;
  const auto run = TokenRun<kMost, 1>::of_cta(pack);
  if (run.nth < 0) return;
  const int sequence = run.sequence, nth = run.nth, head = run.head;
  const int length = cache.lengths[sequence], origin = pack.start(sequence) - length;
  int more = pack.new_lengths ? pack.new_lengths[sequence] : pack.tokens;
  if (args.empty && length <= 0 && *args.empty > 0) more = 0;
  if (!pack.fits(sequence, length, more)) {                   // nothing is written
    if (threadIdx.x == 0 && !args.empty) *pack.overflow = 1;  // who made the plan has told it
    return;
  }
  const int first = (length / kMost + nth) * kMost, block = first / Format::kTokens, start = block * Format::kTokens;
  const int from = max(first, length) - start, to = min(first + kMost, length + more) - start;
  if (from >= to) return;
  uint8_t* bytes = cache.block<Format>(sequence, head, block);
  const auto rows = [&](const Rows& given) {
    return [&](int token) -> const Element* { return given.row<const Element>(sequence, origin + start + token, head); };
  };
  const auto scales = StaticScales::of<Format>(pack.scales, cache.kv_heads, head);
  __shared__ __align__(16) RotatedTokens<Format> rotated;
  write_operand<Format, Which::key>(rows(pack.k), from, to, bytes, scales.key, rotated);
  write_operand<Format, Which::value>(rows(pack.v), from, to, bytes, scales.value, rotated);
}

// One warp per (head, token). The first token of a run of neighbouring slots within kWrittenTokens writes them all.
template <class Format>
__global__ void __launch_bounds__(32) write_kernel(const WriteArgs args) {
  using Element = typename Format::Element;
  constexpr int kMost = kWrittenTokens<Format>;
  const int head = blockIdx.x % args.kv_heads, first = blockIdx.x / args.kv_heads, lane = threadIdx.x;
  const int64_t slot = args.slots[first];
  if (slot < 0 || slot >= args.places) return;
  const int inside = static_cast<int>(slot % kMost);
  if (inside > 0 && first > 0 && args.slots[first - 1] == slot - 1) return;
  const bool follows = lane < kMost - inside && first + lane < args.tokens && args.slots[first + lane] == slot + lane;
  const unsigned run = __ballot_sync(~0u, follows);
  const int count = ~run == 0 ? 32 : __ffs(~run) - 1, from = static_cast<int>(slot % Format::kTokens);
  const int64_t block = slot / Format::kTokens;
  uint8_t* bytes = args.packed + block / args.blocks * args.outer_stride_bytes + head * args.head_stride_bytes +
                   block % args.blocks * Format::kBlockBytes;
  const auto rows = [&](const Rows& given) {
    return [&](int token) -> const Element* { return given.row<const Element>(0, first + token - from, head); };
  };
  const auto scales = StaticScales::of<Format>(args.scales, args.kv_heads, head);
  __shared__ __align__(16) RotatedTokens<Format> rotated;
  write_operand<Format, Which::key>(rows(args.k), from, from + count, bytes, scales.key, rotated);
  write_operand<Format, Which::value>(rows(args.v), from, from + count, bytes, scales.value, rotated);
}

}  // namespace packing

// Enqueues the writes of new tokens; lengths stay as they are.
template <class Format>
cudaError_t launch_append(const AppendArgs& args, cudaStream_t stream, bool overlap) {
  constexpr int kMost = packing::kWrittenTokens<Format>;
  const int runs = (args.pack.tokens + 2 * kMost - 2) / kMost;  // wherever the first token lies in its run
  return Launch(TokenRun<kMost, 1>::grid(args.pack, runs), 32, 0, stream, overlap).run(packing::append_kernel<Format>, args);
}

// The writes of a decode step, before its attention.
template <class Format>
cudaError_t launch_append(const AttendArgs& step, cudaStream_t stream, bool overlap) {
  AppendArgs args;
  args.pack.cache = step.cache, args.pack.k = step.k_new, args.pack.v = step.v_new, args.pack.tokens = step.q_len;
  args.pack.limit = step.limit, args.pack.overflow = step.overflow, args.empty = step.plan;
  args.pack.scales = step.scales;
  return launch_append<Format>(args, stream, overlap);
}

template <class Format>
cudaError_t launch_write(const WriteArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  return Launch(dim3(args.kv_heads * args.tokens), 32, 0, stream, false).run(packing::write_kernel<Format>, args);
}

}  // namespace kvgen
