// Decode attention over a packed cache: each warp streams its own units, each CTA an equal share of all heads, one launch.
#pragma once
#include <algorithm>
#include <climits>
#include <type_traits>

#include "kvgen/merge.cuh"
#include "kvgen/plan.cuh"
#include "kvgen/quantize.cuh"
#include "kvgen/ring.cuh"
#include "kvgen/subtile.cuh"
#include "kvgen/tail.cuh"

namespace kvgen {

// A CTA's shared memory by name; what there is for every head of a group, for its `at`-th.
template <class Traits>
struct Shared {
  uint8_t* memory;
  uint8_t* fragments;  // of q
  float* factors;      // per column: from products to log2 units
  float* query_sums;   // per K group and column: sum of q
  float* merge;
  Total* warp_totals;
  int* lengths;
  int* flags;

  __device__ explicit Shared(uint8_t* memory_, int at = 0) : memory(memory_) {
    fragments = memory + Traits::kQuery + at * Traits::kQueryBytes;
    factors = reinterpret_cast<float*>(memory + Traits::kSmall) + at * Traits::kSmallFloats;
    query_sums = factors + Traits::kColumnTiles * 8;
    warp_totals = reinterpret_cast<Total*>(query_sums + Traits::kColumnTiles * 8 * Traits::kKeyGroups);
    flags = reinterpret_cast<int*>(memory + Traits::kSmall) + Traits::kHeads * Traits::kSmallFloats;
    merge = reinterpret_cast<float*>(memory + Traits::kMerge + at * Traits::kMergeBytes);
    lengths = reinterpret_cast<int*>(memory + Traits::kLengths);
  }
  __device__ Shared of(int at) const { return Shared(memory, at); }
  __device__ Book<Traits>& book(int warp) const {
    static_assert(sizeof(Book<Traits>) <= Traits::kBookBytes);
    return *reinterpret_cast<Book<Traits>*>(memory + Traits::kBooks + warp * Traits::kBookBytes);
  }
  __device__ uint32_t ring() const { return ptx::shared_address(memory); }
  __device__ uint32_t query() const { return ptx::shared_address(fragments); }
};

// What a unit's scores need besides its codes.
template <class Traits>
struct UnitQuery {
  QueryFragments<Traits> fragments[Traits::kColumnTiles];
  float affine[Traits::kColumnTiles][2];  // of q * zero, in log2 units (K per channel)
};

template <class Traits>
__device__ __forceinline__ void prepare_query(const Shared<Traits>& shared, uint32_t params, int lane, UnitQuery<Traits>& query) {
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    if constexpr (Traits::kKeyPerChannel) {
      query.fragments[tile].load_scaled(shared.query(), params, tile, lane, query.affine[tile]);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        query.affine[tile][c] *= (Traits::Key::kZero ? 1.f : -1.f * Traits::Key::kOffset) * shared.factors[tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + c];
    } else {
      query.fragments[tile].load(shared.query(), tile, lane);
    }
  }
}

// Products and offsets where K has scales per token: [group] of products, joined by their scales.
template <class Traits>
__device__ __forceinline__ void scale_by_token(const Shared<Traits>& shared, const Products<Traits>& products, uint32_t params, int tile, int lane, Scores<Traits>& x) {
  float scale[Traits::kParts][Traits::kKeyGroups][2], zero[Traits::kParts][Traits::kKeyGroups][2];
  load_row_params<Traits, typename Traits::Key, Traits::kKeyGroups>(params, lane, scale, zero);
#pragma unroll
  for (int q = 0; q < Traits::kKeyGroups; ++q) {
    Rows16<Traits> own;
    own_products<Traits>(products[q][0], products[q][1], lane, own);
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + i % 2;
        const float sum = shared.query_sums[q * Traits::kColumnTiles * 8 + column] * shared.factors[column];
        x.product[part][i] = fmaf(own[part][i], scale[part][q][i / 2], q ? x.product[part][i] : 0.f);
        x.offset[part][i] = fmaf(zero[part][q][i / 2], sum, q ? x.offset[part][i] : 0.f);
      }
  }
}

