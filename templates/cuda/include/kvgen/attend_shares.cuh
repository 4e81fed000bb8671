// What a CTA does where lengths are not alike: it goes through the pieces of its share. What it reads first of the next one is under way
// while the last one's result is handed on.
#pragma once
#include "kvgen/ahead.cuh"
#include "kvgen/finish.cuh"
#include "kvgen/share.cuh"

namespace kvgen {

// How far a CTA has come, in shared memory: units take all registers. One thread sees to it that the next piece is known in time.
template <class Traits>
struct Progress {
  static constexpr int kPieces = 3;  // while one is gone through, the last is handed on and the next is known
  Share<Traits> share, all;
  Piece first, pieces[kPieces];
  bool flushes;  // a residual becomes a block

  __device__ void begin(const Share<Traits>& all_, const Share<Traits>& share_, const Piece& piece) {
    all = all_, share = share_, first = pieces[0] = piece, flushes = false;
  }
  __device__ void step(const CacheArgs& cache, int number) { pieces[number % kPieces] = share.next(cache, Held{cache}); }
  __device__ const Piece& piece(int number) const { return pieces[number % kPieces]; }
};

// Where a warp begins with a piece.
template <class Traits>
__device__ __forceinline__ Cursor<Traits> beginning(const AttendArgs& args, const Piece& piece, int* words, int warp, int lane) {
  Cursor<Traits> cursor(args, piece.head, piece.first_unit<Traits>(warp), Traits::kWarps, words, lane);
  cursor.limit(piece.length, piece.end);
  return cursor;
}

// A piece's result. Called, as what follows is: their registers are their own.
template <class Traits>
__device__ __noinline__ void hand_on_piece(const AttendArgs& args, const Grid& grid, uint8_t* memory, const Piece& piece) {
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places);
  hand_on<Traits>(args, Shared<Traits>(memory), work, piece.head, piece.slots(), 0);
}

// The end of a share of `count` pieces: the last one's result; then, side by side, the heads of which other CTAs have pieces, too: the
// first and the last at most.
template <class Traits, bool kAppend>
__device__ __noinline__ void finish_share(const AttendArgs& args, const Grid& grid, uint8_t* memory, const Progress<Traits>& progress,
                                          int count) {
  const Shared<Traits> shared(memory);
  const Workspace<Traits> work(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places);
  const Combination<Traits> combination{args, work, shared.flags};
  const auto end = [&](int i) -> const Piece& { return i ? progress.piece(count - 1) : progress.first; };
  __syncthreads();
  hand_on_piece<Traits>(args, grid, memory, end(1));
  __syncthreads();  // also: nobody reads lengths any more, unless blocks are packed
  if (const int i = threadIdx.x / 32; i < 2 && threadIdx.x % 32 == 0)
    shared.flags[i] = i < count && end(i).count > 1 && combination.last(end(i).head, end(i).slots());
  int readers = kAppend && !progress.flushes ? count_reader(work) : 0;
  __syncthreads();
  if (const int i = threadIdx.x / Traits::kAdders; shared.flags[i]) combination.add_up(end(i).head, end(i).slots());
  if constexpr (kAppend) {
    if (progress.flushes) {
      Share<Traits> all = progress.all;
      for (int i = 0; i < count; ++i) {
        const Piece piece = all.next(args.cache, Held{args.cache});
        const Tail<Traits> whole(args, piece.head.batch, piece.head.head, piece.length);
        if (whole.count() >= Traits::Format::kTokens && (piece.count == 1 || shared.flags[i > 0]))
          flush<Traits>(args, shared, whole, piece.length);
      }
      __syncthreads();
      readers = count_reader(work);
    }
    advance_lengths(args, work, readers, threadIdx.x / 32, threadIdx.x % 32);
  }
}

// Where a CTA begins: all of its share, what comes after the first piece, and that piece.
template <class Traits>
struct Opening {
  Share<Traits> all, share;
  Piece piece;

  template <class Survey>
  __device__ __forceinline__ Opening(const Survey& survey, const Grid& grid, const CacheArgs& cache)
      : all(survey, grid.shares, blockIdx.y * gridDim.x + blockIdx.x),
        share(all),
        piece(share.next(cache, [&](int batch) { return survey.length(batch); })) {}
};

