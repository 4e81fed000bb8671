// What a CTA does where lengths are not alike: it goes through the pieces of its share. What it reads first of the next one is under way
// while the last one's result is handed on.
#pragma once
#include "kvgen/finish.cuh"
#include "kvgen/share.cuh"

namespace kvgen {

// How far a CTA has come, in shared memory: units take all registers. Thread 0 sees to it that the next piece is known in time.
template <class Traits>
struct Progress {
  static constexpr int kPieces = 3;  // while one is gone through, the last is handed on and the next is known
  Share<Traits> share, all;
  Piece first, pieces[kPieces];
  bool flushes;  // heads that are all this CTA's become blocks

  __device__ void begin(const Share<Traits>& all_, const Share<Traits>& share_, const Piece& piece) {
    all = all_, share = share_, first = pieces[0] = piece, flushes = false;
  }
  __device__ void step(const CacheArgs& cache, int number) { pieces[number % kPieces] = share.next(cache); }
  __device__ const Piece& piece(int number) const { return pieces[number % kPieces]; }
};

// What is asked for of a piece ahead: what comes first of it, then the ring is filled.
template <class Traits>
struct Beginning {
  QueryLoader<Traits> loader;
  TailTile<Traits> tile;

  __device__ Beginning() { tile.clear(); }
  __device__ __forceinline__ void ask(const AttendArgs& args, const Piece& piece, Walk<Traits>& walk, int warp, int lane) {
    loader.fetch(args, piece.head, warp, lane);
    tile.fetch(Tail<Traits>(args, piece.head.batch, piece.head.head, piece.length), tail_tile<Traits>(Place<Traits>(piece.part()), 0, warp), lane);
    walk.cursor = Cursor<Traits>(args, piece.head, piece.first_unit<Traits>(warp), Traits::kWarps, walk.cursor.pages.words, lane);
    walk.cursor.limit(piece.length, piece.end);
    walk.depth = 0;
    walk.fill_up();
  }
};

// The warps' states of a piece, published, and but for the last column tile handed on.
template <class Traits>
__device__ __forceinline__ void publish_states(const AttendArgs& args, const Shared<Traits>& shared, const Workspace<Traits>& work, const Piece& piece, int warp, int lane,
                                               State<Traits> (&state)[Traits::kColumnTiles]) {
#pragma unroll
  for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
    unmix_values<Traits>(state[tile]);
    publish_state<Traits>(state[tile], shared.merge, shared.warp_totals, warp, lane);
    if (tile + 1 == Traits::kColumnTiles) return;
    __syncthreads();
    hand_on<Traits>(args, shared, work, piece.head, piece.slots(), tile);
    __syncthreads();
  }
}

// A piece's last column tile. Called, as what follows is: their registers are their own.
template <class Traits>
__device__ __noinline__ void hand_on_last(const AttendArgs& args, const Grid& grid, uint8_t* memory, const Piece& piece) {
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places);
  hand_on<Traits>(args, Shared<Traits>(memory), work, piece.head, piece.slots(), Traits::kColumnTiles - 1);
}

// The head of a piece that was handed on, if this CTA completes it.
template <class Traits, bool kAppend>
__device__ __noinline__ void complete_head(const AttendArgs& args, const Grid& grid, uint8_t* memory, const Piece& piece) {
  const Shared<Traits> shared(memory);
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places);
  const bool completed = piece.count == 1 || Combination<Traits>{args, work, shared.flags}.run(piece.head, piece.slots());
  if constexpr (kAppend)
    if (const Tail<Traits> whole(args, piece.head.batch, piece.head.head, piece.length); completed && whole.count() >= Traits::Format::kTokens)
      flush<Traits>(args, shared, whole, piece.length);
}

// Of `count` pieces most often the first and the last have other parts; all are looked at if others become blocks.
template <class Traits, bool kAppend>
__device__ __forceinline__ void complete_heads(const AttendArgs& args, const Grid& grid, uint8_t* memory, const Progress<Traits>& progress, int count) {
  const bool every = kAppend && progress.flushes;
  Share<Traits> all = progress.all;
#pragma unroll 1
  for (int i = count > 1 ? 0 : 1;; ++i) {
    const Piece piece = every ? all.next(args.cache) : i == 0 ? progress.first : progress.piece(count - 1);
    if (every && piece.count == 0) return;
    complete_head<Traits, kAppend>(args, grid, memory, piece);
    if (!every && i > 0) return;
  }
}

template <class Traits, bool kAppend, class Survey>
__device__ __forceinline__ void attend_shares(const AttendArgs& args, const Grid& grid, uint8_t* memory, const Survey& survey, int warp, int lane) {
  constexpr int kTokens = Traits::Format::kTokens;
  const Shared<Traits> shared(memory);
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places);
  Progress<Traits>& progress = *reinterpret_cast<Progress<Traits>*>(memory + Traits::kAside);
  static_assert(sizeof(progress) <= Traits::kAsideBytes);
  const Share<Traits> all(survey, grid.shares, blockIdx.y * gridDim.x + blockIdx.x);
  Share<Traits> share = all;
  Piece piece = share.next(args.cache);
  if (piece.count == 0) return leave<Traits, kAppend>(args, work, warp, lane);
  if (threadIdx.x == 0) progress.begin(all, share, piece);
  __syncwarp();  // then the place of the lengths is the page queue's

  Walk<Traits> walk(shared.ring(), Cursor<Traits>(args, Head{}, 0, Traits::kWarps, survey.copied, lane), warp, lane);
  int number = 0;
  while (true) {
    warp = ptx::pinned(warp), lane = ptx::pinned(lane);  // what is made of them does not outlive a piece
    Beginning<Traits> beginning;
    if (piece.count) beginning.ask(args, piece, walk, warp, lane);
    if (number > 0) {
      __syncthreads();
      hand_on_last<Traits>(args, grid, memory, progress.piece(number - 1));
    }
    if (piece.count == 0) break;
    beginning.loader.publish(args, shared, warp, lane);
    const Tail<Traits> tail(args, piece.head.batch, piece.head.head, piece.length);
    if (threadIdx.x == 0) {
      progress.step(args.cache, number + 1);
      if (kAppend && piece.count == 1 && tail.count() >= kTokens) progress.flushes = true;
    }
    __syncthreads();

    State<Traits> state[Traits::kColumnTiles];
#pragma unroll
    for (int i = 0; i < Traits::kColumnTiles; ++i) state[i].clear();
    attend_tail<Traits>(args, shared, tail, beginning.tile, Place<Traits>(piece.part()), warp, lane, state);
    attend_units<Traits>(shared, walk, piece.first_unit<Traits>(warp), piece.end, Traits::kWarps, Sight<Traits>{piece.length + tail.fresh, args.q_len, piece.length / kTokens * kTokens}, lane,
                         state);
    ptx::copy_wait_all();
    publish_states<Traits>(args, shared, work, progress.piece(number), warp, lane, state);
    piece = progress.piece(++number);
  }
  __syncthreads();  // also: nobody reads lengths any more, unless blocks are packed
  int readers = kAppend && !progress.flushes ? count_reader(work) : 0;
  complete_heads<Traits, kAppend>(args, grid, memory, progress, number);
  if constexpr (kAppend) {
    if (progress.flushes) {
      __syncthreads();
      readers = count_reader(work);
    }
    advance_lengths(args, work, readers, warp, lane);
  }
}

}  // namespace kvgen
