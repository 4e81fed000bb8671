// The exported functions of a CPU module, for one configuration.
#pragma once

#include <omp.h>
#include <unistd.h>

#include "kvgen/append.hpp"
#include "kvgen/attend.hpp"

namespace kvgen {

// Shares [0, count) between the threads of the enclosing parallel region and waits for all of them.
template <class F>
inline void share_out(int64_t count, F f) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) f(i);
}

// Raises for more threads than the machine has processors: they would only wait for each other, and a million cannot be started.
inline void check_threads(int64_t count) {
  const int64_t most = sysconf(_SC_NPROCESSORS_ONLN);
  if (count > most)
    ffi::fail("ValueError", "set_threads: %lld threads are more than the machine's %lld processors", (long long)count, (long long)most);
}

template <class C>
class Module {
 public:
  static constexpr ffi::Variant variant{C::q_heads,     C::kv_heads, C::head_dim, C::block, C::block_bytes,
                                        C::page_blocks, C::dtype,    kDLCPU,      1};

  static int64_t workspace_bytes(const ffi::Bound& bound) { return Plan<C>(bound.batch, bound.q_len, bound.max_len).workspace_bytes(); }

  // Tokens of a split for this bound; 0 where sequences are not split.
  static int64_t split_tokens(const ffi::Bound& bound) {
    const Plan<C> plan(bound.batch, bound.q_len, bound.max_len);
    return plan.shares > 1 ? plan.share_tokens : 0;
  }

  static void pack(const ffi::Pack& call) {
    const CacheView<C> cache(call.cache);
    const int32_t* more = call.new_lengths.as<int32_t>();
    int64_t most_blocks = 0;
    for (int64_t b = 0; b < call.cache.batch; ++b) {
      if (more[b] > call.k.size[1])
        ffi::fail("ValueError", "pack: new_lengths[%lld] is %d, k has %lld tokens", (long long)b, more[b], (long long)call.k.size[1]);
      cache.check(b, more[b]);
      const int64_t blocks = (cache.length(b) % C::block + more[b]) / C::block;
      most_blocks = blocks > most_blocks ? blocks : most_blocks;
    }
    const auto appended = [&](int64_t b, int64_t head) { return Append<C>(cache, call.k, call.v, b, head, more[b]); };
#pragma omp parallel num_threads(threads())
    append(call.cache.batch, most_blocks, appended);
    for (int64_t b = 0; b < call.cache.batch; ++b) cache.length(b) += more[b];
  }

  static void attend(const ffi::Attend& call, bool decode) {
    const CacheView<C> cache(call.cache);
    const int64_t batch = call.cache.batch;
    int64_t most_blocks = 0;
    for (int64_t b = 0; b < batch; ++b) {
      cache.check(b, decode ? call.q_len : 0);
      const int64_t blocks = decode ? (cache.length(b) % C::block + call.q_len) / C::block : 0;
      most_blocks = blocks > most_blocks ? blocks : most_blocks;
    }
    const Plan<C> plan(batch, call.q_len, call.max_len);
    if (plan.workspace_bytes() > call.workspace.size[0])
      ffi::fail("ValueError", "workspace has %lld bytes, this call needs %lld", (long long)call.workspace.size[0],
                (long long)plan.workspace_bytes());
    const Attention<C> attention(call, plan);
    const auto appended = [&](int64_t b, int64_t head) { return Append<C>(cache, call.k_new, call.v_new, b, head, call.q_len); };
#pragma omp parallel num_threads(threads())
    {
      share_out(plan.units(), [&](int64_t i) { attention.unit(i); });
      if (plan.shares > 1) share_out(batch * C::kv_heads, [&](int64_t i) { attention.merge(i / C::kv_heads, i % C::kv_heads); });
      if (decode) append(batch, most_blocks, appended);
    }
    if (decode)
      for (int64_t b = 0; b < batch; ++b) cache.length(b) += static_cast<int32_t>(call.q_len);
  }

  static void unpack(const ffi::Unpack& call) {
    using Element = typename C::Element;
    const CacheView<C> cache(call.cache);
    const int64_t batch = call.cache.batch, per = call.cache.blocks + 1;  // the last one stands for the residual
    for (int64_t b = 0; b < batch; ++b) {
      cache.check(b, 0);
      if (cache.length(b) > call.k.size[1])
        ffi::fail("ValueError", "unpack: k has %lld tokens, sequence %lld has %d", (long long)call.k.size[1], (long long)b,
                  cache.length(b));
    }
#pragma omp parallel num_threads(threads())
    share_out(batch * C::kv_heads * per, [&](int64_t i) {
      const int64_t index = i % per, head = i / per % C::kv_heads, b = i / per / C::kv_heads;
      const int64_t full = cache.length(b) / C::block;
      if (index < full) unpack_block<C>(cache.block(b, head, index), call.k, call.v, b, head, index * C::block);
      if (index != full) return;
      for (int64_t slot = 0; slot < cache.length(b) % C::block; ++slot) {
        std::memcpy(row_of<Element>(call.k, b, full * C::block + slot, head), cache.k_slot(b, head, slot), sizeof(Element) * C::head_dim);
        std::memcpy(row_of<Element>(call.v, b, full * C::block + slot, head), cache.v_slot(b, head, slot), sizeof(Element) * C::head_dim);
      }
    });
  }

