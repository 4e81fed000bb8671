// The calls of a module (docs/abi.md), parsed and checked against the constants of a variant. Members of a call are initialized in order,
// each from its argument.
#pragma once
#include <cmath>
#include <limits>

#include "kvgen/ffi.hpp"

namespace kvgen::ffi {

// Constants of a variant that arguments are checked against.
struct Variant {
  int q_heads, kv_heads, head_dim;
  int block;          // tokens per block (N_r)
  int residual_rows;  // rows of the residual tensors (kvgen/format.hpp)
  int64_t block_bytes;
  int page_blocks;             // blocks per page; 0 where the cache is contiguous
  DLDataType dtype;            // of q, k, v, the residual and the output
  int device_type;             // kDLCPU, kDLCUDA
  int row_align;               // bytes at whose multiples rows and blocks must start; 1 where any will do
  bool sinks;                  // whether a learned logit per query head joins the denominator
  bool static_scales = false;  // whether scales come with the cache
  bool slots = true;           // whether residuals may be found by residual_slots
};

struct Call : Args {
  const Variant& variant;

  Call(const Variant& v, const char* function, const TVMFFIAny* args, int32_t count, int32_t expected)
      : Args(function, args, count, expected, {static_cast<DLDeviceType>(v.device_type), -1}, v.row_align), variant(v) {}

  // Tensors [batch, tokens, heads, head_dim] in the variant's dtype, and int32 numbers of each sequence.
  View<4> rows(int i, const char* name, int64_t batch, int64_t tokens, int64_t heads) {
    return tensor<4>(i, name, variant.dtype, {batch, tokens, heads, variant.head_dim}, Memory::rows);
  }
  View<1> numbers(int i, const char* name, int64_t batch) { return tensor<1>(i, name, kInt32, {batch}, Memory::contiguous); }
  View<1> numbers_or_none(int i, const char* name, int64_t batch) { return given(i) ? numbers(i, name, batch) : View<1>{}; }
  // Static scales of K and of V; empty where blocks hold them.
  View<3> static_scales(int i, int64_t heads) {
    if (given(i) != variant.static_scales)
      fail("ValueError",
           variant.static_scales ? "this kernel needs the static scales of the cache" : "scales must be none: blocks hold them");
    return given(i) ? tensor<3>(i, "scales", kFloat32, {2, heads, variant.head_dim}, Memory::contiguous) : View<3>{};
  }
  // Address of the int that tells the host of an overflow, in memory that host and device reach. Only a plan may go without (0), and a
  // CPU, which raises.
  int* overflow_flag(int i, bool needed = true) const {
    return reinterpret_cast<int*>(integer(i, "overflow", needed && variant.device_type != kDLCPU));
  }
};

constexpr int kCacheArgs = 7;

// Arguments i.. : packed, k_residual, v_residual, lengths, block_table?, residual_slots?, scales?; `packed` lies in one run of memory
// unless it is `rows`.
struct Cache {
  View<4> packed, k_residual, v_residual;
  View<1> lengths;
  View<2> block_table;     // empty for contiguous caches
  View<1> residual_slots;  // empty where residuals lie in the order of sequences
  View<3> scales;          // static ones of K and of V; empty where blocks hold them
  int64_t batch;
  int64_t blocks;  // blocks that a sequence can hold
  int64_t pages;

