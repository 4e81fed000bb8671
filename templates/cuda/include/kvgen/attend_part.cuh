// The kernel: a CTA has one part of one head. Where its units begin it knows, most often, before it knows how many there are.
#pragma once
#include "kvgen/ahead.cuh"
#include "kvgen/attend_shares.cuh"

namespace kvgen {

template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    attend_part(const __grid_constant__ AttendArgs args, const __grid_constant__ Grid grid) {
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr int kTokens = Traits::Format::kTokens;
  constexpr bool kEarly = Traits::kCopy == Copy::async && !Traits::kPaged && !Traits::kGathered;  // K and V before lengths are known
  ptx::let_next_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = blockIdx.y;
  Part part = Part::even(grid, slot, args.cache.batch);
  Head head{part.batch, static_cast<int>(blockIdx.x) / Traits::kTogether};
  if (part.count > 0) {
    const Place<Traits> place(part);
    Ahead<Traits>::prefetch_units(args, head, Cursor<Traits>::first(place, warp), lane);
    if (grid.once && place.rank == 0 && warp == Traits::kWarps - 1) Ahead<Traits>::prefetch_tail(args, head, lane);
  }
  ptx::take_turn();
  const Shared<Traits> shared(memory);
  Survey<Traits> survey(args.cache, shared.lengths, warp, lane);
  survey.ask();
  QueryLoader<Traits> loader;
  loader.fetch(args, head, warp, lane);
  Walk<Traits> walk(shared.ring(), Cursor<Traits>(args, head, Place<Traits>(part), survey.copied, warp, lane), warp, lane);
  if constexpr (kEarly) walk.fill_first(grid.guess && part.count > 0);
  survey.template wait<kEarly>();
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places);
  if (int total; !survey.alike(total)) {
    if constexpr (kEarly) ptx::copy_wait_all();
    if constexpr (Traits::kShares) {
      const Opening<typename Traits::Alone> opening(survey, grid, args.cache);
      return attend_shares<typename Traits::Alone, kAppend, false>(args, grid, memory, opening, survey, warp, lane);
    }
    part = survey.part(grid, slot, total), head.batch = part.batch;
    __syncwarp();
    loader.fetch(args, head, warp, lane);
    walk.cursor = Cursor<Traits>(args, head, Place<Traits>(part), survey.copied, warp, lane);
    walk.early = 0;
  }
  if (part.count == 0) return leave<Traits, kAppend>(args, work, warp, lane);
  const Place<Traits> place(part);
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) Inbox<Traits>::open(memory);
#endif
  const int length = survey.length(part.batch);
  __syncwarp();  // then the place of the lengths is the page queue's
  const Tail<Traits> tail(args, head.batch, head.head, length);
  TailTile<Traits> tile;
  tile.fetch(tail, tail_tile<Traits>(place, 0, warp), lane);
  walk.cursor.limit(length);
  const int first = walk.cursor.unit;
  walk.fill_up();
  loader.publish(args, shared, warp, lane);
  __syncthreads();
#if KVGEN_SM90
  if constexpr (Traits::kCombine == Combine::cluster) Inbox<Traits>::expect(memory);
#endif

  State<Traits> state[Traits::kColumnTiles];
#pragma unroll
  for (int i = 0; i < Traits::kColumnTiles; ++i) state[i].clear();
  attend_tail<Traits>(args, shared, tail, tile, place, warp, lane, state);
  const Sight<Traits> sight{length + tail.fresh, args.q_len, length / kTokens * kTokens};
  attend_units<Traits>(shared, walk, first, walk.cursor.end, walk.cursor.blocks.stride, sight, lane, state);
  if constexpr (kEarly) ptx::copy_wait_all();            // what was asked for too early
  const int readers = kAppend ? count_reader(work) : 0;  // looked at in the end: the trip to the counter costs nobody time
  const bool completed =
      finish_part<Traits>(args, shared, work, head, Slots{head.head * grid.slots + part.first, part.count, part.rank}, warp, lane, state);

  if constexpr (kAppend) {
    const int same = ptx::pinned(length);  // so that of the tail no more than this outlives the loop
    if (const Tail<Traits> whole(args, head.batch, head.head, same); completed && whole.count() >= kTokens)
      flush<Traits>(args, shared, whole, same);
    advance_lengths(args, work, readers, warp, lane);
  }
}

}  // namespace kvgen
