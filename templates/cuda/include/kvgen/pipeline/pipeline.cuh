// The KV tiles of a warp, through its ring.
#pragma once
#include <algorithm>

#include "kvgen/host/args.cuh"
#include "kvgen/mainloop/traits.cuh"
#include "kvgen/pipeline/ring.cuh"
#include "kvgen/ptx.cuh"

namespace kvgen {

// The KV tile iterator of a warp. It gives the addresses of packed tiles, through the block table if the cache is paged.

// Computes the addresses of a head's KV tiles, for one lane.
template <class Traits>
struct TileAddresses {
  static constexpr int kEntries = Traits::kTileBlocks;  // block-table entries per tile
  const uint8_t* start;                                 // the head's blocks; in a paged cache, the head's blocks within page 0
  const int* pages;                                     // the sequence's row of the block table
  int lane, stride;                                     // distance of the warp's tiles
  int first_block = 0;                                  // earlier blocks may have no page, since the sliding window has passed them

  __device__ TileAddresses(int lane_, int stride_) : lane(lane_), stride(stride_) {}
  __device__ __forceinline__ void set_head(const AttendArgs& args, const Head& head) {
    // The lanes of a gathered tile exchange block addresses, so the lane's offset is added later.
    start = args.cache.packed + head.head * args.cache.head_stride_bytes + (Traits::kGathered ? 0 : lane * 16);
    if constexpr (Traits::kPaged)
      pages = args.cache.block_table + static_cast<int64_t>(head.sequence) * args.cache.table_stride;
    else
      start += head.sequence * args.cache.outer_stride_bytes;
    start = ptx::pinned(start);  // otherwise every tile multiplies head and strides again, in 64 bits
  }
  // The block-table entry of the `which`-th block of a tile. `length` is the sequence's.
  __device__ __forceinline__ const int* entry(int tile, int which, int length) const {
    return pages + block_of(tile, which, length) / Traits::Format::kPageBlocks;
  }
  // The address of a tile on a page. Of a gathered tile, each lane gets the address of one block, on its own page.
  __device__ __forceinline__ TileAddress address(const AttendArgs& args, int tile, int page, int length) const {
    int64_t block = block_of(tile, min(lane, kEntries - 1), length);
    const uint8_t* base = start;
    if constexpr (Traits::kPaged) base += page * args.cache.outer_stride_bytes, block %= Traits::Format::kPageBlocks;
    base += WindowPlaces<Traits::Format::kWindowPlaces>::place(block) * Traits::Format::kBlockBytes;
    if constexpr (Traits::kGathered) return {nullptr, nullptr, base, true};
    const int within = tile % Traits::kTilesPerBlock, key_offset = Traits::KeyChannelParams::offset(within);
    TileAddress address{base + Traits::Key::kChannelParams + key_offset,
                        base + Traits::Value::kChannelParams + Traits::ValueChannelParams::offset(within),
                        base + Traits::Format::kHeaderBytes + within * Traits::kTileBytes, true};
    if constexpr (Traits::Format::kBoosted > 0)
      address.index = base + Traits::Format::kBoostIndex + key_offset / Traits::KeyChannelParams::kBytes * Traits::Format::kBoosted;
    return address;
  }

 private:
  // A gathered tile may extend beyond the sequence or before the window. Existing blocks replace the missing ones: masked tokens still
  // enter the MMA with weight 0, so their bytes must decode to finite values (0 x NaN = NaN).
  __device__ __forceinline__ int block_of(int tile, int which, int length) const {
    if constexpr (!Traits::kGathered) return tile / Traits::kTilesPerBlock;
    const int block = min(tile * Traits::kTileBlocks + which, Traits::Format::ResidualRows::packed_blocks(length) - 1);
    return Traits::Mask::kWindow > 0 ? max(block, first_block) : block;
  }
};

// Prefetches a warp's block-table entries. An entry loaded on demand would wait behind a ring's worth of copies. The entries of the first
// tiles are loaded into registers. Each later entry is copied to shared memory when the tile kTilesInFlight + 1 before its own is filled.
template <class Traits>
struct PagePrefetch {
  static constexpr int kEntries = TileAddresses<Traits>::kEntries, kTiles = 2 * Traits::kTilesInFlight;
  static_assert(!Traits::kPaged || (Traits::kTilesInFlight + 1) * kEntries <= 32);
  int* entries;   // [kTiles][kEntries], in shared memory
  int first = 0;  // in lane i * kEntries + j: the j-th entry of the i-th tile
  int round = 0;  // slot of `entries` for the next tile to be filled