// From products to scores in log2 units, of one column tile, for the sub-tiles from `subtile` on.
template <class Traits, int kSpan>
__device__ __forceinline__ void to_scores(const Shared<Traits>& shared, const Products<Traits> (&products)[kSpan][Traits::kColumnTiles], const UnitQuery<Traits>& query,
                                          const Rows16<Traits>& factors, uint32_t subtile, int tile, int lane, Scores<Traits> (&x)[kSpan]) {
  if constexpr (Traits::kResidualHalves) own_sums<Traits>(subtile + Traits::Format::kKeyCodes, products, lane, x);
#pragma unroll
  for (int s = 0; s < kSpan; ++s) {
    if constexpr (Traits::kKeyPerToken)
      scale_by_token<Traits>(shared, products[s][tile], subtile + s * Traits::kTileBytes + Traits::Format::kKeyTokenParams, tile, lane, x[s]);
    else if constexpr (!Traits::kResidualHalves)
      own_products<Traits>(products[s][tile][0][0], products[s][tile][0][1], lane, x[s].product);
#pragma unroll
    for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[s].factor[part][i] = factors[part][i];
        if constexpr (!Traits::kKeyPerToken) x[s].offset[part][i] = Traits::kKeyPerChannel ? query.affine[tile][i % 2] : 0.f;
      }
  }
}

// Scores of tokens that a query may not see become minus infinity. `first` is the sub-tile's position, `length` the sequence's.
template <class Traits>
__device__ __forceinline__ void mask_future(int first, int length, int q_len, int tile, int lane, Scores<Traits>& x) {
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = tile * 8 + 2 * (Traits::kHalves ? lane % 2 : lane % 4) + i % 2;
      if (first + first_row<Traits>(part, lane) + i / 2 * 8 > length - q_len + column / Traits::kGroup) x.offset[part][i] = -INFINITY;
    }
}

// The same of blocks that are not there: only positions below `kept` are packed.
template <class Traits>
__device__ __forceinline__ void mask_missing(int first, int kept, int lane, Scores<Traits>& x) {
#pragma unroll
  for (int part = 0; part < Traits::kParts; ++part)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + first_row<Traits>(part, lane) + i / 2 * 8 >= kept) x.offset[part][i] = -INFINITY;
}

// kSpan sub-tiles from `subtile` on, the first at `position`. `before(s)` waits for sub-tile s, `after(s)` has seen it for the last time.
template <class Traits, int kSpan = Traits::kSpan, class Before, class After>
__device__ __forceinline__ void attend_span(const Shared<Traits>& shared, uint32_t subtile, const UnitQuery<Traits>& query, const Rows16<Traits> (&factors)[Traits::kColumnTiles],
                                            int position, int length, int q_len, int kept, int lane, State<Traits> (&state)[Traits::kColumnTiles], Before&& before, After&& after) {
  using Format = typename Traits::Format;
  Products<Traits> products[kSpan][Traits::kColumnTiles];
  ValueParams<Traits> params[kSpan];
#pragma unroll
  for (int s = 0; s < kSpan; ++s) {
    before(s);
    multiply_keys<Traits>(subtile + s * Traits::kTileBytes + Format::kKeyCodes, lane, query.fragments, products[s]);
    load_value_params<Traits>(subtile + s * Traits::kTileBytes + Format::kValueTokenParams, lane, params[s]);
  }
  Weights<Traits> weights[Traits::kColumnTiles][kSpan];
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    Scores<Traits> x[kSpan];
    to_scores<Traits>(shared, products, query, factors[tile], subtile, tile, lane, x);
#pragma unroll
    for (int s = 0; s < kSpan; ++s) {
      const int first = position + s * 32;
      if (Traits::kQueries > 1 && first + 31 > length - q_len) mask_future<Traits>(first, length, q_len, tile, lane, x[s]);
      if (Traits::kGathered && first + 32 > kept) mask_missing<Traits>(first, kept, lane, x[s]);
    }
    softmax_step<Traits>(x, params, state[tile], weights[tile]);
  }
