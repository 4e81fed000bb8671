// The calls of a module (docs/abi.md), parsed and checked against the constants of a variant.
#pragma once
#include <cmath>
#include <limits>

#include "kvgen/ffi.hpp"
#include "kvgen/overlap.hpp"

namespace kvgen::ffi {

// The arguments of a cache, which most calls take, and the constants of a variant that they are checked against.

// Constants of a variant that arguments are checked against.
struct Variant {
  int q_heads, kv_heads, head_dim;
  int block;          // tokens per block (N_r)
  int residual_rows;  // rows of the residual tensors (kvgen/format.hpp)
  int64_t block_bytes;
  int page_blocks;   // blocks per page; 0 where the cache is contiguous
  DLDataType dtype;  // of q, k, v, the residual and the output
  int device_type;   // kDLCPU, kDLCUDA
  int row_align;     // bytes at whose multiples rows and blocks must start; 1 where any will do
  bool sinks;        // whether a learned logit per query head joins the denominator
};

struct Cache {
  View<4> packed;
  View<4> k_residual, v_residual;
  View<1> lengths;
  View<2> block_table;  // empty for contiguous caches
  int64_t batch = 0;
  int64_t blocks = 0;  // blocks that a sequence can hold
  int64_t pages = 0;
};

inline Args open(const Variant& v, const char* function, const TVMFFIAny* args, int32_t count, int32_t expected) {
  return Args(function, args, count, expected, {static_cast<DLDeviceType>(v.device_type), -1}, v.row_align);
}

// Arguments of a cache.
constexpr int kCacheArgs = 6;

// Arguments i.. : packed, k_residual, v_residual, lengths, block_table?, residual_slots?; `packed` lies in one run of memory unless it is
// `rows`. residual_slots is reserved for an index from sequence to residual.
inline Cache parse_cache(Args& args, const Variant& v, int i, int64_t batch, Memory packed = Memory::blocks) {
  Cache cache;
  const bool paged = v.page_blocks > 0;
  cache.packed =
      args.tensor<4>(i, "packed", kUint8, {paged ? kAny : batch, v.kv_heads, paged ? v.page_blocks : kAny, v.block_bytes}, packed);
  if (cache.packed.size[2] > 1 && cache.packed.stride[2] != v.block_bytes) fail("ValueError", "the blocks of a head lie apart");
  cache.k_residual = args.tensor<4>(i + 1, "k_residual", v.dtype, {batch, v.kv_heads, v.residual_rows, v.head_dim}, Memory::blocks);
  cache.v_residual = args.tensor<4>(i + 2, "v_residual", v.dtype, {batch, v.kv_heads, v.residual_rows, v.head_dim}, Memory::blocks);
  cache.lengths = args.tensor<1>(i + 3, "lengths", kInt32, {batch}, Memory::contiguous);
  if (args.given(i + 4) != paged)
    fail("ValueError",
         paged ? "a paged cache needs block_table" : "block_table must be none: this kernel was built for a contiguous cache");
  if (paged) cache.block_table = args.tensor<2>(i + 4, "block_table", kInt32, {batch, kAny}, Memory::strided);
  if (args.given(i + 5)) fail("ValueError", "residual_slots must be none: residuals lie in the order of sequences");
  cache.batch = batch;
  cache.pages = paged ? cache.packed.size[0] : 0;
  cache.blocks = paged ? cache.block_table.size[1] * v.page_blocks : cache.packed.size[2];
  return cache;
}

struct Pack {
  View<4> k, v;
  View<1> new_lengths;
  Cache cache;
  int64_t limit = 0;        // most tokens of a sequence
  int* overflow = nullptr;  // becomes 1 where one would have more
  bool advance = true;      // write the new lengths
  DLDevice device{};
};

struct Attend {
  View<4> q, k_new, v_new;  // the new tokens are empty for `attend`
  Cache cache;
  View<4> out;
  View<3> lse;    // may be empty
  View<1> sinks;  // empty unless the variant has learned sinks
  View<1> workspace;
  View<1> plan;  // may be empty
  float scale = 0;
  int64_t max_len = 0;
  int64_t q_len = 0;
  int64_t limit = 0;  // decode: as in Pack, as the next two
  int* overflow = nullptr;
  bool advance = false;
  DLDevice device{};
};

// The plan of a step, to be made.
struct Plan {
  View<1> lengths, plan;
  int64_t q_len = 0, limit = 0;
  bool append = false, skip_empty = false;
  int* overflow = nullptr;
  DLDevice device{};
};

// Lengths that advance by `counts`, or, where these are empty, by `tokens` each.
struct Advance {
  View<1> lengths, counts;
  int64_t tokens = 0, limit = 0;
  int* overflow = nullptr;
  DLDevice device{};
};

// Lengths that go back by `counts`, or, where these are empty, by `tokens` each.
struct Crop {
  View<1> lengths, least, counts;
  int64_t tokens = 0, rollback = 0;
  int* overflow = nullptr;
  DLDevice device{};
};

struct Unpack {
  Cache cache;
  View<4> k, v;
  DLDevice device{};
};

struct Bound {
  int64_t batch, max_len, q_len;
};

// Address of the int that tells the host of an overflow, in memory that host and device reach. Only a plan may go without (0), and a CPU,
// which raises.
inline int* overflow_flag(const Args& a, int i, bool needed) { return reinterpret_cast<int*>(a.integer(i, "overflow", needed ? 1 : 0)); }

// (batch, max_len, q_len)
inline Bound parse_bound(const Variant& v, const char* function, const TVMFFIAny* args, int32_t count) {
  const Args a = open(v, function, args, count, 3);
  return {a.integer(0, "batch", 0), a.integer(1, "max_len", 0), a.integer(2, "q_len", 1)};
}

// (k, v, new_lengths, cache, limit, overflow, advance)
inline Pack parse_pack(const Variant& v, const TVMFFIAny* args, int32_t count) {
  Args a = open(v, "pack", args, count, 3 + kCacheArgs + 3);
  Pack call;
  call.k = a.tensor<4>(0, "k", v.dtype, {kAny, kAny, v.kv_heads, v.head_dim}, Memory::rows);
  call.v = a.tensor<4>(1, "v", v.dtype, {call.k.size[0], call.k.size[1], v.kv_heads, v.head_dim}, Memory::rows);
  call.new_lengths = a.tensor<1>(2, "new_lengths", kInt32, {call.k.size[0]}, Memory::contiguous);
  call.cache = parse_cache(a, v, 3, call.k.size[0]);
  const int i = 3 + kCacheArgs;
  call.limit = a.integer(i, "limit", 0);
  call.overflow = overflow_flag(a, i + 1, v.device_type != kDLCPU);
  call.advance = a.integer(i + 2, "advance", 0) != 0;
  call.device = a.device();
  return call;
}

// Raises where `out` or `lse` overlaps itself, the other, or a tensor that the call reads or updates.
inline void check_outputs(const Variant& v, const char* function, const Attend& call) {
  const int64_t item = v.dtype.bits / 8;
  const auto apart = [&](const char* name, const auto& written, int64_t size) {
    const auto from = [&](const char* other_name, const auto& other, int64_t other_size) {
      check_apart(function, name, written, size, other_name, other, other_size);
    };
    from("q", call.q, item);
    from("k_new", call.k_new, item);
    from("v_new", call.v_new, item);
    from("packed", call.cache.packed, 1);
    from("k_residual", call.cache.k_residual, item);
    from("v_residual", call.cache.v_residual, item);
    from("lengths", call.cache.lengths, 4);
    from("block_table", call.cache.block_table, 4);
    from("sinks", call.sinks, 4);
    from("workspace", call.workspace, 1);
    from("plan", call.plan, 4);
  };
  check_once(function, "out", call.out, item);
  apart("out", call.out, item);
  if (!call.lse) return;
  apart("lse", call.lse, 4);
  check_apart(function, "out", call.out, item, "lse", call.lse, 4);
}

// attend: (q, cache, out, lse?, sinks?, workspace, plan?, scale, max_len);
// decode: (q, k_new, v_new, cache, out, lse?, sinks?, workspace, plan?, scale, max_len, limit, overflow, advance).
inline Attend parse_attend(const Variant& v, const TVMFFIAny* args, int32_t count, bool decode) {
  const char* name = decode ? "decode" : "attend";
  Args a = open(v, name, args, count, decode ? 19 : 14);
  Attend call;
  call.q = a.tensor<4>(0, "q", v.dtype, {kAny, kAny, v.q_heads, v.head_dim}, Memory::rows);
  const int64_t batch = call.q.size[0];
  call.q_len = call.q.size[1];
  if (decode) {
    call.k_new = a.tensor<4>(1, "k_new", v.dtype, {batch, call.q_len, v.kv_heads, v.head_dim}, Memory::rows);
    call.v_new = a.tensor<4>(2, "v_new", v.dtype, {batch, call.q_len, v.kv_heads, v.head_dim}, Memory::rows);
  }
  int i = decode ? 3 : 1;
  call.cache = parse_cache(a, v, i, batch);
  i += kCacheArgs;
  call.out = a.tensor<4>(i, "out", v.dtype, {batch, call.q_len, v.q_heads, v.head_dim}, Memory::rows);
  if (a.given(i + 1)) call.lse = a.tensor<3>(i + 1, "lse", kFloat32, {batch, v.q_heads, call.q_len}, Memory::contiguous);
  if (a.given(i + 2) != v.sinks)
    fail("ValueError",
         v.sinks ? "%s: this kernel needs sinks, a logit per query head" : "%s: sinks must be none: this kernel has no learned sinks",
         name);
  if (v.sinks) call.sinks = a.tensor<1>(i + 2, "sinks", kFloat32, {v.q_heads}, Memory::contiguous);
  call.workspace = a.tensor<1>(i + 3, "workspace", kUint8, {kAny}, Memory::blocks);
  if (a.given(i + 4)) {
    call.plan = a.tensor<1>(i + 4, "plan", kInt32, {kAny}, Memory::blocks);
    if (call.plan.size[0] == 0) fail("ValueError", "%s: plan is empty: give none instead", name);
  }
  call.scale = static_cast<float>(a.real(i + 5, "scale"));
  if (!(std::fabs(call.scale) * 1.4426950408889634f <= std::numeric_limits<float>::max()))
    fail("ValueError", "%s: scale must be finite, and float32 must hold it", name);
  call.max_len = a.integer(i + 6, "max_len", 0);
  if (decode) {
    call.limit = a.integer(i + 7, "limit", 0);
    call.overflow = overflow_flag(a, i + 8, v.device_type != kDLCPU);
    call.advance = a.integer(i + 9, "advance", 0) != 0;
  }
  call.device = a.device();
  check_outputs(v, name, call);
  return call;
}

// (lengths, plan, q_len, append, skip_empty, limit, overflow)
inline Plan parse_plan(const Variant& v, const TVMFFIAny* args, int32_t count) {
  Args a = open(v, "plan", args, count, 7);
  Plan call;
  call.lengths = a.tensor<1>(0, "lengths", kInt32, {kAny}, Memory::contiguous);
  call.plan = a.tensor<1>(1, "plan", kInt32, {kAny}, Memory::blocks);
  call.q_len = a.integer(2, "q_len", 1);
  call.append = a.integer(3, "append", 0) != 0;
  call.skip_empty = a.integer(4, "skip_empty", 0) != 0;
  call.limit = a.integer(5, "limit", 0);
  call.overflow = overflow_flag(a, 6, false);
  call.device = a.device();
  return call;
}

// (lengths, counts?, tokens, limit, overflow)
inline Advance parse_advance(const Variant& v, const TVMFFIAny* args, int32_t count) {
  Args a = open(v, "advance", args, count, 5);
  Advance call;
  call.lengths = a.tensor<1>(0, "lengths", kInt32, {kAny}, Memory::contiguous);
  if (a.given(1)) call.counts = a.tensor<1>(1, "counts", kInt32, {call.lengths.size[0]}, Memory::contiguous);
  call.tokens = a.integer(2, "tokens", 0);
  call.limit = a.integer(3, "limit", 0);
  call.overflow = overflow_flag(a, 4, v.device_type != kDLCPU);
  call.device = a.device();
  return call;
}

// (lengths, least, counts?, tokens, rollback, overflow)
inline Crop parse_crop(const Variant& v, const TVMFFIAny* args, int32_t count) {
  Args a = open(v, "crop", args, count, 6);
  Crop call;
  call.lengths = a.tensor<1>(0, "lengths", kInt32, {kAny}, Memory::contiguous);
  call.least = a.tensor<1>(1, "least", kInt32, {call.lengths.size[0]}, Memory::contiguous);
  if (a.given(2)) call.counts = a.tensor<1>(2, "counts", kInt32, {call.lengths.size[0]}, Memory::contiguous);
  call.tokens = a.integer(3, "tokens", 0);
  call.rollback = a.integer(4, "rollback", 0);
  call.overflow = overflow_flag(a, 5, v.device_type != kDLCPU);
  call.device = a.device();
  return call;
}

// (cache, k, v). With `some_heads`, these may be views of fewer KV heads, the same number in each.
inline Unpack parse_unpack(Variant v, const TVMFFIAny* args, int32_t count, bool some_heads = false) {
  Args a = open(v, "unpack", args, count, kCacheArgs + 2);
  Unpack call;
  call.k = a.tensor<4>(kCacheArgs, "k", v.dtype, {kAny, kAny, some_heads ? kAny : v.kv_heads, v.head_dim}, Memory::rows);
  v.kv_heads = static_cast<int>(call.k.size[2]);
  call.v = a.tensor<4>(kCacheArgs + 1, "v", v.dtype, {call.k.size[0], call.k.size[1], v.kv_heads, v.head_dim}, Memory::rows);
  call.cache = parse_cache(a, v, 0, call.k.size[0], some_heads ? Memory::rows : Memory::blocks);
  call.device = a.device();
  return call;
}

}  // namespace kvgen::ffi
