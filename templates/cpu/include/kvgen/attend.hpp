// Attention of a block of query rows over a share of one sequence, and the merge of shares.
#pragma once

#include "kvgen/cache.hpp"
#include "kvgen/rows.hpp"

namespace kvgen {

// How a call is cut into units (sequence, KV head, block of rows, share of the tokens). It follows from shapes and constants
// alone, so that results do not depend on threads or timing.
template <class C>
struct Plan {
  int64_t batch, rows, row_blocks, shares, share_tokens;

  Plan(int64_t batch_, int64_t q_len, int64_t max_len) : batch(batch_), rows(q_len * (C::q_heads / C::kv_heads)) {
    row_blocks = (rows + Rows<C>::most - 1) / Rows<C>::most;
    const int64_t whole = batch * C::kv_heads * row_blocks;
    const int64_t wanted = C::share > 0 ? (max_len + C::share - 1) / C::share : 1;
    const int64_t allowed = whole > 0 ? (C::enough_units + whole - 1) / whole : 1;
    shares = wanted < 1 ? 1 : wanted < allowed ? wanted : allowed;
    constexpr int64_t grain = C::block > C::chunk ? C::block : C::chunk;
    share_tokens = ((max_len + shares - 1) / shares + grain - 1) / grain * grain;
  }

  int64_t units() const { return batch * C::kv_heads * row_blocks * shares; }
  // A share leaves its sums in the workspace: head_dim weighted values, the largest score, the sum of weights.
  static constexpr int64_t record = C::head_dim + 2;
  int64_t workspace_bytes() const {
    return shares > 1 ? batch * C::kv_heads * rows * shares * record * static_cast<int64_t>(sizeof(float)) : 0;
  }
  float* partial(void* workspace, int64_t b, int64_t head, int64_t row, int64_t share) const {
    return static_cast<float*>(workspace) + (((b * C::kv_heads + head) * rows + row) * shares + share) * record;
  }
};

template <class C>
class Attention {
 public:
  using Element = typename C::Element;

  Attention(const ffi::Attend& call, const Plan<C>& plan) : call_(call), cache_(call.cache), plan_(plan) {}

  void unit(int64_t index) const {
    const int64_t share = index % plan_.shares, block = index / plan_.shares % plan_.row_blocks;
    const int64_t head = index / plan_.shares / plan_.row_blocks % C::kv_heads, b = index / plan_.shares / plan_.row_blocks / C::kv_heads;
    const int64_t first = block * Rows<C>::most;
    const int rows = static_cast<int>(plan_.rows - first < Rows<C>::most ? plan_.rows - first : Rows<C>::most);
    Rows<C> state;
    load_rows(state, b, head, first, rows);
    const int64_t packed = packed_tokens(b);
    const int64_t owner = packed / plan_.share_tokens < plan_.shares ? packed / plan_.share_tokens : plan_.shares - 1;
    const int64_t begin = share * plan_.share_tokens;
    const int64_t end = share >= owner ? packed : begin + plan_.share_tokens;
    if (begin < end) over_packed(state, b, head, begin, end);
    if (share == owner) over_plain(state, b, head, packed);
    for (int r = 0; r < rows; ++r) {
      if (plan_.shares == 1)
        finish(b, head, first + r, state.acc[r], state.top[r], state.total[r]);
      else
        save(state, r, plan_.partial(call_.workspace.data, b, head, first + r, share));
    }
  }

  // Merges the shares of all rows of one KV head, in order.
  void merge(int64_t b, int64_t head) const {
    alignas(64) float acc[C::head_dim];
    for (int64_t row = 0; row < plan_.rows; ++row) {
      const float* part = plan_.partial(call_.workspace.data, b, head, row, 0);
      float top = -kInfinity, total = 0;
      for (int64_t s = 0; s < plan_.shares; ++s)
        top = top < part[s * plan_.record + C::head_dim] ? part[s * plan_.record + C::head_dim] : top;
      std::memset(acc, 0, sizeof(acc));
      for (int64_t s = 0; s < plan_.shares; ++s, part += plan_.record) {
        if (part[C::head_dim + 1] == 0) continue;
        const float weight = std::exp2(part[C::head_dim] - top);
        total += part[C::head_dim + 1] * weight;
        for (int c = 0; c < C::head_dim; c += kLanes) store(acc + c, load<F32>(acc + c) + load<F32>(part + c) * weight);
      }
      finish(b, head, row, acc, top, total);
    }
  }

 private:
  static constexpr int64_t group = C::q_heads / C::kv_heads;

  bool decoding() const { return static_cast<bool>(call_.k_new); }
  int64_t packed_tokens(int64_t b) const { return cache_.length(b) / C::block * C::block; }

