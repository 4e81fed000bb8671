// Who does what: every head of a sequence is cut into parts, each one CTA's (or one cluster's). A launch has so many slots for parts, for
// every KV head the same; where lengths are alike the sequences share them evenly, else by length. CTAs that have a multiprocessor to
// themselves are too few for that: share.cuh.
#pragma once
#include <algorithm>

#include "kvgen/args.cuh"
#include "kvgen/ptx.cuh"
#include "kvgen/traits.cuh"

namespace kvgen {

// Division of numbers below 2^31 by one that the host knows.
struct Divisor {
  uint32_t number, multiplier, shift = 31;

  __host__ __device__ explicit Divisor(uint32_t number_) : number(number_) {
    while (1ull << (shift - 31) < number) ++shift;
    multiplier = static_cast<uint32_t>(((1ull << shift) + number - 1) / number);
  }
  __device__ __forceinline__ int quotient(int n) const { return static_cast<int>(static_cast<uint64_t>(n) * multiplier >> shift); }
  __device__ __forceinline__ int rest(int n) const { return n - quotient(n) * static_cast<int>(number); }
};

// A launch has kv_heads x kCluster by slots CTAs, or, where it has shares whatever lengths are, as many as these.
struct Grid {
  int slots = 1;
  Divisor splits{1};   // parts of each head where lengths are alike
  bool guess = false;  // that they are, before it is known
  Divisor shares{1};   // CTAs that share the work, where they are not or always
  int places = 1;      // for partial results
  bool once = false;   // all parts run at once, where lengths are alike
  __host__ __device__ int parts() const { return splits.number; }
};

struct Head {
  int batch = 0;
  int head = 0;
};

// Of what the lanes of a warp have, the sum up to each, its own included.
__device__ __forceinline__ int sum_upto(int mine, int lane) {
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(~0u, mine, by);
    if (lane >= by) mine += other;
  }
  return mine;
}

// A slot's part: the `rank`-th of `count` of a sequence, whose first lies in slot `first`.
struct Part {
  static constexpr int kMostParts = 256;  // of a head
  int batch = 0;
  int rank = 0;
  int count = 0;  // none: the slot is not needed
  int first = 0;

