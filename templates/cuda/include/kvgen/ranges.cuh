// Ranges: the runs of all heads are laid end to end, and each CTA streams an equal part of them, whatever their lengths.
#pragma once
#include "kvgen/finish.cuh"
#include "kvgen/walk.cuh"

namespace kvgen {

// This warp's units of one head, every kWarps-th from `unit` to `end`: packed ones, then pieces of the tail. Gives the first
// unit that is not the head's.
template <class Traits, class Walk>
__device__ __forceinline__ int attend_head(const AttendArgs& args, const Shared<Traits>& shared, const Lengths<Traits>& lengths, const Head& head, int unit, int end,
                                           int lane, Walk& walk, State<Traits> (&state)[Traits::kColumnTiles]) {
  constexpr int kTokens = Traits::Format::kTokens;
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) state[tile].clear();
  const int before = lengths.before[head.batch];
  const Sight<Traits> sight{before + lengths.fresh, args.q_len, before / kTokens * kTokens};
  unit = attend_units<Traits>(shared, walk, unit, min(end, head.packed), Traits::kWarps, sight, lane, state);
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) unmix_values<Traits>(state[tile]);
#pragma unroll 1
  for (; unit < end; unit += Traits::kWarps) {
    const int first = (unit - head.packed) * Traits::kPieceTokens, count = before % kTokens + lengths.fresh;
    const TailRows<Traits> rows{walk.ring.slot(walk.depth), min(count - first, Traits::kPieceTokens)};
    walk.ring.wait_piece(walk.depth);
    attend_piece<Traits>(rows, first, count, args.q_len, shared.query(), shared.factors, lane, state);
    if (lengths.fresh && count < kTokens) append_piece(args, rows, head.batch, head.head, first, count - lengths.fresh, lane);
#pragma unroll 1
    for (int stage = 0; stage < Traits::kUnitStages; ++stage) {
      walk.ring.wait(walk.depth, stage);
      walk.release(stage);
    }
    walk.step();
  }
  return unit;
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
  __device__ void run(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Lengths<Traits>& lengths) {
    while (last >= 0) {
      const int batch = last / lengths.heads, head = last % lengths.heads, length = lengths.before[batch];
      flush<Traits>(args, shared, Tail<Traits>(args, batch, head, length), length);
      last = __ldcg(work.links + last);
    }
  }
};

// A CTA's range, if there is one for it.
template <class Traits, bool kAppend>
__device__ __forceinline__ void attend_range(const AttendArgs& args, const Grid& grid) {
  extern __shared__ __align__(128) uint8_t memory[];
  const Shared<Traits> shared(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Lengths<Traits> lengths{shared.lengths, args.cache.batch, args.cache.kv_heads, kAppend ? args.q_len : 0};
  const Workspace<Traits> work(args.workspace, lengths.batch * lengths.heads, grid.ctas);
  if (Plan<Traits>::number() >= grid.ranges) {
    if constexpr (kAppend) advance_lengths(args, work, count_reader(work), grid.ctas, warp, lane);
    return;
  }
  for (int i = threadIdx.x; i < lengths.batch; i += Traits::kThreads) ptx::copy_async<4>(ptx::shared_address(shared.lengths + i), args.cache.lengths + i);
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
  Walk<Traits, Cursor<Traits>> walk(shared.ring(), Cursor<Traits>(args, lengths, drawn, book, warp, lane), warp, lane);
  walk.fill_up();
  write_down(book.group, Group<Traits>(drawn, lengths, drawn.first), lane);
  if (const Head* mine = loader.mine(book.group, warp); mine && (mine->batch != likely.batch || mine->head != likely.head)) loader.fetch(args, *mine, warp, lane);
  loader.publish(args, shared, book.group, warp, lane);
  const Plan<Traits>& plan = book.plan;
  Flushes<Traits> flushes;
  for (int skip = warp; !plan.idle();) {
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
    advance_lengths(args, work, readers, grid.ctas, warp, lane);
  }
}

// The same, called rather than built in: what calls it keeps its registers to itself.
template <class Traits, bool kAppend>
__device__ __noinline__ void call_range(const AttendArgs& args, const Grid& grid) {
  attend_range<Traits, kAppend>(args, grid);
}

template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm) attend_ranges(const __grid_constant__ AttendArgs args, const __grid_constant__ Grid grid) {
  ptx::take_turn();
  attend_range<Traits, kAppend>(args, grid);
}

}  // namespace kvgen
