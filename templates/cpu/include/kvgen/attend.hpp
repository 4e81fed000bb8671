// Attention of a block of query rows over the KV tiles of a work tile, and the merge of a head's splits.
#pragma once

#include "kvgen/packed.hpp"
#include "kvgen/rotate.hpp"
#include "kvgen/step.hpp"

namespace kvgen {

template <class C>
class Attention {
 public:
  using Element = typename C::Element;

  Attention(const ffi::Attend& call, const Step<C>& step) : call_(call), cache_(call.cache), step_(step) {}

  // The last split of a head also attends to the residual and the new tokens.
  void run(const WorkTile& tile) const {
    const Head head = head_of(tile);
    Rows<C> state;
    load_rows(state, head);
    const int64_t packed = step_.shape.plan.packed(step_.lengths[head.b]);
    const int64_t begin = int64_t{tile.first} * C::chunk, end = int64_t{tile.end} * C::chunk;
    if (tile.first < tile.end) over_packed(state, head, begin, end < packed ? end : packed, packed);
    if (!C::ResidualRows::kArrival && tile.split_idx == tile.num_splits - 1) {
      const int64_t total = step_.lengths[head.b] + (decoding() ? call_.q_len : 0);
      if constexpr (sink > 0) over_residual(state, head, 0, total < sink ? total : sink);
      over_residual(state, head, sink + packed, total);
    }
    for (int r = 0; r < head.rows; ++r) {
      if (tile.num_splits == 1)
        finish(head, r, state.acc[r], state.row_max[r], state.row_sum[r]);
      else
        save(state, r, partial(tile.slot, r));
    }
  }

  // Merges the splits of a head in the order of split_idx; `tile` is its first work tile.
  void merge(const WorkTile& tile) const {
    const Head head = head_of(tile);
    alignas(64) float acc[C::kHeadDim];
    for (int r = 0; r < head.rows; ++r) {
      float row_max = -kInfinity, row_sum = 0;
      std::memset(acc, 0, sizeof(acc));
      for (int s = 0; s < tile.num_splits; ++s) {
        const float* split = partial(tile.slot + s, r);
        PartialSum<C::kHeadDim>{acc, row_max, row_sum}.add(split, split[C::kHeadDim], split[C::kHeadDim + 1]);
      }
      finish(head, r, acc, row_max, row_sum);
    }
  }

  // The output of an empty sequence: zeros, and an LSE of -inf.
  void zero(int64_t b) const {
    alignas(64) const float acc[C::kHeadDim] = {};
    for (int64_t head = 0; head < C::kv_heads; ++head)
      for (int64_t row = 0; row < step_.shape.rows; ++row) finish({b, head, row, 1}, 0, acc, -kInfinity, 0);
  }

 private:
  static constexpr int64_t group = C::q_heads / C::kv_heads;
  static constexpr int64_t record = StepShape<C>::record, sink = C::ResidualRows::kSink;

  // A block of query rows of one KV head.
  struct Head {
    int64_t b, kv_head, first_row;
    int rows;
  };

  Head head_of(const WorkTile& tile) const {
    const int64_t first = tile.head % step_.shape.row_blocks * Rows<C>::most, left = step_.shape.rows - first;
    return {tile.sequence, tile.head / step_.shape.row_blocks, first, static_cast<int>(left < Rows<C>::most ? left : Rows<C>::most)};
  }

  // The new tokens of a tile as the cache will hold them.
  template <class Op>
  struct NewRows {
    alignas(64) Element rotated[kRotated<Op> ? kLanes : 1][kRotated<Op> ? C::kHeadDim : 1];

    const Element* row(const ffi::View<4>& given, int64_t b, int64_t token, int64_t head, int i) {
      const Element* found = row_of<Element>(given, b, token, head);
      if constexpr (!kRotated<Op>) return found;
      if constexpr (kRotated<Op>) rotate_row<Rotation<Op>, C::kHeadDim>(found, rotated[i]);
      return rotated[i];
    }
  };

  bool decoding() const { return static_cast<bool>(call_.k_new); }
  float* partial(int64_t slot, int64_t r) const { return call_.workspace.as<float>() + (slot * step_.shape.slot_rows() + r) * record; }

  void load_rows(Rows<C>& state, const Head& head) const {
    state.reset(head.rows);
    const float factor = call_.scale * kLog2e;
    const int64_t before = step_.lengths[head.b] - (decoding() ? 0 : call_.q_len);
    for (int r = 0; r < head.rows; ++r) {
      const int64_t token = (head.first_row + r) / group, q_head = head.kv_head * group + (head.first_row + r) % group;
      const Element* q = row_of<Element>(call_.q, head.b, token, q_head);
      alignas(64) Element rotated[kRotated<typename C::Key> ? C::kHeadDim : 1];
      if constexpr (kRotated<typename C::Key>) {
        rotate_row<Rotation<typename C::Key>, C::kHeadDim>(q, rotated);
        q = rotated;
      }
      for (int c = 0; c < C::kHeadDim; c += kLanes) store(state.q[r] + c, load_floats<Element>(q + c) * factor);
      state.to[r] = before + token + 1;
      state.q_head[r] = static_cast<int>(q_head);
      state.from[r] = CacheView<C>::first_visible(before + token);
    }
    state.sum_groups();
  }