  // Where lengths are alike. Which sequence is known before they are.
  __device__ static Part even(const Grid& grid, int slot, int batch) {
    const int at = grid.splits.quotient(slot);
    if (at >= batch) return {};
    return {at, grid.splits.rest(slot), grid.parts(), at * grid.parts()};
  }
  // By length: parts as short as slots allow, one at least for every sequence. Called: what calls it keeps its registers to itself.
  __device__ static __noinline__ Part by_length(const int* lengths, int batch, int slots, int slot, int total) {
    const float rate = shortest(lengths, batch, slots, total);
    const int lane = threadIdx.x % 32, rounds = ceil_div(batch, 32);
    int before = 0;
    // Sequences of several parts first: what takes longest must not begin last.
    for (int turn = 0; turn < 2 * rounds; ++turn) {
      const int base = turn % rounds * 32, all = base + lane < batch ? parts(lengths[base + lane], rate) : 0;
      const int mine = (all > 1) == (turn < rounds) ? all : 0, upto = sum_upto(mine, lane);
      const unsigned after = __ballot_sync(~0u, before + upto > slot);
      if (after) {
        const int found = __ffs(after) - 1, count = __shfl_sync(~0u, mine, found), first = before + __shfl_sync(~0u, upto, found) - count;
        return {base + found, slot - first, count, first};
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    return {};
  }

 private:
  __device__ static int parts(int length, float rate) {
    return min(max(static_cast<int>(ceilf(static_cast<float>(length) * rate)), 1), kMostParts);
  }
  // Parts per token: the most of a few rates that the slots suffice for. They do for the lowest, since rounding adds at most one each.
  __device__ static float shortest(const int* lengths, int batch, int slots, int total) {
    constexpr int kRates = 8;
    const float low = static_cast<float>(slots - batch) / static_cast<float>(max(total, 1)),
                high = static_cast<float>(slots) / static_cast<float>(max(total, 1));
    int needed[kRates] = {};
    for (int at = threadIdx.x % 32; at < batch; at += 32)
#pragma unroll
      for (int i = 0; i < kRates; ++i) needed[i] += parts(lengths[at], low + (high - low) * i / kRates);
    float best = low;
#pragma unroll
    for (int i = 1; i < kRates; ++i)
      if (__reduce_add_sync(~0u, needed[i]) <= slots) best = low + (high - low) * i / kRates;
    return best;
  }
};

// A sequence's length; `most`: kSure, or, before a launch's turn, when anything may be there, what it is at most. No cache of the
// multiprocessor keeps it then.
constexpr int kSure = -1;
__device__ __forceinline__ int length_of(const CacheArgs& cache, int batch, int most) {
  return most == kSure ? cache.lengths[batch] : min(max(ptx::load_now(cache.lengths + batch), 0), most);
}

// The lengths that a warp has to know, copied to a place of its own.
template <class Traits>
struct Survey {
  static constexpr int kTurns = std::min(4, kMaxBatch / Traits::kWarps / 32);  // sequences per lane that are copied
  static constexpr int kSlack = 1024;  // tokens that take no longer than a CTA takes to start and to finish
  const CacheArgs& cache;
  int* copied;
  int lane;
  int most = kSure;

  __device__ Survey(const CacheArgs& cache_, int* lengths, int warp, int lane_)
      : cache(cache_), copied(lengths + warp * kTurns * 32), lane(lane_) {}
  // Asks for them ahead of K and V: the compiler would put loads behind these.
  __device__ __forceinline__ void ask() const {
#pragma unroll
    for (int at = lane; at < kTurns * 32; at += 32)
      if (at < cache.batch) ptx::copy_async<4>(ptx::shared_address(copied + at), cache.lengths + at);
    ptx::copy_commit();
  }
  // From here on what was copied can be asked for, `kLater` groups of copies after it.
  template <int kLater>
  __device__ __forceinline__ void wait() const {
    ptx::copy_wait<kLater>();
    __syncwarp();
  }
  // As they are now: see `length_of`. All in one trip, which a choice between two kinds of loads would part.
  __device__ __forceinline__ void look(int most_) {
    most = most_;
    const int limit = most == kSure ? INT32_MAX : most;
#pragma unroll
    for (int at = lane; at < kTurns * 32; at += 32)
      if (at < cache.batch) copied[at] = min(max(ptx::load_now(cache.lengths + at), 0), limit);
    __syncwarp();
  }
  // Asks for them once more.
  struct Lengths {
    int of[kTurns];
  };
  __device__ __forceinline__ Lengths ask_again() const {
    Lengths now;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) now.of[i] = i * 32 + lane < cache.batch ? ptx::load_now(cache.lengths + i * 32 + lane) : 0;
    return now;
  }
  // Whether they may be others than those that were looked at; then these are known.
  __device__ __forceinline__ bool changed(const Lengths& now) {
    bool others = !knows_all();
#pragma unroll
    for (int i = 0; i < kTurns; ++i)
      if (const int at = i * 32 + lane; at < cache.batch) others |= copied[at] != now.of[i], copied[at] = now.of[i];
    most = kSure;
    __syncwarp();
    return __any_sync(~0u, others);
  }
  __device__ __forceinline__ bool knows_all() const { return cache.batch <= kTurns * 32; }
  __device__ __forceinline__ int length(int batch) const { return batch < kTurns * 32 ? copied[batch] : length_of(cache, batch, most); }

  // Whether sequences can be cut alike; their tokens. All lanes ask.
  __device__ __forceinline__ bool alike(int& total) const {
    total = 0;
    if (cache.batch == 1) return true;
    int longest = 0;
#pragma unroll 1
    for (int at = lane; at < min(cache.batch, kTurns * 32); at += 32) total += copied[at], longest = max(longest, copied[at]);
#pragma unroll 8
    for (int at = kTurns * 32 + lane; at < cache.batch; at += 32) total += cache.lengths[at], longest = max(longest, cache.lengths[at]);
    total = __reduce_add_sync(~0u, total), longest = __reduce_max_sync(~0u, longest);
    return static_cast<int64_t>(longest) * cache.batch <= total + total / 8 + static_cast<int64_t>(kSlack) * cache.batch;
  }
  // The slot's part of `total` tokens where they are not.
  __device__ __forceinline__ Part part(const Grid& grid, int slot, int total) const {
    return Part::by_length(cache.batch <= kTurns * 32 ? copied : cache.lengths, cache.batch, grid.slots, slot, total);
  }
};

}  // namespace kvgen
