// Equal shares of all heads of all sequences: their units in one row, cut into as many runs as there are CTAs, wherever that is (Stream-K,
// Osama et al., 2023). A CTA's run is pieces of several heads, most often one or two.
#pragma once
#include "kvgen/merge.cuh"

namespace kvgen {

// A run of units [begin, end) of a head: the `rank`-th of `count` pieces, whose partial results lie from place `first` on.
struct Piece {
  Head head;
  int length = 0;
  int begin = 0, end = 0;
  int rank = 0, count = 0;  // none: no piece
  int first = 0;
  int turn = 0;  // units that the CTA goes through before: warps take them in turn

  __device__ Part part() const { return {head.batch, rank, count, first}; }
  template <class Traits>
  __device__ int first_unit(int warp) const {
    return begin + (warp + Traits::kWarps - turn % Traits::kWarps) % Traits::kWarps;
  }
  __device__ Slots slots() const { return {first, count, rank}; }
};

// What a slot does. All lanes of a warp ask.
template <class Traits>
class Share {
 public:
  // Units that take as long as it takes to begin with a head.
  static constexpr int kStart = ceil_div(1024, Traits::kUnitTokens);

  // Places for partial results: a slot's next piece is the next head's, a head's next piece the next slot's.
  __host__ __device__ static int places(int slots, int heads) { return slots + heads; }

  template <class Survey>
  __device__ Share(const Survey& survey, int slots, int slot_) : slot(slot_) {
    const CacheArgs& cache = survey.cache;
    int mine = 0;
#pragma unroll 1
    for (int at = survey.lane; at < cache.batch; at += 32) mine += cost(survey.length(at));
    each = max(ceil_div(__reduce_add_sync(~0u, mine) * cache.kv_heads, slots), Traits::kWarps);
    reciprocal = __frcp_rn(static_cast<float>(each));
    begin(survey);
  }
  // The slot's next piece, if there is another.
  __device__ Piece next(const CacheArgs& cache) {
    while (head.batch < cache.batch && at < to()) {
      const int first = at + kStart, units = Traits::packed_units(length), last = first + max(units, 1) - 1;  // where the head's units lie in the row
      const int first_slot = slot_of(first), last_slot = slot_of(last), number = head.batch * cache.kv_heads + head.head;
      const Piece piece{head, length, max(from() - first, 0), min(to() - first, units), slot - first_slot, last_slot - first_slot + 1, first_slot + number, turn};
      at = last + 1;
      if (++head.head == cache.kv_heads) {
        head.head = 0, ++head.batch;
        if (head.batch < cache.batch && at < to()) length = cache.lengths[head.batch];
      }
      if (slot < first_slot || slot > last_slot) continue;
      turn += piece.end - piece.begin;
      return piece;
    }
    return {};
  }

 private:
  int slot, each;  // units
  float reciprocal;
  Head head;                  // the next one
  int at = 0, length = 0;     // where it begins in the row, its length
  int turn = 0;

  __device__ int from() const { return slot * each; }
  __device__ int to() const { return from() + each; }
  __device__ int slot_of(int place) const {
    const int about = static_cast<int>(static_cast<float>(place) * reciprocal), rest = place - about * each;  // off by one at most
    return about + (rest >= each) - (rest < 0);
  }
  __device__ static int cost(int length) { return kStart + max(Traits::packed_units(length), 1); }
  // The first head of which something lies in the slot's run.
  template <class Survey>
  __device__ void begin(const Survey& survey) {
    const CacheArgs& cache = survey.cache;
    for (int before = 0; head.batch < cache.batch; head.batch += 32) {
      const int sequence = head.batch + survey.lane, one = sequence < cache.batch ? cost(survey.length(sequence)) : 0, mine = one * cache.kv_heads;
      int upto = mine;
      for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, upto, by);
        if (survey.lane >= by) upto += other;
      }
      if (const unsigned after = __ballot_sync(~0u, before + upto > from())) {
        const int found = __ffs(after) - 1;
        at = before + __shfl_sync(~0u, upto - mine, found), head.batch += found, length = survey.length(head.batch);
        const int each_head = __shfl_sync(~0u, one, found);
        head.head = (from() - at) / each_head, at += head.head * each_head;
        return;
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    head.batch = cache.batch;
  }
};

}  // namespace kvgen