#pragma unroll
  for (int s = 0; s < kSpan; ++s) {
    multiply_values<Traits>(subtile + s * Traits::kTileBytes + Format::kValueCodes, lane, weights, s, state);
    after(s);
  }
}

// A warp's way through the units of its CTA: what it works on, what its ring fetches next.
template <class Traits>
struct Walk {
  Ring<Traits> ring;
  Cursor<Traits> cursor;
  Unit upcoming;
  int depth = 0;

  __device__ Walk(const AttendArgs& args, const Shared<Traits>& shared, const Lengths<Traits>& lengths, const Plan<Traits>& plan, Book<Traits>& book, int warp,
                  int lane)
      : ring(shared.ring(), warp, lane), cursor(args, lengths, plan, book, warp, lane), upcoming(cursor.here(args, lengths)) {
#pragma unroll 1
    for (int slot = 0; slot < Traits::kDepth; ++slot) {  // rolled: code that runs once costs more to fetch than to run
#pragma unroll 1
      for (int stage = 0; stage < Traits::kUnitStages; ++stage) fill(args, lengths, slot, stage);
      upcoming = cursor.next(args, lengths);
    }
  }
  __device__ __forceinline__ void fill(const AttendArgs& args, const Lengths<Traits>& lengths, int slot, int stage) {
    const Head& ahead = cursor.book.ahead;
    ring.fill(slot, stage, upcoming, [&] { return Tail<Traits>(args, ahead.batch, ahead.head, lengths.before[ahead.batch]); });
  }
  // A stage of the oldest slot is done with and refilled.
  __device__ __forceinline__ void release(const AttendArgs& args, const Lengths<Traits>& lengths, int stage) {
    ring.release(stage);
    fill(args, lengths, depth, stage);
  }
  // The oldest slot is done with.
  __device__ __forceinline__ void step(const AttendArgs& args, const Lengths<Traits>& lengths) {
    upcoming = cursor.next(args, lengths);
    if (Traits::kDepth == 1 || ++depth == Traits::kDepth) depth = 0, ring.next_round();
  }
};

// This warp's units of one head, every kWarps-th from `unit` to `end`: packed ones, then pieces of the tail. Gives the first
// unit that is not the head's.
template <class Traits>
__device__ __forceinline__ int attend_head(const AttendArgs& args, const Shared<Traits>& shared, const Lengths<Traits>& lengths, const Head& head, int unit, int end,
                                           int lane, Walk<Traits>& walk, State<Traits> (&state)[Traits::kColumnTiles]) {
  const int length = Traits::kQueries > 1 ? lengths.before[head.batch] + lengths.fresh : 0;
  Rows16<Traits> factors[Traits::kColumnTiles];
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) row_factors<Traits>(shared.factors, tile, lane, factors[tile]), state[tile].clear();
  lane = ptx::pinned(lane);
  __builtin_assume(lane >= 0 && lane < 32);
  UnitQuery<Traits> query;
  if constexpr (!Traits::kKeyPerChannel) prepare_query<Traits>(shared, 0, lane, query);
  const int kept = Traits::kGathered ? lengths.before[head.batch] / Traits::Format::kTokens * Traits::Format::kTokens : 0;
  for (const int stop = min(end, head.packed); unit < stop; unit += Traits::kWarps) {
    const uint32_t slot = walk.ring.slot(walk.depth);
#pragma unroll
    for (int sub = 0; sub < Traits::kUnit; sub += Traits::kSpan) {
      const auto before = [&](int s) {
        if ((sub + s) % Traits::kStageSubtiles == 0) walk.ring.wait(walk.depth, (sub + s) / Traits::kStageSubtiles);
        if (Traits::kKeyPerChannel && sub + s == 0) prepare_query<Traits>(shared, slot, lane, query);
      };
      const auto after = [&](int s) {
        if ((sub + s + 1) % Traits::kStageSubtiles == 0) walk.release(args, lengths, (sub + s) / Traits::kStageSubtiles);
      };
      const int position = unit * Traits::kUnitTokens + sub * 32;
      attend_span<Traits>(shared, slot + Traits::kUnitParams + sub * Traits::kTileBytes, query, factors, position, length, args.q_len, kept, lane, state, before,
                          after);
    }
    walk.step(args, lengths);
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) unmix_values<Traits>(state[tile]);
#pragma unroll 1
  for (; unit < end; unit += Traits::kWarps) {
    const int first = (unit - head.packed) * Traits::kPieceTokens, count = lengths.before[head.batch] % Traits::Format::kTokens + lengths.fresh;
    const TailRows<Traits> rows{walk.ring.slot(walk.depth), min(count - first, Traits::kPieceTokens)};
    walk.ring.wait_piece(walk.depth);
    attend_piece<Traits>(rows, first, count, args.q_len, shared.query(), shared.factors, lane, state);
    if (lengths.fresh && count < Traits::Format::kTokens) append_piece(args, rows, head.batch, head.head, first, count - lengths.fresh, lane);
#pragma unroll 1
    for (int stage = 0; stage < Traits::kUnitStages; ++stage) {
      walk.ring.wait(walk.depth, stage);
      walk.release(args, lengths, stage);
    }
    walk.step(args, lengths);
  }
  return unit;
}