  __device__ explicit PagePrefetch(int* entries_) : entries(entries_) {}
  __device__ __forceinline__ void begin(const TileAddresses<Traits>& addresses, int tile, int end, int length) {
    const int at = tile + addresses.lane / kEntries * addresses.stride;
    if (addresses.lane < (Traits::kTilesInFlight + 1) * kEntries && at < end)
      first = *addresses.entry(at, addresses.lane % kEntries, length);
  }
  __device__ __forceinline__ int of_first(int tile, int lane) const {
    return __shfl_sync(~0u, first, tile * kEntries + min(lane, kEntries - 1));
  }
  // Called when a tile is filled: copies the entry of a later one.
  __device__ __forceinline__ void request(const TileAddresses<Traits>& addresses, int tile, int end, int length) {
    const int later = tile + (Traits::kTilesInFlight + 1) * addresses.stride;
    if (addresses.lane < kEntries && later < end)
      ptx::copy_async<4>(ptx::shared_address(entries + round * kEntries + addresses.lane), addresses.entry(later, addresses.lane, length));
  }
  // Called when the oldest tile is released: the page of the tile that replaces it.
  __device__ __forceinline__ int next(int lane) {
    if constexpr (Traits::kCopy != Copy::cp_async) {
      ptx::copy_wait_all();
      __syncwarp();
    }
    const int page = entries[(round + Traits::kTilesInFlight) % kTiles * kEntries + min(lane, kEntries - 1)];
    round = (round + 1) % kTiles;
    return page;
  }
};

// The KV tiles of one warp: every `stride`-th tile of a head, from `tile` to `end`.
template <class Traits>
struct KvTiles {
  const AttendArgs* args;
  TileAddresses<Traits> addresses;
  PagePrefetch<Traits> pages;
  int tile = 0, end = 0, length = 0;

  // `words`: the warp's array for block-table entries.
  __device__ KvTiles(const AttendArgs& args_, const Head& head, int stride, int* words, int lane)
      : args(&args_), addresses(lane, stride), pages(words) {
    addresses.set_head(*args, head);
  }
  // Sets the first tile before the length is known. The cache's capacity bounds it.
  __device__ __forceinline__ void begin_early(int first) {
    static_assert(!Traits::kGathered);
    tile = first;
    if constexpr (Traits::kPaged) pages.begin(addresses, tile, allocated_tiles(), 0);
  }
  __device__ __forceinline__ void limit(int end_, int length_) { end = end_, length = length_; }
  __device__ __forceinline__ void begin(int first, int end_, int length_, int first_block) {
    tile = first, addresses.first_block = first_block;
    limit(end_, length_);
    if constexpr (Traits::kPaged) pages.begin(addresses, tile, end, length);
  }
  // The first tile, if the cache's capacity includes it; the sequence may be shorter. For contiguous caches.
  __device__ __forceinline__ TileAddress first_allocated() const {
    return tile < allocated_tiles() ? addresses.address(*args, tile, 0, 0) : TileAddress{};
  }
  // The `number`-th of the tiles that fill the ring first.
  __device__ __forceinline__ TileAddress initial(int number) const {
    int page = 0;
    if constexpr (Traits::kPaged) page = pages.of_first(number, addresses.lane);
    return at(page);
  }
  __device__ __forceinline__ void step() { tile += addresses.stride; }
  // After `step`: the tile that replaces the oldest one.
  __device__ __forceinline__ TileAddress next() {
    int page = 0;
    if constexpr (Traits::kPaged) page = pages.next(addresses.lane);
    return at(page);
  }
  // Copies the block-table entry of a later tile, when the first stage of this one is filled.
  __device__ __forceinline__ void prefetch_page() {
    if constexpr (Traits::kPaged) pages.request(addresses, tile, end, length);
  }

