// The exported functions of a variant (docs/abi.md). They check arguments and launch kernels on torch's current stream. The back ends share
// all but the attention kernel.
#pragma once
#include "kvgen/calls.hpp"
#include "kvgen/host/checks.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/pack/pack.cuh"
#include "kvgen/pack/unpack.cuh"

namespace kvgen {

// Format and Schedule are those of the kernels. Shape has kKvHeads and kSinks. Attend_ has
// kMaxBatch, kSlots (whether it reads residual_slots), workspace_bytes(batch, kv_heads, max_len, q_len), split_tokens, plan_shape, and
// launch(AttendArgs, append, stream).
template <class Format, class Schedule, class Shape, class Attend_>
struct Exports {
  using Attend = Attend_;
  static constexpr ffi::Variant variant{Schedule::kGroup * Shape::kKvHeads,
                                        Shape::kKvHeads,
                                        Format::kHeadDim,
                                        Format::kTokens,
                                        Format::ResidualRows::kRows,
                                        Format::kBlockBytes,
                                        Format::kPageBlocks,
                                        std::is_same_v<typename Format::Element, Half> ? ffi::kFloat16 : ffi::kBfloat16,
                                        kDLCUDA,
                                        16,
                                        Shape::kSinks,
                                        kStatic<typename Format::Key> || kStatic<typename Format::Value>,
                                        Attend_::kSlots};

  static int64_t workspace_bytes(const ffi::Bound& bound) {
    check_device(bound);
    return workspace(bound, bound.batch, bound.max_len, bound.q_len);
  }
  static int64_t split_tokens(const ffi::Bound& bound) {
    check_device(bound);
    return Attend::split_tokens(static_cast<int>(bound.batch), Shape::kKvHeads, ffi::to_int(bound.function, "max_len", bound.max_len),
                                static_cast<int>(bound.q_len));
  }
  static int64_t plan_size(const ffi::Bound& bound) {
    check_device(bound);
    return shape(bound, bound.batch, bound.q_len, false).size();
  }

  static void pack(const ffi::Pack& call) {
    if (call.batch == 0 || call.k.size[1] == 0) return;
    const detail::DeviceCall on(call);
    PackArgs a;
    a.cache = cache_args(call.cache);
    a.k = rows(call.k), a.v = rows(call.v), a.new_lengths = call.new_lengths.as<int>(), a.starts = call.starts.as<int>();
    a.tokens = ffi::to_int(call.function, "the number of tokens", call.k.size[1]);
    a.limit = call.limit, a.overflow = call.overflow, a.advance = call.advance, a.scales = call.cache.scales.as<float>();
    on.check(launch_pack<Format>(a, on.stream));
  }

  static void attend(const ffi::Attend& call) {
    if (call.cache.batch == 0 || call.q_len == 0) return;
    const detail::DeviceCall on(call);  // of whose multiprocessors the workspace is a function, too
    const int64_t needed = workspace(call, call.cache.batch, call.max_len, call.q_len);
    if (call.workspace.size[0] < needed)
      ffi::fail("ValueError", "%s: workspace has %lld bytes, this call needs %lld", call.function, (long long)call.workspace.size[0],
                (long long)needed);
    AttendArgs a;
    a.cache = cache_args(call.cache);
    a.q = rows(call.q), a.out = rows(call.out), a.k_new = rows(call.k_new), a.v_new = rows(call.v_new);
    a.lse = call.lse.as<float>(), a.sinks = call.sinks.as<float>(), a.workspace = call.workspace.data, a.plan = call.plan.as<int>();
    a.q_len = static_cast<int>(call.q_len), a.max_len = static_cast<int>(call.max_len), a.scale = call.scale;
    a.limit = call.limit, a.overflow = call.overflow, a.advance = call.advance, a.scales = call.cache.scales.as<float>();
    if (a.plan) check_plan(call, call.plan, shape(call, a.cache.batch, call.q_len, call.decode));
    if constexpr (Format::ResidualRows::kArrival)
      if (call.decode) on.check(launch_append<Format>(a, on.stream, Schedule::kOverlap));  // every query sees its own token quantized
    on.check(Attend::launch(a, call.decode, on.stream));
    if (!a.plan || !a.advance) return;  // the static scheduler's launch advances the lengths itself
    on.check(launch_advance({a.cache.lengths, a.cache.batch, nullptr, a.q_len, false, a.limit, a.overflow}, on.stream, Schedule::kOverlap));
  }

  static void plan(const ffi::Plan& call) {
    if (call.lengths.size[0] == 0) return;
    const detail::DeviceCall on(call);
    PlanArgs a;
    a.shape = shape(call, call.lengths.size[0], call.q_len, call.append);
    if (!a.shape.countable(call.limit))
      ffi::fail("ValueError", "plan: %d sequences of up to %d tokens are more than it can count", a.shape.batch, call.limit);
    check_plan(call, call.plan, a.shape);
    a.lengths = call.lengths.as<int>(), a.plan = call.plan.as<int>(), a.overflow = call.overflow;
    a.limit = call.limit, a.skip_empty = call.skip_empty;
    on.check(launch_plan(a, on.stream, Schedule::kOverlap));
  }