  // Cuts [begin, end), which count from position `origin`, down to what any row sees, out to whole grains: the plan knows the step's window
  // in whole KV tiles, and neither that of a block of rows nor causality. Pages that the window has passed may be absent, so none of their
  // tokens may be read.
  static void narrow(const Rows<C>& state, int64_t origin, int64_t grain, int64_t& begin, int64_t& end) {
    int64_t low = end, high = begin;
    for (int r = 0; r < state.count; ++r) {
      if (state.from[r] >= state.to[r]) continue;
      low = state.from[r] - origin < low ? state.from[r] - origin : low;
      high = state.to[r] - origin > high ? state.to[r] - origin : high;
    }
    high = (high + grain - 1) / grain * grain;
    low = low / grain * grain;
    begin = low > begin ? low : begin;
    end = high < end ? high : end;
  }

  template <class Keys, class Values>
  static void step(Rows<C>& state, const Keys& keys, const Values& values, int64_t position, int tokens) {
    alignas(64) float score[C::rows * C::chunk];
    for (int r = 0; r < state.count; r += C::rows) {
      keys.scores(state.q[r], state.q_sum[r], score);
      state.online_softmax(r, position, tokens, score, keys);
      values.add(score, state.acc[r]);
    }
  }

  // The packed tokens [begin, end), which count from the end of the sink.
  void over_packed(Rows<C>& state, const Head& head, int64_t begin, int64_t end, int64_t packed) const {
    if constexpr (!PackedKeys<C>::direct || !PackedValues<C>::direct) return over_expanded(state, head, begin, end, packed);
    narrow(state, sink, C::kSubtile, begin, end);
    Chunk<C> chunk;
    LastSubtile<C> last;
    for (int64_t position = begin; position < end; position += chunk.tokens) {
      cache_.locate(head.b, head.kv_head, position, end, packed, C::chunk, chunk);
      if constexpr (C::ResidualRows::kArrival) last.complete(chunk);
      step(state, PackedKeys<C>{chunk}, PackedValues<C>{chunk}, sink + position, chunk.tokens);
    }
  }

  // For formats whose groups fit no vector.
  __attribute__((noinline)) void over_expanded(Rows<C>& state, const Head& head, int64_t begin, int64_t end, int64_t packed) const {
    narrow(state, sink, C::kSubtile, begin, end);
    Chunk<C> chunk;
    Floats<C> floats;
    for (int64_t position = begin; position < end; position += chunk.tokens) {
      cache_.locate(head.b, head.kv_head, position, end, packed, Floats<C>::most, chunk);
      floats.set_packed(chunk);
      step(state, floats, floats, sink + position, chunk.tokens);
    }
  }

  // The unquantized tokens at the positions [begin, end): from the length before the step on, new ones.
  __attribute__((noinline)) void over_residual(Rows<C>& state, const Head& head, int64_t begin, int64_t end) const {
    const int64_t b = head.b, length = step_.lengths[b];
    narrow(state, 0, 1, begin, end);
    Floats<C> floats;
    NewRows<typename C::Key> new_keys;
    NewRows<typename C::Value> new_values;
    for (int64_t position = begin; position < end; position += Floats<C>::most) {
      const int count = static_cast<int>(end - position < Floats<C>::most ? end - position : Floats<C>::most);
      floats.tokens = (count + kLanes - 1) / kLanes * kLanes;
      for (int tile = 0; tile * kLanes < count; ++tile) {
        const Element *k[kLanes], *v[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int64_t at = position + tile * kLanes + i;
          const bool there = tile * kLanes + i < count, old = at < length;
          k[i] = !there ? nullptr : old ? cache_.k_row(b, head.kv_head, at) : new_keys.row(call_.k_new, b, at - length, head.kv_head, i);
          v[i] = !there ? nullptr : old ? cache_.v_row(b, head.kv_head, at) : new_values.row(call_.v_new, b, at - length, head.kv_head, i);
        }
        floats.set_tile(tile, k, v);
      }
      step(state, floats, floats, position, count);
    }
  }

  static void save(const Rows<C>& state, int r, float* to) {
    to[C::kHeadDim] = state.row_max[r];
    to[C::kHeadDim + 1] = state.row_sum[r];
    if (state.row_sum[r] != 0) std::memcpy(to, state.acc[r], sizeof(state.acc[r]));
  }

  // Normalizes a row: out = acc / row_sum; a row that saw nothing gives 0 and -inf, and one that saw a NaN gives NaN. A learned sink joins
  // the sum here, once for all splits.
  void finish(const Head& head, int r, const float* acc, float row_max, float row_sum) const {
    const int64_t row = head.first_row + r, token = row / group, q_head = head.kv_head * group + row % group;
    float weight = 1;
    if constexpr (C::sinks) {
      const float logit = call_.sinks.template as<float>()[q_head] * kLog2e, peak = row_max > logit ? row_max : logit;
      if (peak != -kInfinity) {  // a NaN among the sinks is one in the output
        weight = std::exp2(row_max - peak);
        row_sum = row_sum * weight + std::exp2(logit - peak), row_max = peak;
      }
    }
    const float inverse = row_sum == 0 ? 0.0f : weight / row_sum;
    Element* out = row_of<Element>(call_.out, head.b, token, q_head);
    if constexpr (kRotated<typename C::Value>)
      store_rotated_back<Rotation<typename C::Value>, C::kHeadDim>(acc, inverse, out);
    else
      for (int c = 0; c < C::kHeadDim; c += kLanes) store_floats<Element>(out + c, load<F32>(acc + c) * inverse);
    if (call_.lse)
      call_.lse.template as<float>()[(head.b * C::q_heads + q_head) * call_.q_len + token] =
          row_sum == 0 ? -kInfinity : (row_max + std::log2(row_sum)) * kLn2;
  }

  const ffi::Attend& call_;
  CacheView<C> cache_;
  const Step<C>& step_;
};

}  // namespace kvgen