  static void set_threads(int64_t n) { chosen_threads = static_cast<int>(n); }

 private:
  static inline int chosen_threads = 0;  // 0: as many as OpenMP says, which torch.set_num_threads governs

  static int threads() { return chosen_threads > 0 ? chosen_threads : omp_get_max_threads(); }

  // Within a parallel region: blocks that become full, then what is left.
  template <class Appended>
  static void append(int64_t batch, int64_t most_blocks, const Appended& appended) {
    if (most_blocks > 0)
      share_out(batch * C::kv_heads * most_blocks, [&](int64_t i) {
        const int64_t index = i % most_blocks, head = i / most_blocks % C::kv_heads, b = i / most_blocks / C::kv_heads;
        const Append<C> tokens = appended(b, head);
        if (index < tokens.full_blocks()) tokens.pack(index);
      });
    share_out(batch * C::kv_heads, [&](int64_t i) { appended(i / C::kv_heads, i % C::kv_heads).keep_rest(); });
  }
};

}  // namespace kvgen

// Exports the functions of the module ABI for configuration C.
#define KVGEN_CPU_MODULE(C)                                                                                                               \
  KVGEN_EXPORT(workspace_bytes) {                                                                                                         \
    return kvgen::ffi::guard(result, [&](TVMFFIAny& to) {                                                                                 \
      to.v_int64 = kvgen::Module<C>::workspace_bytes(kvgen::ffi::parse_bound(kvgen::Module<C>::variant, "workspace_bytes", args, count)); \
      return true;                                                                                                                        \
    });                                                                                                                                   \
  }                                                                                                                                       \
  KVGEN_EXPORT(split_tokens) {                                                                                                            \
    return kvgen::ffi::guard(result, [&](TVMFFIAny& to) {                                                                                 \
      to.v_int64 = kvgen::Module<C>::split_tokens(kvgen::ffi::parse_bound(kvgen::Module<C>::variant, "split_tokens", args, count));       \
      return true;                                                                                                                        \
    });                                                                                                                                   \
  }                                                                                                                                       \
  KVGEN_EXPORT(pack) {                                                                                                                    \
    return kvgen::ffi::guard(result, [&](TVMFFIAny&) {                                                                                    \
      kvgen::Module<C>::pack(kvgen::ffi::parse_pack(kvgen::Module<C>::variant, args, count));                                             \
      return false;                                                                                                                       \
    });                                                                                                                                   \
  }                                                                                                                                       \
  KVGEN_EXPORT(attend) {                                                                                                                  \
    return kvgen::ffi::guard(result, [&](TVMFFIAny&) {                                                                                    \
      kvgen::Module<C>::attend(kvgen::ffi::parse_attend(kvgen::Module<C>::variant, args, count, false), false);                           \
      return false;                                                                                                                       \
    });                                                                                                                                   \
  }                                                                                                                                       \
  KVGEN_EXPORT(decode) {                                                                                                                  \
    return kvgen::ffi::guard(result, [&](TVMFFIAny&) {                                                                                    \
      kvgen::Module<C>::attend(kvgen::ffi::parse_attend(kvgen::Module<C>::variant, args, count, true), true);                             \
      return false;                                                                                                                       \
    });                                                                                                                                   \
  }                                                                                                                                       \
  KVGEN_EXPORT(unpack) {                                                                                                                  \
    return kvgen::ffi::guard(result, [&](TVMFFIAny&) {                                                                                    \
      kvgen::Module<C>::unpack(kvgen::ffi::parse_unpack(kvgen::Module<C>::variant, args, count));                                         \
      return false;                                                                                                                       \
    });                                                                                                                                   \
  }                                                                                                                                       \
  KVGEN_EXPORT(set_threads) {                                                                                                             \
    return kvgen::ffi::guard(result, [&](TVMFFIAny&) {                                                                                    \
      if (count != 1 || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 0)                                                          \
        kvgen::ffi::fail("TypeError", "set_threads takes one int, at least 0");                                                           \
      kvgen::check_threads(args[0].v_int64);                                                                                              \
      kvgen::Module<C>::set_threads(args[0].v_int64);                                                                                     \
      return false;                                                                                                                       \
    });                                                                                                                                   \
  }