  static void advance(const ffi::Advance& call) {
    const int batch = static_cast<int>(call.lengths.size[0]);
    if (batch == 0) return;
    const detail::DeviceCall on(call);
    on.check(launch_advance({call.lengths.as<int>(), batch, call.counts.as<int>(), call.tokens, true, call.limit, call.overflow}, on.stream,
                            Schedule::kOverlap));
  }

  static void crop(const ffi::Crop& call) {
    const int batch = static_cast<int>(call.lengths.size[0]);
    if (batch == 0) return;
    const detail::DeviceCall on(call);
    on.check(
        launch_crop({call.lengths.as<int>(), call.least.as<int>(), batch, call.counts.as<int>(), call.tokens, call.rollback, call.overflow},
                    on.stream, Schedule::kOverlap));
  }

  static void write(const ffi::Write& call) {
    const detail::DeviceCall on(call);
    WriteArgs a;
    a.packed = reinterpret_cast<uint8_t*>(call.packed.data);
    a.outer_stride_bytes = call.packed.stride[0], a.head_stride_bytes = call.packed.stride[1];
    a.k = {call.k.data, 0, call.k.stride[0], call.k.stride[1]}, a.v = {call.v.data, 0, call.v.stride[0], call.v.stride[1]};
    a.slots = call.slots.as<int64_t>(), a.tokens = ffi::to_int(call.function, "the number of tokens", call.slots.size[0]);
    a.kv_heads = Shape::kKvHeads, a.blocks = static_cast<int>(call.packed.size[2]);
    a.places = call.packed.size[0] * call.packed.size[2] * Format::kTokens, a.scales = call.scales.as<float>();
    on.check(launch_write<Format>(a, on.stream));
  }

  static void unpack(const ffi::Unpack& call) {
    if (call.batch == 0 || call.k.size[1] == 0) return;
    const detail::DeviceCall on(call);
    UnpackArgs a;
    a.cache = cache_args(call.cache), a.cache.kv_heads = static_cast<int>(call.k.size[2]);
    a.k = rows(call.k), a.v = rows(call.v), a.tokens = ffi::to_int(call.function, "the number of tokens", call.k.size[1]);
    a.starts = call.starts.as<int>(), a.scales = call.cache.scales.as<float>();
    on.check(launch_unpack<Format>(a, on.stream));
  }

 private:
  // Questions are about launches on the current device.
  static void check_device(const ffi::Args& call) {
    int devices = 0;
    detail::check(cudaGetDeviceCount(&devices), call.function);
  }
  static int64_t workspace(const ffi::Args& call, int64_t batch, int64_t max_len, int64_t q_len) {
    check_size(call, batch, q_len);
    return Attend::workspace_bytes(static_cast<int>(batch), Shape::kKvHeads, ffi::to_int(call.function, "max_len", max_len),
                                   static_cast<int>(q_len));
  }
  static PlanShape shape(const ffi::Args& call, int64_t batch, int64_t q_len, bool append) {
    check_size(call, batch, q_len);
    return Attend::plan_shape(static_cast<int>(batch), Shape::kKvHeads, static_cast<int>(q_len), append);
  }
  static void check_plan(const ffi::Args& call, const ffi::View<1>& plan, const PlanShape& shape) {
    if (plan.size[0] < shape.size())
      ffi::fail("ValueError", "%s: plan has %lld numbers, this call needs %lld", call.function, (long long)plan.size[0],
                (long long)shape.size());
  }
  static void check_size(const ffi::Args& call, int64_t batch, int64_t q_len) {
    if (batch > Attend::kMaxBatch)
      ffi::fail("ValueError", "%s: a batch of %lld is more than %d", call.function, (long long)batch, Attend::kMaxBatch);
    if (q_len > Schedule::kMaxQLen)
      ffi::fail("ValueError", "%s: %lld query tokens are more than the %d of this kernel", call.function, (long long)q_len,
                Schedule::kMaxQLen);
  }

  static Rows rows(const ffi::View<4>& view) { return {view.data, view.stride[0], view.stride[1], view.stride[2]}; }
  static CacheArgs cache_args(const ffi::Cache& cache) {
    CacheArgs a;
    a.packed = reinterpret_cast<uint8_t*>(cache.packed.data);
    a.outer_stride_bytes = cache.packed.stride[0], a.head_stride_bytes = cache.packed.stride[1];
    a.k_residual = cache.k_residual.data, a.v_residual = cache.v_residual.data, a.lengths = cache.lengths.as<int>();
    a.block_table = cache.block_table.as<int>(), a.table_stride = static_cast<int>(cache.block_table.stride[0]);
    a.residual_slots = cache.residual_slots.as<int>(), a.slots = ffi::to_int("cache", "the number of residuals", cache.k_residual.size[0]);
    a.page_blocks = Format::kPageBlocks, a.pages = ffi::to_int("cache", "the number of pages", cache.packed.size[0]);
    a.blocks = static_cast<int>(cache.blocks), a.batch = static_cast<int>(cache.batch), a.kv_heads = Shape::kKvHeads;
    return a;
  }
};

}  // namespace kvgen
