// The calls of a module (pack, attend, decode, unpack, workspace_bytes), parsed and checked against the variant's constants.
#pragma once

#include <cmath>
#include <limits>

#include "kvgen/overlap.hpp"

namespace kvgen::ffi {

// Constants of a variant that arguments are checked against.
struct Variant {
  int q_heads, kv_heads, head_dim;
  int block;  // tokens per block (N_r)
  int64_t block_bytes;
  int page_blocks;   // blocks per page; 0 where the cache is contiguous
  DLDataType dtype;  // of q, k, v, the residual and the output
  int device_type;   // kDLCPU, kDLCUDA
  int row_align;     // bytes at whose multiples rows and blocks must start; 1 where any will do
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

struct Pack {
  View<4> k, v;
  View<1> new_lengths;
  Cache cache;
  DLDevice device{};
};

struct Attend {
  View<4> q, k_new, v_new;  // the new tokens are empty for `attend`
  Cache cache;
  View<4> out;
  View<3> lse;  // may be empty
  View<1> workspace;
  float scale = 0;
  int64_t max_len = 0;
  int64_t q_len = 0;
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

inline Args open(const Variant& v, const char* function, const TVMFFIAny* args, int32_t count, int32_t expected) {
  return Args(function, args, count, expected, {static_cast<DLDeviceType>(v.device_type), -1}, v.row_align);
}

// Arguments i.. : packed, k_residual, v_residual, lengths, block_table?; `packed` lies in one run of memory unless it is `rows`.
inline Cache parse_cache(Args& args, const Variant& v, int i, int64_t batch, Memory packed = Memory::blocks) {
  Cache cache;
  const bool paged = v.page_blocks > 0;
  cache.packed =
      args.tensor<4>(i, "packed", kUint8, {paged ? kAny : batch, v.kv_heads, paged ? v.page_blocks : kAny, v.block_bytes}, packed);
  if (cache.packed.size[2] > 1 && cache.packed.stride[2] != v.block_bytes) fail("ValueError", "the blocks of a head lie apart");
  cache.k_residual = args.tensor<4>(i + 1, "k_residual", v.dtype, {batch, v.kv_heads, v.block, v.head_dim}, Memory::blocks);
  cache.v_residual = args.tensor<4>(i + 2, "v_residual", v.dtype, {batch, v.kv_heads, v.block, v.head_dim}, Memory::blocks);
  cache.lengths = args.tensor<1>(i + 3, "lengths", kInt32, {batch}, Memory::contiguous);
  if (args.given(i + 4) != paged)
    fail("ValueError",
         paged ? "a paged cache needs block_table" : "block_table must be none: this kernel was built for a contiguous cache");
  if (paged) cache.block_table = args.tensor<2>(i + 4, "block_table", kInt32, {batch, kAny}, Memory::strided);
  cache.batch = batch;
  cache.pages = paged ? cache.packed.size[0] : 0;
  cache.blocks = paged ? cache.block_table.size[1] * v.page_blocks : cache.packed.size[2];
  return cache;
}

// (batch, max_len, q_len)
inline Bound parse_bound(const Variant& v, const char* function, const TVMFFIAny* args, int32_t count) {
  const Args a = open(v, function, args, count, 3);
  return {a.integer(0, "batch", 0), a.integer(1, "max_len", 0), a.integer(2, "q_len", 1)};
}

// (k, v, new_lengths, packed, k_residual, v_residual, lengths, block_table?)
inline Pack parse_pack(const Variant& v, const TVMFFIAny* args, int32_t count) {
  Args a = open(v, "pack", args, count, 8);
  Pack call;
  call.k = a.tensor<4>(0, "k", v.dtype, {kAny, kAny, v.kv_heads, v.head_dim}, Memory::rows);
  call.v = a.tensor<4>(1, "v", v.dtype, {call.k.size[0], call.k.size[1], v.kv_heads, v.head_dim}, Memory::rows);
  call.new_lengths = a.tensor<1>(2, "new_lengths", kInt32, {call.k.size[0]}, Memory::contiguous);
  call.cache = parse_cache(a, v, 3, call.k.size[0]);
  call.device = a.device();
  return call;
}

// Raises where `out` or `lse` lies on itself, on the other, or on what the call reads or keeps.
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
    from("workspace", call.workspace, 1);
  };
  check_once(function, "out", call.out, item);
  apart("out", call.out, item);
  if (!call.lse) return;
  apart("lse", call.lse, 4);
  check_apart(function, "out", call.out, item, "lse", call.lse, 4);
}

// attend: (q, packed, k_residual, v_residual, lengths, block_table?, out, lse?, workspace, scale, max_len);
// decode: k_new and v_new follow q.
inline Attend parse_attend(const Variant& v, const TVMFFIAny* args, int32_t count, bool decode) {
  const int extra = decode ? 2 : 0;
  Args a = open(v, decode ? "decode" : "attend", args, count, 11 + extra);
  Attend call;
  call.q = a.tensor<4>(0, "q", v.dtype, {kAny, kAny, v.q_heads, v.head_dim}, Memory::rows);
  const int64_t batch = call.q.size[0];
  call.q_len = call.q.size[1];
  if (decode) {
    call.k_new = a.tensor<4>(1, "k_new", v.dtype, {batch, call.q_len, v.kv_heads, v.head_dim}, Memory::rows);
    call.v_new = a.tensor<4>(2, "v_new", v.dtype, {batch, call.q_len, v.kv_heads, v.head_dim}, Memory::rows);
  }
  call.cache = parse_cache(a, v, 1 + extra, batch);
  call.out = a.tensor<4>(6 + extra, "out", v.dtype, {batch, call.q_len, v.q_heads, v.head_dim}, Memory::rows);
  if (a.given(7 + extra)) call.lse = a.tensor<3>(7 + extra, "lse", kFloat32, {batch, v.q_heads, call.q_len}, Memory::contiguous);
  call.workspace = a.tensor<1>(8 + extra, "workspace", kUint8, {kAny}, Memory::blocks);
  call.scale = static_cast<float>(a.real(9 + extra, "scale"));
  if (!(std::fabs(call.scale) * 1.4426950408889634f <= std::numeric_limits<float>::max()))
    fail("ValueError", "%s: scale must be finite, and float32 must hold it", decode ? "decode" : "attend");
  call.max_len = a.integer(10 + extra, "max_len", 0);
  call.device = a.device();
  check_outputs(v, decode ? "decode" : "attend", call);
  return call;
}

// (packed, k_residual, v_residual, lengths, block_table?, k, v); with `some_heads`, of any number of KV heads, all of them alike.
inline Unpack parse_unpack(Variant v, const TVMFFIAny* args, int32_t count, bool some_heads = false) {
  Args a = open(v, "unpack", args, count, 7);
  Unpack call;
  call.k = a.tensor<4>(5, "k", v.dtype, {kAny, kAny, some_heads ? kAny : v.kv_heads, v.head_dim}, Memory::rows);
  v.kv_heads = static_cast<int>(call.k.size[2]);
  call.v = a.tensor<4>(6, "v", v.dtype, {call.k.size[0], call.k.size[1], v.kv_heads, v.head_dim}, Memory::rows);
  call.cache = parse_cache(a, v, 0, call.k.size[0], some_heads ? Memory::rows : Memory::blocks);
  call.device = a.device();
  return call;
}

}  // namespace kvgen::ffi
