// L2 prefetches that a launch issues before griddepcontrol.wait: the first packed bytes of its warps, and residuals. Earlier launches may
// still write there. That is harmless, because a prefetch returns no values and L2 is coherent with all writers.
#pragma once
#include <algorithm>

#include "kvgen/host/args.cuh"
#include "kvgen/mainloop/traits.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

template <class Traits>
struct L2Prefetch {
  using Format = typename Traits::Format;
  using ResidualRows = typename Format::ResidualRows;
  // Packed bytes per SM. Twice as many gain nothing, since an SM does not read from L2 faster than it computes, and they delay the previous
  // launch.
  static constexpr int kSmBytes = 32 * 1024;
  static constexpr int kWarpLimit = kSmBytes / (Traits::kCtasPerSm * Traits::kWarps) / 128 * 128;
  static constexpr int kWarpBytes =
      std::min(kWarpLimit, align_up(Traits::kSlotBytes, 128));  // the bytes after them belong to another warp's tile
  static constexpr int kPageBytes = Format::kPageBlocks * Format::kBlockBytes;

  // Prefetches a warp's first tile. If it is the first of its block, the block's header is included.
  __device__ __forceinline__ static void prefetch_tiles(const AttendArgs& args, const Head& head, int tile, int lane) {
#if KVGEN_SM90
    const int within = tile % Traits::kTilesPerBlock, block = tile / Traits::kTilesPerBlock * (Traits::kGathered ? Traits::kTileBlocks : 1);
    const int skipped = within ? Format::kHeaderBytes + within * Traits::kTileBytes : 0;
    const CacheArgs& cache = args.cache;
    const int64_t begin = WindowPlaces<Format::kWindowPlaces>::place(block) * Format::kBlockBytes + skipped;
    const int64_t end =
        min(begin + kWarpBytes, static_cast<int64_t>(min(cache.blocks, ResidualRows::packed_blocks(args.max_len))) * Format::kBlockBytes);
    const uint8_t* from = cache.packed + head.head * cache.head_stride_bytes;
    if constexpr (Traits::kPaged) {
      const int at = static_cast<int>(begin / kPageBytes) + lane;  // each lane has one page
      const int64_t start = static_cast<int64_t>(at) * kPageBytes, first = max(begin, start), last = min(end, start + kPageBytes);
      if (first >= last) return;
      const int page = ptx::load_relaxed(cache.block_table + static_cast<int64_t>(head.sequence) * cache.table_stride + at);
      if (static_cast<unsigned>(page) < static_cast<unsigned>(cache.pages))
        ptx::prefetch_bulk(from + page * cache.outer_stride_bytes + (first - start), static_cast<int>(last - first));
    } else if (lane == 0 && begin < end) {
      ptx::prefetch_bulk(from + head.sequence * cache.outer_stride_bytes + begin, static_cast<int>(end - begin));
    }
#endif
  }

  // Prefetches a head's residual, whose length may be stale. Only launches of one wave do so: with several waves, the residuals of all
  // heads together would delay the first wave's packed bytes.
  __device__ __forceinline__ static void prefetch_residual(const AttendArgs& args, const Head& head, int lane) {
#if KVGEN_SM90
    if (lane >= 2 * kSpans) return;
    const RowSpan span = span_of(lane / 2, ptx::load_relaxed(args.cache.lengths + head.sequence));
    const int64_t at = args.cache.residual_offset<Format>(head.sequence, head.head);
    const auto* from = static_cast<const typename Format::Element*>(lane % 2 ? args.cache.v_residual : args.cache.k_residual) + at;
    if (span.rows > 0)
      ptx::prefetch_bulk(from + span.first * Format::kHeadDim, static_cast<int>(span.rows * Format::kHeadDim * sizeof *from));
#endif
  }

 private:
  // Consecutive rows of a residual.
  struct RowSpan {
    int first, rows;
  };
  // The spans of a residual: the rows from the oldest token to the last row, the sink, and the rows after the sink, which take
  // the tokens that follow those of the last row.
  static constexpr int kSpans = ResidualRows::kCapacity > ResidualRows::kBlock ? 3 : ResidualRows::kSink > 0 ? 2 : 1;

  // The rows of a span, none or negative if a stale length has none there. The rows lie within the residual whatever the length is.
  __device__ __forceinline__ static RowSpan span_of(int which, int length) {
    if constexpr (kSpans == 1) {
      return {0, static_cast<int>(static_cast<unsigned>(length) % Format::kTokens)};
    } else {
      const int first = ResidualRows::row_of(length, 0), end = first + ResidualRows::count(length);
      if (which == 0) return {first, min(end, ResidualRows::kRows) - first};
      if (which == 1) return {0, min(length, ResidualRows::kSink)};
      return {ResidualRows::kSink, min(end, ResidualRows::kRows + ResidualRows::kCapacity) - ResidualRows::kRows};
    }
  }
};

}  // namespace kvgen