// The warps' parts of a column tile of a head: merged, and written, as output if this CTA has all of the head.
template <class Traits>
__device__ __forceinline__ void hand_on(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Head& head, const Parts& parts, bool whole,
                                        int tile) {
  Merged<Traits> merged;
  merge_warps<Traits>(shared.merge, shared.warp_totals, merged);
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) {
    combine_cluster<Traits>(args, head, tile, merged, shared.memory + Traits::kInbox);
    return;
  }
#endif
  Merged<Traits>::each([&](int i, int column, int channel) {
    const int at = tile * 8 + column;
    if (at >= Traits::kColumns) return;
    if (whole) {
      write_output<Traits>(args, head, at, channel, merged.value[i], merged.total[i]);
    } else {
      __stcg(work.sum(parts.own_slot, at) + channel, merged.value[i]);
      if (channel == 0) __stcg(reinterpret_cast<float2*>(work.total(0, parts.own_slot, at)), make_float2(merged.total[i].reference, merged.total[i].sum));
    }
  });
}

// The heads of a group are done; the last one's parts may still be in the warps' states. Gives the heads that are complete, as bits.
template <class Traits>
__device__ __forceinline__ int finish_group(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Book<Traits>& book, int warp, int lane,
                                            State<Traits> (&state)[Traits::kColumnTiles]) {
  const Group<Traits>& group = book.group;
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    if (Traits::kHeads == 1) publish_state<Traits>(state[tile], shared.merge, shared.warp_totals, warp, lane);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < (Traits::kHeads == 1 ? 1 : group.count); ++i) hand_on<Traits>(args, shared.of(i), work, group.heads[i], group.parts[i], book.plan.covers(group.heads[i]), tile);
    if (tile + 1 < Traits::kColumnTiles) __syncthreads();
  }
  if constexpr (Traits::kCombine == Combine::cluster) return blockIdx.x == 0;
  return Combination<Traits>{args, work, shared.flags}.run(group, book.plan);
}

// Heads that this CTA completed and whose residual became a whole block, as a list in the workspace: they are packed when the
// rings are no longer in use.
template <class Traits>
struct Flushes {
  int last = -1;  // batch * heads + head