  void load_rows(Rows<C>& state, int64_t b, int64_t head, int64_t first, int rows) const {
    state.reset(rows);
    const float factor = C::softcap > 0 ? call_.scale / C::softcap : call_.scale * kLog2e;
    const int64_t before = cache_.length(b) - (decoding() ? 0 : call_.q_len);
    for (int r = 0; r < rows; ++r) {
      const int64_t token = (first + r) / group, q_head = head * group + (first + r) % group;
      const Element* q = row_of<Element>(call_.q, b, token, q_head);
      for (int c = 0; c < C::head_dim; c += kLanes) store(state.q[r] + c, load_floats<Element>(q + c) * factor);
      state.to[r] = before + token + 1;
      state.from[r] = C::window > 0 && state.to[r] > C::window ? state.to[r] - C::window : 0;
    }
    state.sum_groups();
  }

  // The positions that any row sees, cut down to those of [begin, end) and out to whole grains.
  static void narrow(const Rows<C>& state, int64_t grain, int64_t& begin, int64_t& end) {
    int64_t low = end, high = begin;
    for (int r = 0; r < state.count; ++r) {
      if (state.from[r] >= state.to[r]) continue;
      low = state.from[r] < low ? state.from[r] : low;
      high = state.to[r] > high ? state.to[r] : high;
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
      for (int m = 0; m < C::rows; ++m) state.soften(r + m, position, tokens, score + m * C::chunk);
      values.add(score, state.acc[r]);
    }
  }

  void over_packed(Rows<C>& state, int64_t b, int64_t head, int64_t begin, int64_t end) const {
    if constexpr (!PackedKeys<C>::direct || !PackedValues<C>::direct) return over_expanded(state, b, head, begin, end);
    narrow(state, C::subtile, begin, end);
    Chunk<C> chunk;
    for (int64_t position = begin; position < end; position += chunk.tokens) {
      cache_.locate(b, head, position, end, C::chunk, chunk);
      step(state, PackedKeys<C>{chunk}, PackedValues<C>{chunk}, position, chunk.tokens);
    }
  }

  // For formats whose groups fit no vector.
  __attribute__((noinline)) void over_expanded(Rows<C>& state, int64_t b, int64_t head, int64_t begin, int64_t end) const {
    narrow(state, C::subtile, begin, end);
    Chunk<C> chunk;
    Floats<C> floats;
    for (int64_t position = begin; position < end; position += chunk.tokens) {
      cache_.locate(b, head, position, end, Floats<C>::most, chunk);
      floats.set_packed(chunk);
      step(state, floats, floats, position, chunk.tokens);
    }
  }

  // The residual and the new tokens, which lie one after the other from position `packed` on.
  __attribute__((noinline)) void over_plain(Rows<C>& state, int64_t b, int64_t head, int64_t packed) const {
    const int64_t residual = cache_.length(b) - packed;
    int64_t begin = packed, end = packed + residual + (decoding() ? call_.q_len : 0);
    narrow(state, 1, begin, end);
    Floats<C> floats;
    for (int64_t position = begin; position < end; position += Floats<C>::most) {
      const int count = static_cast<int>(end - position < Floats<C>::most ? end - position : Floats<C>::most);
      floats.tokens = (count + kLanes - 1) / kLanes * kLanes;
      for (int tile = 0; tile * kLanes < count; ++tile) {
        const Element *k[kLanes], *v[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const int64_t at = position - packed + tile * kLanes + i;
          const bool there = tile * kLanes + i < count, old = at < residual;
          k[i] = !there ? nullptr : old ? cache_.k_slot(b, head, at) : row_of<Element>(call_.k_new, b, at - residual, head);
          v[i] = !there ? nullptr : old ? cache_.v_slot(b, head, at) : row_of<Element>(call_.v_new, b, at - residual, head);
        }
        floats.set_tile(tile, k, v);
      }
      step(state, floats, floats, position, count);
    }
  }

  static void save(const Rows<C>& state, int r, float* to) {
    to[C::head_dim] = state.top[r];
    to[C::head_dim + 1] = state.total[r];
    if (state.total[r] != 0) std::memcpy(to, state.acc[r], sizeof(state.acc[r]));
  }

  // Normalizes a row: out = acc / total; a row that saw nothing gives 0 and -inf, and one that saw a NaN gives NaN.
  void finish(int64_t b, int64_t head, int64_t row, const float* acc, float top, float total) const {
    const int64_t token = row / group, q_head = head * group + row % group;
    const float inverse = total == 0 ? 0.0f : 1.0f / total;
    Element* out = row_of<Element>(call_.out, b, token, q_head);
    for (int c = 0; c < C::head_dim; c += kLanes) store_floats<Element>(out + c, load<F32>(acc + c) * inverse);
    if (call_.lse)
      call_.lse.template as<float>()[(b * C::q_heads + q_head) * call_.q_len + token] =
          total == 0 ? -kInfinity : (top + std::log2(total)) * kLn2;
  }

  const ffi::Attend& call_;
  CacheView<C> cache_;
  const Plan<C>& plan_;
};

}  // namespace kvgen
