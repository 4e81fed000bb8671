// The exported functions of a variant. They check arguments and launch kernels on torch's current stream. The back ends share all but the
// attention kernel.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include "kvgen/calls.hpp"
#include "kvgen/host/checks.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/pack/pack.cuh"
#include "kvgen/pack/unpack.cuh"

namespace kvgen {

// Format and Schedule are those of the kernels. Shape has kKvHeads and kSinks. Attend_ has
// kMaxBatch, workspace_bytes(batch, kv_heads, max_len, q_len), split_tokens, plan_shape, and launch(AttendArgs, append, stream).
template <class Format, class Schedule, class Shape, class Attend_>
struct Exports {
  using Attend = Attend_;
  static constexpr int kQHeads = Schedule::kGroup * Shape::kKvHeads;

  static ffi::Variant variant() {
    constexpr bool kHalf = std::is_same_v<typename Format::Element, Half>;
    return {kQHeads,
            Shape::kKvHeads,
            Format::kHeadDim,
            Format::kTokens,
            Format::ResidualRows::kRows,
            Format::kBlockBytes,
            Format::kPageBlocks,
            kHalf ? ffi::kFloat16 : ffi::kBfloat16,
            kDLCUDA,
            16,
            Shape::kSinks};
  }

  static int workspace_bytes(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny& answer) {
      const ffi::Bound bound = host_bound("workspace_bytes", args, count);
      answer.v_int64 = workspace("workspace_bytes", bound.batch, bound.max_len, bound.q_len);
      return true;
    });
  }

  static int split_tokens(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny& answer) {
      const ffi::Bound bound = host_bound("split_tokens", args, count);
      answer.v_int64 = Attend::split_tokens(static_cast<int>(bound.batch), Shape::kKvHeads,
                                            detail::to_int("split_tokens", "max_len", bound.max_len), static_cast<int>(bound.q_len));
      return true;
    });
  }

  static int pack(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Pack call = ffi::parse_pack(variant(), args, count);
      if (call.k.size[0] == 0 || call.k.size[1] == 0) return false;
      const detail::DeviceScope scope(call.device.device_id, "pack");
      PackArgs a;
      a.cache = cache_args(call.cache);
      a.k = detail::rows(call.k);
      a.v = detail::rows(call.v);
      a.new_lengths = call.new_lengths.as<int>();
      a.tokens = detail::to_int("pack", "the number of tokens", call.k.size[1]);
      a.limit = detail::to_int("pack", "limit", call.limit);
      a.overflow = call.overflow, a.advance = call.advance;
      detail::check(launch_pack<Format>(a, stream(call.device)), "pack");
      return false;
    });
  }

  static int attend(const TVMFFIAny* args, int32_t count, TVMFFIAny* result, bool append) {
    const char* name = append ? "decode" : "attend";
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Attend call = ffi::parse_attend(variant(), args, count, append);
      if (call.cache.batch == 0 || call.q_len == 0) return false;
      const detail::DeviceScope scope(call.device.device_id, name);  // of whose multiprocessors the workspace is a function, too
      const int64_t needed = workspace(name, call.cache.batch, call.max_len, call.q_len);
      if (call.workspace.size[0] < needed)
        ffi::fail("ValueError", "%s: workspace has %lld bytes, this call needs %lld", name, static_cast<long long>(call.workspace.size[0]),
                  static_cast<long long>(needed));
      AttendArgs a;
      a.cache = cache_args(call.cache);
      a.q = detail::rows(call.q);
      a.out = detail::rows(call.out);
      a.k_new = detail::rows(call.k_new);
      a.v_new = detail::rows(call.v_new);
      a.lse = call.lse.as<float>();
      a.sinks = call.sinks.as<float>();
      a.workspace = call.workspace.data;
      a.q_len = static_cast<int>(call.q_len);
      a.max_len = static_cast<int>(call.max_len);
      a.scale = call.scale;
      a.limit = detail::to_int(name, "limit", call.limit);
      a.overflow = call.overflow, a.advance = call.advance;
      a.plan = call.plan.as<int>();
      if (a.plan) check_plan(name, call.plan, shape(name, a.cache.batch, call.q_len, append));
      detail::check(Attend::launch(a, append, stream(call.device)), name);
      if (!append || !a.plan || !a.advance) return false;  // the static scheduler's launch advances the lengths itself
      const AdvanceArgs advance{a.cache.lengths, a.cache.batch, nullptr, a.q_len, false, a.limit, a.overflow};
      detail::check(launch_advance(advance, stream(call.device), Schedule::kOverlap), name);
      return false;
    });
  }

  static int plan_size(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny& answer) {
      const ffi::Bound bound = host_bound("plan_size", args, count);
      answer.v_int64 = shape("plan_size", bound.batch, bound.q_len, false).size();
      return true;
    });
  }

  static int plan(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Plan call = ffi::parse_plan(variant(), args, count);
      if (call.lengths.size[0] == 0) return false;
      const detail::DeviceScope scope(call.device.device_id, "plan");
      PlanArgs a;
      a.shape = shape("plan", call.lengths.size[0], call.q_len, call.append);
      if (!a.shape.countable(detail::to_int("plan", "limit", call.limit)))
        ffi::fail("ValueError", "plan: %d sequences of up to %lld tokens are more than it can count", a.shape.batch,
                  static_cast<long long>(call.limit));
      check_plan("plan", call.plan, a.shape);
      a.lengths = call.lengths.as<int>(), a.plan = call.plan.as<int>(), a.overflow = call.overflow;
      a.limit = static_cast<int>(call.limit), a.skip_empty = call.skip_empty;
      detail::check(launch_plan(a, stream(call.device), Schedule::kOverlap), "plan");
      return false;
    });
  }

  static int advance(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Advance call = ffi::parse_advance(variant(), args, count);
      if (call.lengths.size[0] == 0) return false;
      const detail::DeviceScope scope(call.device.device_id, "advance");
      detail::check(launch_advance({call.lengths.as<int>(), static_cast<int>(call.lengths.size[0]), call.counts.as<int>(),
                                    detail::to_int("advance", "tokens", call.tokens), true, detail::to_int("advance", "limit", call.limit),
                                    call.overflow},
                                   stream(call.device), Schedule::kOverlap),
                    "advance");
      return false;
    });
  }

  static int crop(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Crop call = ffi::parse_crop(variant(), args, count);
      if (call.lengths.size[0] == 0) return false;
      const detail::DeviceScope scope(call.device.device_id, "crop");
      detail::check(
          launch_crop({call.lengths.as<int>(), call.least.as<int>(), static_cast<int>(call.lengths.size[0]), call.counts.as<int>(),
                       detail::to_int("crop", "tokens", call.tokens), detail::to_int("crop", "rollback", call.rollback), call.overflow},
                      stream(call.device), Schedule::kOverlap),
          "crop");
      return false;
    });
  }

  static int unpack(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Unpack call = ffi::parse_unpack(variant(), args, count, true);
      if (call.k.size[0] == 0 || call.k.size[1] == 0) return false;
      const detail::DeviceScope scope(call.device.device_id, "unpack");
      UnpackArgs a;
      a.cache = cache_args(call.cache);
      a.cache.kv_heads = static_cast<int>(call.k.size[2]);
      a.k = detail::rows(call.k);
      a.v = detail::rows(call.v);
      a.tokens = detail::to_int("unpack", "the number of tokens", call.k.size[1]);
      detail::check(launch_unpack<Format>(a, stream(call.device)), "unpack");
      return false;
    });
  }

 private:
  // Parses the arguments of functions that describe launches on the current device.
  static ffi::Bound host_bound(const char* function, const TVMFFIAny* args, int32_t count) {
    int devices = 0;
    detail::check(cudaGetDeviceCount(&devices), function);
    return ffi::parse_bound(variant(), function, args, count);
  }
  static cudaStream_t stream(const DLDevice& device) { return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device.device_id)); }

  static int64_t workspace(const char* function, int64_t batch, int64_t max_len, int64_t q_len) {
    check_call(function, batch, q_len);
    return Attend::workspace_bytes(static_cast<int>(batch), Shape::kKvHeads, detail::to_int(function, "max_len", max_len),
                                   static_cast<int>(q_len));
  }

  static PlanShape shape(const char* function, int64_t batch, int64_t q_len, bool append) {
    check_call(function, batch, q_len);
    return Attend::plan_shape(static_cast<int>(batch), Shape::kKvHeads, static_cast<int>(q_len), append);
  }
  static void check_plan(const char* function, const ffi::View<1>& plan, const PlanShape& shape) {
    if (plan.size[0] < shape.size())
      ffi::fail("ValueError", "%s: plan has %lld numbers, this call needs %lld", function, static_cast<long long>(plan.size[0]),
                static_cast<long long>(shape.size()));
  }
  static void check_call(const char* function, int64_t batch, int64_t q_len) {
    if (batch > Attend::kMaxBatch)
      ffi::fail("ValueError", "%s: a batch of %lld is more than %d", function, static_cast<long long>(batch), Attend::kMaxBatch);
    if (q_len > Schedule::kMaxQLen)
      ffi::fail("ValueError", "%s: %lld query tokens are more than the %d of this kernel", function, static_cast<long long>(q_len),
                Schedule::kMaxQLen);
  }

  static CacheArgs cache_args(const ffi::Cache& cache) {
    CacheArgs a;
    a.packed = reinterpret_cast<uint8_t*>(cache.packed.data);
    a.outer_stride_bytes = cache.packed.stride[0];
    a.head_stride_bytes = cache.packed.stride[1];
    a.k_residual = cache.k_residual.data;
    a.v_residual = cache.v_residual.data;
    a.lengths = cache.lengths.as<int>();
    a.block_table = cache.block_table.as<int>();
    a.table_stride = static_cast<int>(cache.block_table.stride[0]);
    a.page_blocks = Format::kPageBlocks;
    a.pages = detail::to_int("cache", "the number of pages", cache.packed.size[0]);
    a.blocks = static_cast<int>(cache.blocks);
    a.batch = static_cast<int>(cache.batch);
    a.kv_heads = Shape::kKvHeads;
    return a;
  }
};

}  // namespace kvgen

#define KVGEN_EXPORT_MODULE(Module)                                                      \
  KVGEN_EXPORT(workspace_bytes) { return Module::workspace_bytes(args, count, result); } \
  KVGEN_EXPORT(split_tokens) { return Module::split_tokens(args, count, result); }       \
  KVGEN_EXPORT(plan_size) { return Module::plan_size(args, count, result); }             \
  KVGEN_EXPORT(plan) { return Module::plan(args, count, result); }                       \
  KVGEN_EXPORT(advance) { return Module::advance(args, count, result); }                 \
  KVGEN_EXPORT(crop) { return Module::crop(args, count, result); }                       \
  KVGEN_EXPORT(pack) { return Module::pack(args, count, result); }                       \
  KVGEN_EXPORT(attend) { return Module::attend(args, count, result, false); }            \
  KVGEN_EXPORT(decode) { return Module::attend(args, count, result, true); }             \
  KVGEN_EXPORT(unpack) { return Module::unpack(args, count, result); }
