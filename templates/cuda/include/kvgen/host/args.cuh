// The arguments of the kernels. Pointers are device pointers; strides count elements unless a name says bytes.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "kvgen/format.hpp"

namespace kvgen {

constexpr int kMaxPlanBatch = 2048;  // most sequences: every CTA that plans keeps the positions of all of them in shared memory

// Rows of `head_dim` contiguous elements: [batch, tokens, heads, head_dim] with any strides but the last.
struct Rows {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  template <class Element>
  __device__ Element* row(int batch, int token, int head) const {
    return static_cast<Element*>(data) + batch * batch_stride + token * token_stride + head * head_stride;
  }
};

// A cache. Contiguous: packed [batch, kv_heads, blocks, block_bytes]; paged: packed [pages, kv_heads, page_blocks, block_bytes].
struct CacheArgs {
  uint8_t* packed = nullptr;
  int64_t outer_stride_bytes = 0;  // from one sequence (contiguous) or page (paged) to the next
  int64_t head_stride_bytes = 0;
  void* k_residual = nullptr;  // [slots, kv_heads, rows, head_dim], contiguous (kvgen/format.hpp)
  void* v_residual = nullptr;
  int* lengths = nullptr;               // [batch]
  const int* block_table = nullptr;     // [batch, max_pages], null for contiguous caches
  const int* residual_slots = nullptr;  // [batch]: the residual of each sequence; null where they lie in the order of sequences
  int table_stride = 0;
  int page_blocks = 0;  // blocks per page
  int pages = 0;        // pages in the cache
  int blocks = 0;       // blocks that a sequence can hold
  int slots = 0;        // residuals
  int batch = 0;
  int kv_heads = 0;

  // Page of a block, in a paged cache.
  __device__ int page_of(int batch, int block) const {
    return block_table[static_cast<int64_t>(batch) * table_stride + block / page_blocks];
  }
  // Offset in elements of a head's rows in k_residual and v_residual.
  template <class Format>
  __device__ int64_t residual_offset(int batch, int head) const {
    return offset_of_slot<Format>(residual_slots ? residual_slots[batch] : batch, head);
  }
  template <class Format>
  __device__ int64_t offset_of_slot(int slot, int head) const {
    return (static_cast<int64_t>(slot) * kv_heads + head) * Format::ResidualRows::kRows * Format::kHeadDim;
  }
  // Address of block `block` of sequence `batch`, head `head`.
  template <class Format>
  __device__ uint8_t* block(int batch, int head, int block) const {
    int64_t outer = batch;
    if constexpr (Format::kPaged) {
      outer = page_of(batch, block);
      block %= page_blocks;
    }
    return packed + outer * outer_stride_bytes + head * head_stride_bytes +
           WindowPlaces<Format::kWindowPlaces>::place(block) * Format::kBlockBytes;
  }
};

// A KV head of a sequence, and the run of its packed-GQA rows that a CTA attends with (Traits::kRuns).
struct Head {
  int sequence = 0;
  int head = 0;
  int run = 0;
};

struct AttendArgs {
  CacheArgs cache;
  Rows q, out;
  Rows k_new, v_new;             // decode: this step's tokens; null data for attend
  float* lse = nullptr;          // [batch, q_heads, q_len], natural logarithm; may be null
  const float* sinks = nullptr;  // [q_heads]: learned logits that join the denominator; null unless the variant has them
  void* workspace = nullptr;
  const int* plan = nullptr;  // the step's plan (kvgen/schedule/plan.hpp); null for the static scheduler
  int* overflow = nullptr;    // host memory; set to 1 if a sequence has no room for the step's tokens
  int q_len = 1;
  int max_len = 0;        // upper bound of every length after the call: sizes the launch and bounds the L2 prefetch; no result needs it
  int limit = 0;          // maximum length of a sequence
  int slots = 0;          // partial results in the workspace, of each run of packed-GQA rows
  int runs = 1;           // runs of packed-GQA rows of this call
  float scale = 1.f;      // multiplies q * k
  bool advance = false;   // decode: the launch advances the lengths
  bool one_wave = false;  // all CTAs of the launch are resident at once
  const float* scales = nullptr;  // static ones of K and of V, [2, kv_heads, head_dim] (format/static.cuh)
};

struct PackArgs {
  CacheArgs cache;
  Rows k, v;
  const int* new_lengths = nullptr;  // [batch]: tokens of each sequence to append, the first ones that k and v have of it
  const int* starts = nullptr;       // [batch + 1]: where a sequence's tokens begin in k and v, which have no batch; null where they do
  int tokens = 0;                    // extent of k and v
  int limit = 0;                     // maximum length of a sequence; one whose tokens do not fit is not changed
  int* overflow = nullptr;           // host memory; set to 1 then
  bool advance = true;               // advance the lengths
  const float* scales = nullptr;     // as in AttendArgs

  __device__ int start(int sequence) const { return starts ? starts[sequence] : 0; }
  __device__ int most(int sequence) const { return starts ? starts[sequence + 1] - starts[sequence] : tokens; }
  // Whether a sequence of `length` tokens takes `more`, which the host has not seen.
  __device__ bool fits(int sequence, int length, int more) const { return more >= 0 && more <= most(sequence) && more <= limit - length; }
};

struct UnpackArgs {
  CacheArgs cache;
  Rows k, v;
  const int* starts = nullptr;    // as in PackArgs
  int tokens = 0;                 // extent of k and v
  const float* scales = nullptr;  // as in AttendArgs

  __device__ int start(int sequence) const { return starts ? starts[sequence] : 0; }
  __device__ int most(int sequence) const { return starts ? starts[sequence + 1] - starts[sequence] : tokens; }
};

// What a CTA packs or unpacks of a head: the `nth` run of `kEach` tokens of a sequence, counted as its kernel does. Of c tokens a sequence
// has at least ceil(c / kEach) + kMore runs.
template <int kEach, int kMore = 0>
struct TokenRun {
  int sequence, nth, head;

  // With starts, runs are numbered through all sequences: those of sequence b begin at starts[b] / kEach + b * (1 + kMore). The tokens
  // before starts[0] are no sequence's: there `nth` is negative.
  template <class Args>
  __device__ static TokenRun of_cta(const Args& args) {
    const int heads = args.cache.kv_heads, run = static_cast<int>(blockIdx.x) / heads, head = static_cast<int>(blockIdx.x) % heads;
    if (!args.starts) return {static_cast<int>(blockIdx.y), run, head};
    const auto first = [&](int sequence) { return args.starts[sequence] / kEach + sequence * (1 + kMore); };
    int sequence = 0;
    for (int end = args.cache.batch; end - sequence > 1;) {
      const int middle = (sequence + end) / 2;
      (first(middle) <= run ? sequence : end) = middle;
    }
    return {sequence, run - first(sequence), head};
  }
  // The grid, where without starts a sequence has `runs` runs at most.
  template <class Args>
  static dim3 grid(const Args& args, int runs) {
    if (!args.starts) return dim3(args.cache.kv_heads * runs, args.cache.batch);
    return dim3(args.cache.kv_heads * (args.tokens / kEach + args.cache.batch * (1 + kMore)));
  }
};

}  // namespace kvgen