  __device__ void add(const Workspace<Traits>& work, const Lengths<Traits>& lengths, const Head& head) {
    if (lengths.before[head.batch] % Traits::Format::kTokens + lengths.fresh < Traits::Format::kTokens) return;
    const int number = head.batch * lengths.heads + head.head;
    if (threadIdx.x == 0) __stcg(work.links + number, last);
    last = number;
  }
  // Where a block is packed: in the rings' and the merge's place, or, where that is too small, behind all else.
  static constexpr int kScratchBytes = pack_smem_bytes<typename Traits::Format>();
  static constexpr int kScratch = kScratchBytes <= Traits::kLengths ? 0 : Traits::kSharedBytes;

  // Packs the blocks; what is left over of the new tokens moves to the front of the residual.
  __device__ void run(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Lengths<Traits>& lengths) {
    using Format = typename Traits::Format;
    while (last >= 0) {
      const int batch = last / lengths.heads, head = last % lengths.heads, length = lengths.before[batch];
      const Tail<Traits> tail(args, batch, head, length);
      uint8_t* block = args.cache.block<Traits::kPaged>(batch, head, length / Format::kTokens, Format::kBlockBytes);
      __syncthreads();
      pack_block<Format, Traits::kThreads>([&](int token) { return tail.k_row(token); }, [&](int token) { return tail.v_row(token); }, block, shared.memory + kScratch);
      tail.store(Format::kTokens, tail.count(), 0);
      last = __ldcg(work.links + last);
    }
  }
};