  Cache(Call& call, int i, int64_t batch_, int64_t kv_heads, Memory memory = Memory::blocks) : batch(batch_) {
    const Variant& v = call.variant;
    const bool paged = v.page_blocks > 0;
    packed = call.tensor<4>(i, "packed", kUint8, {paged ? kAny : batch, kv_heads, paged ? v.page_blocks : kAny, v.block_bytes}, memory);
    if (packed.size[2] > 1 && packed.stride[2] != v.block_bytes) fail("ValueError", "the blocks of a head lie apart");
    const int64_t residuals = call.given(i + 5) ? kAny : batch;
    k_residual = call.tensor<4>(i + 1, "k_residual", v.dtype, {residuals, kv_heads, v.residual_rows, v.head_dim}, Memory::blocks);
    v_residual = call.tensor<4>(i + 2, "v_residual", v.dtype, {k_residual.size[0], kv_heads, v.residual_rows, v.head_dim}, Memory::blocks);
    lengths = call.numbers(i + 3, "lengths", batch);
    if (call.given(i + 4) != paged)
      fail("ValueError",
           paged ? "a paged cache needs block_table" : "block_table must be none: this kernel was built for a contiguous cache");
    if (paged) block_table = call.tensor<2>(i + 4, "block_table", kInt32, {batch, kAny}, Memory::strided);
    residual_slots = call.numbers_or_none(i + 5, "residual_slots", batch);
    if (residual_slots && !v.slots)
      fail("ValueError", "residual_slots must be none: this back end reads residuals in the order of sequences");
    scales = call.static_scales(i + 6, kv_heads);
    pages = paged ? packed.size[0] : 0;
    blocks = paged ? block_table.size[1] * v.page_blocks : packed.size[2];
  }
};

struct Bound : Call {
  using Call::Call;
  int64_t batch = integer(0, "batch", 0), max_len = integer(1, "max_len", 0), q_len = integer(2, "q_len", 1);
};

// K and V: [batch, tokens, ...], or with `starts` [tokens, ...] of all sequences, which `k` and `v` show as one of batch stride 0. Sequence
// b has the tokens from starts[b] to starts[b + 1].
struct Tokens : Call {
  Tokens(const Variant& v, const char* function, const TVMFFIAny* args, int32_t count, int32_t expected, int k_at, int starts_at, bool some)
      : Call(v, function, args, count, expected), some_heads(some), at(k_at), starts(numbers_or_none(starts_at, "starts", kAny)) {
    if (starts && starts.size[0] == 0) fail("ValueError", "%s: starts is empty: it needs a number more than there are sequences", function);
  }
  bool some_heads;
  int at;
  View<1> starts;
  View<4> k = tokens(at, "k", kAny, kAny, some_heads ? kAny : variant.kv_heads);
  View<4> v = tokens(at + 1, "v", k.size[0], k.size[1], k.size[2]);
  int64_t batch = starts ? starts.size[0] - 1 : k.size[0];

  // Where the tokens of a sequence begin, and how many it may have: on a CPU, which raises where they are none.
  int64_t start(int64_t b) const { return starts ? starts.as<int32_t>()[b] : 0; }
  int64_t most(int64_t b) const {
    if (!starts) return k.size[1];
    const int64_t end = starts.as<int32_t>()[b + 1];
    if (start(b) < 0 || end < start(b) || end > k.size[1])
      fail("ValueError", "%s: sequence %lld has the tokens from %lld to %lld, k has %lld", function, (long long)b, (long long)start(b),
           (long long)end, (long long)k.size[1]);
    return end - start(b);
  }

 private:
  View<4> tokens(int i, const char* name, int64_t batch_, int64_t count, int64_t heads) {
    if (!starts) return rows(i, name, batch_, count, heads);
    const View<3> all = tensor<3>(i, name, variant.dtype, {count, heads, variant.head_dim}, Memory::rows);
    return {all.data, {1, all.size[0], all.size[1], all.size[2]}, {0, all.stride[0], all.stride[1], all.stride[2]}};
  }
};

// (k, v, new_lengths, starts?, cache, limit, overflow, advance)
struct Pack : Tokens {
  Pack(const Variant& v, const TVMFFIAny* args, int32_t count) : Tokens(v, "pack", args, count, 4 + kCacheArgs + 3, 0, 3, false) {}
  View<1> new_lengths = numbers(2, "new_lengths", batch);
  Cache cache{*this, 4, batch, variant.kv_heads};
  int limit = int32(kCacheArgs + 4, "limit");      // most tokens of a sequence
  int* overflow = overflow_flag(kCacheArgs + 5);   // becomes 1 where one would have more
  bool advance = flag(kCacheArgs + 6, "advance");  // write the new lengths
};

// attend: (q, cache, out, lse?, sinks?, workspace, plan?, scale, max_len);
// decode: (q, k_new, v_new, cache, out, lse?, sinks?, workspace, plan?, scale, max_len, limit, overflow, advance).
struct Attend : Call {
  Attend(const Variant& v, const TVMFFIAny* args, int32_t count, bool decode_ = false)
      : Call(v, decode_ ? "decode" : "attend", args, count, kCacheArgs + (decode_ ? 13 : 8)), decode(decode_) {
    if (plan && plan.size[0] == 0) fail("ValueError", "%s: plan is empty: give none instead", function);
    if (!(std::fabs(scale) * 1.4426950408889634f <= std::numeric_limits<float>::max()))
      fail("ValueError", "%s: scale must be finite, and float32 must hold it", function);
    check_outputs();
  }

