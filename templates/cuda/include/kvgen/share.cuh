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

// Lengths of sequences as they are, after the turn.
struct Held {
  const CacheArgs& cache;

  __device__ int operator()(int batch) const { return cache.lengths[batch]; }
};

// What a slot does. All lanes of a warp ask.
template <class Traits>
class Share {
 public:
  // What a multiprocessor could read while a CTA goes from one head to the next, in bytes and units: its rings are filled anew, and there
  // is more to do.
  static constexpr int kBetweenBytes = 96 * 1024 + Traits::kRingBytes, kStart = ceil_div(kBetweenBytes, Traits::kUnitBytes);

  // Places for partial results: a slot's next piece is the next head's, a head's next piece the next slot's.
  __host__ __device__ static int places(int slots, int heads) { return slots + heads; }

  template <class Survey>
  __device__ Share(const Survey& survey, const Divisor& slots, int slot_) : slot(slot_) {
    const int batch = survey.cache.batch, kv_heads = survey.cache.kv_heads, most = static_cast<int>(slots.number);
    const int one = cost_of(survey, survey.lane), upto = sum_upto(one, survey.lane);
    int all = __shfl_sync(~0u, upto, 31);
    if (batch > 32) all += cost_of_others(survey);
    each = max(slots.quotient(all * kv_heads + most - 1), Traits::kWarps);
    reciprocal = __fdividef(1.f, static_cast<float>(each));
    if (slot < most)
      begin(survey, one, upto);
    else
      slot = 0, each = 0, head.batch = batch;  // none
  }
  // The slot's next piece, if there is another. `length_of_`: of a sequence.
  template <class LengthOf>
  __device__ Piece next(const CacheArgs& cache, LengthOf&& length_of_) {
    while (head.batch < cache.batch && at < to()) {
      const int first = at + kStart, units = Traits::packed_units(length),
                last = first + max(units, 1) - 1;  // where the head's units lie in the row
      const int first_slot = slot_of(first), last_slot = slot_of(last), number = head.batch * cache.kv_heads + head.head;
      const Piece piece{head,
                        length,
                        max(from() - first, 0),
                        min(to() - first, units),
                        slot - first_slot,
                        last_slot - first_slot + 1,
                        first_slot + number,
                        turn};
      at = last + 1;
      if (++head.head == cache.kv_heads) {
        head.head = 0, ++head.batch;
        if (head.batch < cache.batch && at < to()) length = length_of_(head.batch);
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
  Head head;               // the next one
  int at = 0, length = 0;  // where it begins in the row, its length
  int turn = 0;

  __device__ int from() const { return slot * each; }
  __device__ int to() const { return from() + each; }
  __device__ int slot_of(int place) const {
    const int about = static_cast<int>(static_cast<float>(place) * reciprocal), rest = place - about * each;  // off by one at most
    return about + (rest >= each) - (rest < 0);
  }
  // What a head of a sequence takes.
  template <class Survey>
  __device__ static int cost_of(const Survey& survey, int sequence) {
    return sequence < survey.cache.batch ? kStart + max(Traits::packed_units(survey.length(sequence)), 1) : 0;
  }
  // All but the first 32 sequences, a head of each.
  template <class Survey>
  __device__ static int cost_of_others(const Survey& survey) {
    int mine = 0;
#pragma unroll 1
    for (int b = 32 + survey.lane; b < survey.cache.batch; b += 32) mine += cost_of(survey, b);
    return __reduce_add_sync(~0u, mine);
  }
  // The first head of which something lies in the slot's run. `one`, `upto`: what a head of a lane's sequence takes, of the first 32, and
  // the sum up to it.
  template <class Survey>
  __device__ void begin(const Survey& survey, int one, int upto) {
    const int batch = survey.cache.batch, kv_heads = survey.cache.kv_heads;
    for (int before = 0;;) {
      if (const unsigned after = __ballot_sync(~0u, before + upto * kv_heads > from())) {
        const int found = __ffs(after) - 1, a_head = __shfl_sync(~0u, one, found);
        at = before + (__shfl_sync(~0u, upto, found) - a_head) * kv_heads, head.batch += found, length = survey.length(head.batch);
        for (int heads = 32; heads == 32; head.head += heads)
          heads = __popc(__ballot_sync(~0u, at + (head.head + survey.lane + 1) * a_head <= from()));
        at += head.head * a_head;
        return;
      }
      if ((head.batch += 32) >= batch) break;
      before += __shfl_sync(~0u, upto, 31) * kv_heads, one = cost_of(survey, head.batch + survey.lane), upto = sum_upto(one, survey.lane);
    }
    head.batch = batch;
  }
};

}  // namespace kvgen
