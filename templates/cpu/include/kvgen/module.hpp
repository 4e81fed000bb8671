// The exported functions of a CPU module, for one configuration.
#pragma once

#include "kvgen/append.hpp"
#include "kvgen/attend.hpp"
#include "kvgen/cache.hpp"
#include "kvgen/threads.hpp"

namespace kvgen {

// Distributes [0, count) over the threads of the enclosing parallel region and waits for all of them.
template <class F>
inline void parallel_for(int64_t count, F f) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) f(i);
}

template <class C>
class Module {
 public:
  using Residual = typename C::ResidualRows;
  static constexpr ffi::Variant variant{
      C::q_heads,     C::kv_heads, C::kHeadDim, C::kTokens, Residual::kRows, C::kBlockBytes,
      C::kPageBlocks, C::dtype,    kDLCPU,      1,          C::sinks,        kStatic<typename C::Key> || kStatic<typename C::Value>};
  static inline Threads threads;

  static int64_t workspace_bytes(const ffi::Bound& bound) { return shape(bound).workspace_bytes(bound.max_len); }
  static int64_t plan_size(const ffi::Bound& bound) { return shape(bound).plan.size(); }
  static int64_t split_tokens(const ffi::Bound& bound) { return shape(bound).split_tokens(static_cast<int>(bound.max_len)); }

  static void advance(const ffi::Advance& call) { kvgen::advance(call); }
  static void crop(const ffi::Crop& call) { kvgen::crop(call, Residual::kRollback); }

  // Writes nothing until the lengths are checked.
  static void plan(const ffi::Plan& call) {
    const int64_t batch = call.lengths.size[0];
    const int32_t* lengths = call.lengths.as<int32_t>();
    const StepShape<C> shape("plan", batch, call.q_len, longest(lengths, batch), call.append);
    shape.check_size("plan", call.plan);
    const auto step = [&](int64_t b) { return step_of(lengths[b], shape.plan.fresh, call.limit, call.skip_empty); };
    for (int64_t b = 0; b < batch; ++b) {
      check_length(b, lengths[b]);
      if (step(b) == SequenceStep::overflows) refuse_overflow("plan", b, int64_t{lengths[b]} + shape.plan.fresh, call.limit);
    }
    std::vector<int> made(shape.plan.size());  // the caller's tensor need not lie at a multiple of 16 bytes, as work tiles must
    make_plan(shape.plan, lengths, call.limit, call.skip_empty, made.data());
    std::memcpy(call.plan.data, made.data(), made.size() * sizeof(int));
  }

  static void pack(const ffi::Pack& call) {
    const CacheView<C> cache(call.cache);
    const int32_t* more = call.new_lengths.as<int32_t>();
    for (int64_t b = 0; b < call.cache.batch; ++b) {
      if (more[b] < 0 || more[b] > call.most(b))
        ffi::fail("ValueError", "pack: new_lengths[%lld] is %d, k has %lld tokens", (long long)b, more[b], (long long)call.most(b));
      cache.check(b, cache.length(b), more[b], cache.length(b));
      check_limit("pack", b, cache.length(b), more[b], call.limit);
    }
    const auto appended = [&](int64_t b, int64_t head) {
      return Append<C>{cache, call.k, call.v, b, head, cache.length(b), cache.length(b) + more[b], call.start(b)};
    };
#pragma omp parallel num_threads(threads.count())
    append(call.cache.batch, appended);
    for (int64_t b = 0; call.advance && b < call.cache.batch; ++b) cache.length(b) += more[b];
  }

  // The lengths before the step are the plan's, where the caller gives one: its step may have advanced those of the cache already.
  static void attend(const ffi::Attend& call) {
    const int64_t batch = call.cache.batch;
    if (batch == 0 || call.q_len == 0) return;
    const CacheView<C> cache(call.cache);
    const Step<C> step = call.plan ? given_step(call) : own_step(call);
    const int64_t most = longest(step.lengths.data(), batch) + (Residual::kArrival ? step.shape.plan.fresh : 0);
    const int64_t needed = step.shape.workspace_bytes(std::max(call.max_len, most));
    if (needed > call.workspace.size[0])
      ffi::fail("ValueError", "workspace has %lld bytes, this call needs %lld", (long long)call.workspace.size[0], (long long)needed);
    const Attention<C> attention(call, step);
    const auto appended = [&](int64_t b, int64_t head) {
      return Append<C>{cache, call.k_new, call.v_new, b, head, step.lengths[b], step.lengths[b] + step.appended[b]};
    };
#pragma omp parallel num_threads(threads.count())
    {
      if (Residual::kArrival && call.decode) append(batch, appended);  // every query sees its own token quantized
      parallel_for(step.work.size(), [&](int64_t i) { attention.run(step.work[i]); });
      parallel_for(step.split_heads.size(), [&](int64_t i) { attention.merge(step.work[step.split_heads[i]]); });
      parallel_for(step.empty.size(), [&](int64_t i) { attention.zero(step.empty[i]); });
      if (!Residual::kArrival && call.decode) append(batch, appended);
    }
    if (call.decode && call.advance)
      for (int64_t b = 0; b < batch; ++b) cache.length(b) += step.appended[b];
  }