  bool decode;
  int at = (decode ? 3 : 1) + kCacheArgs;  // the argument behind the cache's
  View<4> q = rows(0, "q", kAny, kAny, variant.q_heads);
  int64_t q_len = q.size[1];
  View<4> k_new = decode ? rows(1, "k_new", q.size[0], q_len, variant.kv_heads) : View<4>{};  // empty for attend
  View<4> v_new = decode ? rows(2, "v_new", q.size[0], q_len, variant.kv_heads) : View<4>{};
  Cache cache{*this, at - kCacheArgs, q.size[0], variant.kv_heads};
  View<4> out = rows(at, "out", q.size[0], q_len, variant.q_heads);
  View<3> lse = given(at + 1) ? tensor<3>(at + 1, "lse", kFloat32, {q.size[0], variant.q_heads, q_len}, Memory::contiguous) : View<3>{};
  View<1> sinks = learned_sinks(at + 2);  // empty unless the variant has learned sinks
  View<1> workspace = tensor<1>(at + 3, "workspace", kUint8, {kAny}, Memory::blocks);
  View<1> plan = given(at + 4) ? tensor<1>(at + 4, "plan", kInt32, {kAny}, Memory::blocks) : View<1>{};
  float scale = static_cast<float>(real(at + 5, "scale"));
  int64_t max_len = integer(at + 6, "max_len", 0);
  int limit = decode ? int32(at + 7, "limit") : 0;  // decode: as in Pack, as the next two
  int* overflow = decode ? overflow_flag(at + 8) : nullptr;
  bool advance = decode && flag(at + 9, "advance");

 private:
  View<1> learned_sinks(int i) {
    if (given(i) != variant.sinks)
      fail("ValueError",
           variant.sinks ? "%s: this kernel needs sinks, a logit per query head"
                         : "%s: sinks must be none: this kernel has no learned sinks",
           function);
    return variant.sinks ? tensor<1>(i, "sinks", kFloat32, {variant.q_heads}, Memory::contiguous) : View<1>{};
  }