// `kGuess`: the opening is what it seemed to be before the turn. q and page table are asked for on that guess, with lengths, which tell; K
// and V after them, since all that would queue behind these. The warp's place for lengths, in `survey`, is the page tables' then.
template <class Traits, bool kAppend, bool kGuess, class Survey>
__device__ __forceinline__ void attend_shares(const AttendArgs& args, const Grid& grid, uint8_t* memory, Opening<Traits> opening,
                                              Survey& survey, int warp, int lane) {
  constexpr int kTokens = Traits::Format::kTokens;
  const Shared<Traits> shared(memory);
  Progress<Traits>& progress = *reinterpret_cast<Progress<Traits>*>(memory + Traits::kAside);
  static_assert(sizeof(progress) <= Traits::kAsideBytes);
  QueryLoader<Traits> loader;
  loader.fetch(args, opening.piece.head, warp, lane);
  typename Survey::Lengths now;
  if constexpr (kGuess) now = survey.ask_again();
  Walk<Traits> walk(shared.ring(), beginning<Traits>(args, opening.piece, survey.copied, warp, lane), warp, lane);
  if constexpr (kGuess)
    if (survey.changed(now)) {
      opening = Opening<Traits>(survey, grid, args.cache);
      loader.fetch(args, opening.piece.head, warp, lane);
      walk.cursor = beginning<Traits>(args, opening.piece, survey.copied, warp, lane);
    }
  Piece piece = opening.piece;
  if (piece.count == 0)
    return leave<Traits, kAppend>(args, Workspace<Traits>(args.workspace, args.cache.batch * args.cache.kv_heads, grid.places), warp, lane);
  __syncwarp();
  walk.begin(walk.cursor);
  const bool keeper = threadIdx.x == 32;  // of the progress; warp 0 has q to prepare
  if (keeper) progress.begin(opening.all, opening.share, piece);
  for (int number = 0;; ++number) {
    warp = ptx::pinned(warp), lane = ptx::pinned(lane);  // what is made of them does not outlive a piece
    const Place<Traits> place(piece.part());
    const Tail<Traits> tail(args, piece.head.batch, piece.head.head, piece.length);
    TailTile<Traits> tile;
    tile.clear();
    tile.fetch(tail, tail_tile<Traits>(place, 0, warp), lane);
    walk.fill_up();
    if (number > 0) {
      __syncthreads();
      hand_on_piece<Traits>(args, grid, memory, progress.piece(number - 1));
    }
    loader.publish(args, shared, warp, lane);
    if (keeper) {
      progress.step(args.cache, number + 1);
      if (kAppend && tail.count() >= kTokens) progress.flushes = true;
    }
    __syncthreads();

    State<Traits> state[1];
    state[0].clear();
    attend_tail<Traits>(args, shared, tail, tile, place, warp, lane, state);
    attend_units<Traits>(shared, walk, piece.first_unit<Traits>(warp), piece.end, Traits::kWarps,
                         Sight<Traits>{piece.length + tail.fresh, args.q_len, piece.length / kTokens * kTokens}, lane, state);
    ptx::copy_wait_all();
    unmix_values<Traits>(state[0]);
    publish_state<Traits>(state[0], shared.merge, shared.warp_totals, warp, lane);
    piece = progress.piece(number + 1);
    if (piece.count == 0) return finish_share<Traits, kAppend>(args, grid, memory, progress, number + 1);
    loader.fetch(args, piece.head, warp, lane);
    walk.begin(beginning<Traits>(args, piece, walk.cursor.pages.words, warp, lane));
  }
}

// The kernel of launches that have shares whatever lengths are. Where launches overlap, what to begin with is worked out before its turn,
// from what lengths seem to be: bytes are on their way to L2 then, instructions known, and the first loads go out with the turn.
template <class Traits, bool kAppend>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    attend_all(const __grid_constant__ AttendArgs args, const __grid_constant__ Grid grid) {
  using Alone = typename Traits::Alone;
  constexpr bool kGuess = KVGEN_SM90;
  extern __shared__ __align__(128) uint8_t memory[];
  ptx::let_next_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Survey<Traits> survey(args.cache, Shared<Traits>(memory).lengths, warp, lane);
  if constexpr (!kGuess) ptx::take_turn();
  const int room =
      args.max_len / Traits::Format::kTokens > args.cache.blocks ? (args.cache.blocks + 1) * Traits::Format::kTokens - 1 : args.max_len;
  survey.look(kGuess ? room : kSure);
  Opening<Alone> opening(survey, grid, args.cache);
  if constexpr (kGuess) {
    Piece& piece = opening.piece;
    if (piece.count > 0 && piece.head.head < args.cache.kv_heads) {  // of a share the latter is true; what is asked for must exist
      Ahead<Traits>::prefetch_units(args, piece.head, piece.template first_unit<Traits>(warp), lane);
      if (warp == Traits::kWarps - 1) Ahead<Traits>::prefetch_tail(args, piece.head, lane);
    }
    if (!survey.knows_all()) piece = {};  // nothing could be loaded on that guess: it cannot be confirmed
    ptx::take_turn();
  }
  attend_shares<Alone, kAppend, kGuess>(args, grid, memory, opening, survey, warp, lane);
}

}  // namespace kvgen