  // Tokens to their slots: place * tokens of a page, or of a sequence in a contiguous cache, + token. Of a run of slots in one block whole
  // sub-tiles are packed at once. Every unit of work has some blocks of a head, so that no byte is written by two.
  static void write(const ffi::Write& call) {
    static_assert(Residual::kArrival, "tokens of other formats are not written one by one");
    constexpr int shares = 8;
    const int64_t tokens = call.slots.size[0], blocks = call.packed.size[2];
    const int64_t* slots = call.slots.as<int64_t>();
    for (int64_t i = 0; i < tokens; ++i)
      if (slots[i] < -1 || slots[i] >= call.packed.size[0] * blocks * C::kTokens)
        ffi::fail("ValueError", "write: slots[%lld] is %lld, and packed has places for %lld tokens", (long long)i, (long long)slots[i],
                  (long long)(call.packed.size[0] * blocks * C::kTokens));
#pragma omp parallel num_threads(threads.count())
    parallel_for(int64_t{C::kv_heads} * shares, [&](int64_t unit) {
      const int64_t head = unit / shares;
      for (int64_t i = 0, next; i < tokens; i = next) {
        next = i + 1;
        const int64_t block = slots[i] / C::kTokens;
        if (slots[i] < 0 || block % shares != unit % shares) continue;
        while (next < tokens && slots[next] == slots[i] + next - i && slots[next] / C::kTokens == block) ++next;
        uint8_t* to = call.packed.as<uint8_t>() + ((block / blocks * C::kv_heads + head) * blocks + block % blocks) * C::kBlockBytes;
        const int from = static_cast<int>(slots[i] % C::kTokens), end = static_cast<int>(from + next - i);
        const auto row = [&](const ffi::View<3>& view) {
          return [&view, i, from, head](int t) {
            return view.as<typename C::Element>() + (i + t - from) * view.stride[0] + head * view.stride[1];
          };
        };
        const float* scales = call.scales ? call.scales.as<float>() + head * C::kHeadDim : nullptr;
        write_tokens<C, typename C::Key>(to, scales, from, end, row(call.k));
        write_tokens<C, typename C::Value>(to, scales ? scales + C::kv_heads * C::kHeadDim : nullptr, from, end, row(call.v));
      }
    });
  }

  static void unpack(const ffi::Unpack& call) {
    using Element = typename C::Element;
    const CacheView<C> cache(call.cache);
    const int64_t batch = call.cache.batch, per = call.cache.blocks + 1;  // the last one stands for the residual
    for (int64_t b = 0; b < batch; ++b) {
      cache.check(b, cache.length(b), 0, cache.length(b));
      if (cache.length(b) > call.most(b))
        ffi::fail("ValueError", "unpack: k has %lld tokens, sequence %lld has %d", (long long)call.most(b), (long long)b, cache.length(b));
    }
#pragma omp parallel num_threads(threads.count())
    parallel_for(batch * C::kv_heads * per, [&](int64_t i) {
      const int64_t head = i / per % C::kv_heads, b = i / per / C::kv_heads, index = i % per + cache.first_held(cache.length(b));
      const int64_t length = cache.length(b), full = Residual::packed_blocks(cache.length(b)), start = call.start(b);
      if (index < full && cache.holds(b, index))
        unpack_block<C>(cache, cache.block(b, head, index), call.k, call.v, b, head, start + Residual::kSink + index * C::kTokens,
                        length - index * C::kTokens);
      if (index != full) return;
      const auto copy = [&](int64_t position) {
        std::memcpy(row_of<Element>(call.k, b, start + position, head), cache.k_row(b, head, position), sizeof(Element) * C::kHeadDim);
        std::memcpy(row_of<Element>(call.v, b, start + position, head), cache.v_row(b, head, position), sizeof(Element) * C::kHeadDim);
      };
      for (int64_t position = 0; position < Residual::kSink && position < length; ++position) copy(position);
      for (int64_t position = Residual::first(cache.length(b)); position < length; ++position) copy(position);
    });
  }

 private:
  static StepShape<C> shape(const ffi::Bound& bound) {
    return StepShape<C>(bound.function, bound.batch, bound.q_len, bound.max_len, false);
  }

  static Step<C> own_step(const ffi::Attend& call) {
    const int32_t* lengths = call.cache.lengths.as<int32_t>();
    const StepShape<C> shape(call.function, call.cache.batch, call.q_len, longest(lengths, call.cache.batch), call.decode);
    for (int64_t b = 0; b < call.cache.batch; ++b) check_step(call, shape, b, lengths[b], call.decode);
    return Step<C>(shape, lengths);
  }

  static Step<C> given_step(const ffi::Attend& call) {
    const StepShape<C> shape(call.function, call.cache.batch, call.q_len, 0, call.decode);
    Step<C> step(call.function, shape, call.plan);
    for (int64_t b = 0; b < call.cache.batch; ++b) check_step(call, shape, b, step.lengths[b], step.appended[b] > 0);
    return step;
  }

  static void check_step(const ffi::Attend& call, const StepShape<C>& shape, int64_t b, int64_t length, bool appends) {
    CacheView<C>(call.cache).check(b, length, appends ? call.q_len : 0, length + shape.plan.fresh - call.q_len);
    if (appends) check_limit(call.function, b, length, call.q_len, call.limit);
  }

  // Within a parallel region: blocks that are due, then the other tokens.
  template <class Appended>
  static void append(int64_t batch, const Appended& appended) {
    int64_t most_blocks = 0;
    for (int64_t b = 0; b < batch; ++b) most_blocks = std::max(most_blocks, appended(b, 0).due_blocks());
    if (most_blocks > 0)
      parallel_for(batch * C::kv_heads * most_blocks, [&](int64_t i) {
        const int64_t index = i % most_blocks, head = i / most_blocks % C::kv_heads, b = i / most_blocks / C::kv_heads;
        const Append<C> tokens = appended(b, head);
        if (index < tokens.due_blocks()) tokens.pack(index);
      });
    parallel_for(batch * C::kv_heads, [&](int64_t i) { appended(i / C::kv_heads, i % C::kv_heads).keep_rest(); });
  }
};

}  // namespace kvgen