  // Raises where `out` or `lse` overlaps itself, the other, or a tensor that the call reads or updates.
  void check_outputs() const {
    const int64_t item = variant.dtype.bits / 8;
    const auto apart = [&](const char* name, const auto& written, int64_t size) {
      const auto from = [&](const char* other_name, const auto& other, int64_t other_size) {
        check_apart(function, name, written, size, other_name, other, other_size);
      };
      from("q", q, item), from("k_new", k_new, item), from("v_new", v_new, item);
      from("packed", cache.packed, 1), from("k_residual", cache.k_residual, item), from("v_residual", cache.v_residual, item);
      from("lengths", cache.lengths, 4), from("block_table", cache.block_table, 4);
      from("residual_slots", cache.residual_slots, 4), from("sinks", sinks, 4);
      from("workspace", workspace, 1), from("plan", plan, 4);
    };
    check_once(function, "out", out, item);
    apart("out", out, item);
    if (!lse) return;
    apart("lse", lse, 4);
    check_apart(function, "out", out, item, "lse", lse, 4);
  }
};

struct Decode : Attend {
  Decode(const Variant& v, const TVMFFIAny* args, int32_t count) : Attend(v, args, count, true) {}
};

// Tokens to be written to their slots, where they are quantized as they arrive; no lengths are involved.
struct Write : Call {
  Write(const Variant& v, const TVMFFIAny* args, int32_t count) : Call(v, "write", args, count, 5) {}
  View<3> k = tensor<3>(0, "k", variant.dtype, {kAny, variant.kv_heads, variant.head_dim}, Memory::rows);
  View<3> v = tensor<3>(1, "v", variant.dtype, {k.size[0], variant.kv_heads, variant.head_dim}, Memory::rows);
  View<4> packed =
      tensor<4>(2, "packed", kUint8, {kAny, variant.kv_heads, variant.page_blocks > 0 ? variant.page_blocks : kAny, variant.block_bytes},
                Memory::blocks);
  View<1> slots = tensor<1>(3, "slots", kInt64, {k.size[0]}, Memory::contiguous);
  View<3> scales = static_scales(4, variant.kv_heads);
};

// The plan of a step, to be made.
struct Plan : Call {
  Plan(const Variant& v, const TVMFFIAny* args, int32_t count) : Call(v, "plan", args, count, 7) {}
  View<1> lengths = numbers(0, "lengths", kAny);
  View<1> plan = tensor<1>(1, "plan", kInt32, {kAny}, Memory::blocks);
  int64_t q_len = integer(2, "q_len", 1);
  bool append = flag(3, "append"), skip_empty = flag(4, "skip_empty");
  int limit = int32(5, "limit");
  int* overflow = overflow_flag(6, false);
};

// Lengths that advance by `counts`, or, where these are empty, by `tokens` each.
struct Advance : Call {
  Advance(const Variant& v, const TVMFFIAny* args, int32_t count) : Call(v, "advance", args, count, 5) {}
  View<1> lengths = numbers(0, "lengths", kAny);
  View<1> counts = numbers_or_none(1, "counts", lengths.size[0]);
  int tokens = int32(2, "tokens"), limit = int32(3, "limit");
  int* overflow = overflow_flag(4);
};

// Lengths that go back by `counts`, or, where these are empty, by `tokens` each.
struct Crop : Call {
  Crop(const Variant& v, const TVMFFIAny* args, int32_t count) : Call(v, "crop", args, count, 6) {}
  View<1> lengths = numbers(0, "lengths", kAny), least = numbers(1, "least", lengths.size[0]);
  View<1> counts = numbers_or_none(2, "counts", lengths.size[0]);
  int tokens = int32(3, "tokens"), rollback = int32(4, "rollback");
  int* overflow = overflow_flag(5);
};

// (cache, starts?, k, v). On a GPU these may be views of fewer KV heads, the same number in each.
struct Unpack : Tokens {
  Unpack(const Variant& v, const TVMFFIAny* args, int32_t count)
      : Tokens(v, "unpack", args, count, kCacheArgs + 3, kCacheArgs + 1, kCacheArgs, v.device_type != kDLCPU) {}
  Cache cache{*this, 0, batch, k.size[2], some_heads ? Memory::rows : Memory::blocks};
};

}  // namespace kvgen::ffi

// An exported function: a question, answered by an int, or a call of a type of kvgen::ffi.
#define KVGEN_EXPORT_QUESTION(Module, name)                                                 \
  KVGEN_EXPORT(name) {                                                                      \
    return kvgen::ffi::guard(result, [&](TVMFFIAny& to) {                                   \
      to.v_int64 = Module::name(kvgen::ffi::Bound(Module::variant, #name, args, count, 3)); \
      return true;                                                                          \
    });                                                                                     \
  }
#define KVGEN_EXPORT_CALL(Module, name, function, Type)                 \
  KVGEN_EXPORT(name) {                                                  \
    return kvgen::ffi::guard(result, [&](TVMFFIAny&) {                  \
      Module::function(kvgen::ffi::Type(Module::variant, args, count)); \
      return false;                                                     \
    });                                                                 \
  }
#define KVGEN_EXPORT_MODULE(Module)                    \
  KVGEN_EXPORT_QUESTION(Module, workspace_bytes)       \
  KVGEN_EXPORT_QUESTION(Module, split_tokens)          \
  KVGEN_EXPORT_QUESTION(Module, plan_size)             \
  KVGEN_EXPORT_CALL(Module, plan, plan, Plan)          \
  KVGEN_EXPORT_CALL(Module, advance, advance, Advance) \
  KVGEN_EXPORT_CALL(Module, crop, crop, Crop)          \
  KVGEN_EXPORT_CALL(Module, pack, pack, Pack)          \
  KVGEN_EXPORT_CALL(Module, attend, attend, Attend)    \
  KVGEN_EXPORT_CALL(Module, decode, attend, Decode)    \
  KVGEN_EXPORT_CALL(Module, unpack, unpack, Unpack)