 private:
  __device__ int allocated_tiles() const { return args->cache.blocks * Traits::kTilesPerBlock; }
  __device__ __forceinline__ TileAddress at(int page) const {
    return tile < end ? addresses.address(*args, tile, page, length) : TileAddress{};
  }
};

template <class Traits>
struct Pipeline {
  Ring<Traits> ring;
  KvTiles<Traits> tiles;
  TileAddress upcoming;
  int slot = 0;    // slot of the oldest tile
  int issued = 0;  // stages of the first tile whose copies are already issued

  __device__ Pipeline(uint32_t rings, const KvTiles<Traits>& tiles_, int warp, int lane) : ring(rings, warp, lane), tiles(tiles_) {}
  // Issues the first stage before the sequence length is known.
  __device__ __forceinline__ void fill_early() {
    ring.fill(0, 0, tiles.first_allocated());
    issued = 1;
  }
  // Starts with the tiles of an iterator, and issues the first stage.
  __device__ __forceinline__ void begin(const KvTiles<Traits>& tiles_) {
    tiles = tiles_, slot = 0, issued = 1;
    tiles.prefetch_page();
    ring.fill(0, 0, tiles.initial(0));
  }
  // Fills the ring.
  __device__ __forceinline__ void fill() {
    upcoming = tiles.initial(0);
    // The loops are not unrolled: a CTA runs this code once, and fetching more instructions costs more than the loop does.
#pragma unroll 1
    for (int i = 0; i < Traits::kTilesInFlight; ++i) {
      if (i || !issued) tiles.prefetch_page();
#pragma unroll 1
      for (int stage = i ? 0 : issued; stage < Traits::kTileStages; ++stage) ring.fill(i, stage, upcoming);
      tiles.step();
      if constexpr (Traits::kPaged) tiles.pages.round = (i + 1) % PagePrefetch<Traits>::kTiles;
      upcoming = tiles.initial(i + 1);
    }
  }
  // Waits for the `sub`-th sub-tile of the oldest tile.
  __device__ __forceinline__ void wait(int sub) {
    if (sub % Traits::kStageSubtiles == 0) ring.wait(slot, sub / Traits::kStageSubtiles);
  }
  // Called when the warp has read the `sub`-th sub-tile of the oldest tile: refills its stage after the stage's last sub-tile.
  __device__ __forceinline__ void release(int sub) {
    if ((sub + 1) % Traits::kStageSubtiles != 0) return;
    const int stage = sub / Traits::kStageSubtiles;
    ring.release(stage);
    if (stage == 0) tiles.prefetch_page();
    ring.fill(slot, stage, upcoming);
  }
  // Advances to the next tile, after all stages of the oldest one are released.
  __device__ __forceinline__ void step() {
    tiles.step();
    upcoming = tiles.next();
    if (Traits::kTilesInFlight == 1 || ++slot == Traits::kTilesInFlight) slot = 0, ring.next_round();
  }
};

// L2 prefetches that a launch issues before griddepcontrol.wait: the first packed bytes of its warps, and residuals. Earlier launches may
// still write there. That is harmless, because a prefetch returns no values and L2 is coherent with all writers.

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
    if (ResidualRows::kArrival || lane >= 2 * kSpans) return;
    const RowSpan span = span_of(lane / 2, ptx::load_relaxed(args.cache.lengths + head.sequence));
    const int* slots = args.cache.residual_slots;
    const int slot = slots ? ptx::load_relaxed(slots + head.sequence) : head.sequence;  // stale, too
    if (slots && static_cast<unsigned>(slot) >= static_cast<unsigned>(args.cache.slots)) return;
    const int64_t at = args.cache.offset_of_slot<Format>(slot, head.head);
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
