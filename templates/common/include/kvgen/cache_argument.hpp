// The arguments of a cache, which most calls take, and the constants of a variant that they are checked against.
#pragma once

#include "kvgen/ffi.hpp"

namespace kvgen::ffi {

// Constants of a variant that arguments are checked against.
struct Variant {
  int q_heads, kv_heads, head_dim;
  int block;          // tokens per block (N_r)
  int residual_rows;  // rows of the residual tensors (kvgen/residual_rows.hpp)
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

}  // namespace kvgen::ffi