template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm) attend_kernel(const AttendArgs args, const Grid grid) {
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr bool kTogether = Traits::kCombine == Combine::cluster;  // a cluster's CTAs all go through their one head, even with nothing to do
  const Shared<Traits> shared(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Lengths<Traits> lengths{shared.lengths, args.cache.batch, args.cache.kv_heads, kAppend ? args.q_len : 0};
  const Workspace<Traits> work(args.workspace, lengths.batch * lengths.heads, grid.ctas);
  for (int i = threadIdx.x; i < lengths.batch; i += Traits::kThreads) ptx::copy_async4(ptx::shared_address(shared.lengths + i), args.cache.lengths + i);
#if KVGEN_SM90
  if constexpr (kTogether) ptx::cluster_arrive();
#endif
  QueryLoader<Traits> loader;  // q is asked for before it is known which: most often it is this one
  const Head likely = Plan<Traits>::likely(lengths, grid, warp / Traits::kColumnTiles);
  loader.fetch(args, likely, warp, lane);
  ptx::copy_wait_all();
  __syncthreads();
  const Plan<Traits> drawn(lengths, grid, lane);
  int readers = 0;  // asked for here, looked at in the end: the trip to the counter costs nobody time
  if (kAppend && threadIdx.x == 0) readers = atomicAdd(work.lengths_read, 1);
  Book<Traits>& book = shared.book(warp);
  write_down(book.plan, drawn, lane);
  Walk<Traits> walk(args, shared, lengths, drawn, book, warp, lane);
  write_down(book.group, Group<Traits>(drawn, lengths, drawn.first), lane);
  if (const Head* mine = loader.mine(book.group, warp); mine && (mine->batch != likely.batch || mine->head != likely.head)) loader.fetch(args, *mine, warp, lane);
  loader.publish(args, shared, book.group, warp, lane);
  const Plan<Traits>& plan = book.plan;
  Flushes<Traits> flushes;
  for (int skip = warp; !plan.idle() || kTogether;) {
    __syncthreads();
    State<Traits> state[Traits::kColumnTiles];
    const auto attend = [&](int i) {
      const Head head = book.group.heads[i];
      const Segment segment = plan.segment(head);
      skip = attend_head<Traits>(args, shared.of(i), lengths, head, segment.begin + skip, segment.end, lane, walk, state) - segment.end;
    };
    if constexpr (Traits::kHeads == 1) {
      attend(0);
    } else {
#pragma unroll 1
      for (int i = 0; i < book.group.count; ++i) {
        attend(i);
        publish_state<Traits>(state[0], shared.of(i).merge, shared.of(i).warp_totals, warp, lane);
      }
    }
    const bool last = book.group.last;
    if (!last) {
      write_down(book.next, Group<Traits>(plan, lengths, book.group.next), lane);
      if (const Head* mine = loader.mine(book.next, warp)) loader.fetch(args, *mine, warp, lane);  // arrives while this group is merged
    }
    const int completed = finish_group<Traits>(args, shared, work, book, warp, lane, state);
    if constexpr (kAppend)
      for (int i = 0; i < book.group.count; ++i)
        if (completed >> i & 1) flushes.add(work, lengths, book.group.heads[i]);
    if (last) break;
    write_down(book.group, book.next, lane);
    loader.publish(args, shared, book.group, warp, lane);
  }

  if constexpr (kAppend) {
    flushes.run(args, shared, work, lengths);
    // The last CTA to have read the lengths writes the new ones: nobody reads them any more.
    if (threadIdx.x == 0 && readers == grid.ctas - 1) {
      *work.lengths_read = 0;
      for (int i = 0; i < lengths.batch; ++i) args.cache.lengths[i] = shared.lengths[i] + args.q_len;
    }
  }
}

// The host's side of a variant.
template <class Format, class Schedule>
struct Attend {
  using Variant = Traits<Format, Schedule>;
  static constexpr int kSharedBytes = Variant::kSharedBytes + (Flushes<Variant>::kScratch ? Flushes<Variant>::kScratchBytes : 0);

  // CTAs that run at once on the current device.
  static int most_ctas() {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return processors * Schedule::kCtasPerSm;
  }

  // The CTAs for a batch: ranges cut per head where that fills the chip, else equal shares for as many CTAs as there may be.
  static Grid grid(int batch, int kv_heads, int max_len) {
    const int heads = batch * kv_heads, most = most_ctas();
    if (Schedule::kCombine == Combine::cluster) return {heads * Schedule::kCluster, Schedule::kCluster, true};
    const int64_t units = std::max(1, Variant::packed_units(max_len));
    const int splits = heads <= most ? static_cast<int>(std::min<int64_t>(most / heads, units)) : 0;
    int whole = most;  // CTAs of whole heads each, where there are more heads than CTAs
    while (heads > most && heads % whole != 0) --whole;
    const int flat = static_cast<int>(std::min<int64_t>(most, units * heads)), aligned = splits > 0 ? splits * heads : whole;
    if (Schedule::kSplit == Split::flat || aligned < flat * 0.93f) return {flat, 0, false};
    return {aligned, splits, splits > 0 && batch == 1};
  }

  static int64_t workspace_bytes(int batch, int kv_heads, int max_len, int) {
    return Workspace<Variant>::bytes(batch * kv_heads, std::max(grid(batch, kv_heads, max_len).ctas, most_ctas()));
  }

  template <bool kAppend>
  static cudaError_t launch_kernel(const AttendArgs& args, cudaStream_t stream) {
    const auto kernel = attend_kernel<Variant, kAppend>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    Grid grid_ = grid(args.cache.batch, args.cache.kv_heads, args.max_len);
    grid_.by_ctas = Divisor(grid_.ctas), grid_.by_heads = Divisor(args.cache.kv_heads);
    cudaLaunchConfig_t config = {};
    config.gridDim = grid_.splits ? dim3(grid_.splits, args.cache.kv_heads, args.cache.batch) : dim3(grid_.ctas), config.blockDim = dim3(Variant::kThreads);
    config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = Schedule::kCluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute, config.numAttrs = Schedule::kCombine == Combine::cluster ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args, grid_);
  }

  // Enqueues one attend (or, with `append`, decode) step. The caller has checked shapes; batch is at most kMaxBatch.
  static cudaError_t launch(const AttendArgs& args, bool append, cudaStream_t stream) {
    return append ? launch_kernel<true>(args, stream) : launch_kernel<false>(args, stream);
  }
};

}  // namespace kvgen
