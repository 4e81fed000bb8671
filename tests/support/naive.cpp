// A small, slow and plain module of the ABI for unquantized float32 caches;
// FAULT_* makes it fail in one way each.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

[[maybe_unused]] volatile char* eaten = nullptr;

[[maybe_unused]] void eat(size_t bytes) {
  eaten = static_cast<char*>(operator new(bytes));
  for (size_t i = 0; i < bytes; i += 4096) eaten[i] = 1;
}

void misbehave() {
#if defined(FAULT_CRASH)
  std::raise(SIGSEGV);
#elif defined(FAULT_HANG)
  for (volatile int i = 0;; i = i + 1) {
  }
#elif defined(FAULT_EAT)
  for (;;) eat(size_t{1} << 26);
#elif defined(FAULT_LEAK)
  eat(size_t{1} << 23);
#endif
}

int64_t stride(const TensorView& t, int axis) { return t.stride(axis); }

struct Cache {
  TensorView packed, k_residual, v_residual, lengths;
  Optional<TensorView> table;

  int64_t block() const { return k_residual.size(2); }
  int64_t dim() const { return k_residual.size(3); }
  int64_t heads() const { return k_residual.size(1); }
  int32_t* length(int64_t b) const { return static_cast<int32_t*>(lengths.data_ptr()) + b; }

  // Place of an element, in words of a block: sub-tiles of up to 32 tokens, 16
  // rows side by side.
  int64_t place(bool key, int64_t token, int64_t channel) const {
    const int64_t subtile = std::min<int64_t>(32, block());
    const int64_t base = token / subtile * (2 * subtile * dim()) + (key ? 0 : subtile * dim());
    const int64_t row = key ? token % subtile : channel, k = key ? channel : token % subtile, extent = key ? dim() : subtile;
    return base + (row / 16 * extent + k) * 16 + row % 16;
  }

  float* words(int64_t b, int64_t h, int64_t block_index) const {
    int64_t row = b, index = block_index;
    if (table) {
      const int64_t per_page = packed.size(2);
      row = static_cast<const int32_t*>(table.value().data_ptr())[b * table.value().stride(0) + block_index / per_page];
      index = block_index % per_page;
    }
    char* base = static_cast<char*>(packed.data_ptr());
    return reinterpret_cast<float*>(base + ((row * heads() + h) * packed.size(2) + index) * packed.size(3));
  }

  float* residual(bool key, int64_t b, int64_t h, int64_t token) const {
    float* base = static_cast<float*>((key ? k_residual : v_residual).data_ptr());
    return base + ((b * heads() + h) * block() + token % block()) * dim();
  }

  float at(bool key, int64_t b, int64_t h, int64_t token, int64_t channel, int64_t full) const {
    if (token >= full) return residual(key, b, h, token)[channel];
    return words(b, h, token / block())[place(key, token % block(), channel)];
  }

  void flush(int64_t b, int64_t h, int64_t block_index) const {
    for (int key = 0; key < 2; ++key)
      for (int64_t t = 0; t < block(); ++t)
        for (int64_t c = 0; c < dim(); ++c) words(b, h, block_index)[place(key, t, c)] = residual(key, b, h, t)[c];
  }

  void append(const TensorView& k, const TensorView& v, int64_t b, int64_t h, int64_t token, int64_t position) const {
    for (int key = 0; key < 2; ++key) {
      const TensorView& from = key ? k : v;
      const float* row = static_cast<const float*>(from.data_ptr()) + b * stride(from, 0) + token * stride(from, 1) + h * stride(from, 2);
      std::memcpy(residual(key, b, h, position), row, dim() * sizeof(float));
    }
  }
};

// A sequence of `length` tokens must have room for `more`.
void require_room(int64_t length, int64_t more, int64_t limit) {
  if (length + more > limit) TVM_FFI_THROW(ValueError) << "a sequence would have more tokens than the limit of " << limit;
}

int32_t* numbers(const TensorView& tensor) { return static_cast<int32_t*>(tensor.data_ptr()); }

void pack(TensorView k, TensorView v, TensorView new_lengths, Optional<TensorView>, TensorView packed, TensorView k_residual, TensorView v_residual,
          TensorView lengths, Optional<TensorView> table, Optional<TensorView>, Optional<TensorView>, int64_t limit, int64_t, bool advance) {
  const Cache cache{packed, k_residual, v_residual, lengths, table};
  for (int64_t b = 0; b < lengths.size(0); ++b) require_room(numbers(lengths)[b], numbers(new_lengths)[b], limit);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int32_t count = numbers(new_lengths)[b], old = *cache.length(b);
    for (int64_t h = 0; h < cache.heads(); ++h)
      for (int64_t t = 0; t < count; ++t) {
        cache.append(k, v, b, h, t, old + t);
        if ((old + t + 1) % cache.block() == 0) cache.flush(b, h, (old + t) / cache.block());
      }
    if (advance) *cache.length(b) = old + count;
  }
}

// Attends to `length_of(b)` tokens of sequence b.
template <class Lengths>
void run(const TensorView& q, const Cache& cache, const Lengths& length_of, const TensorView& out, const Optional<TensorView>& lse,
         double scale) {
  misbehave();
  const int64_t tokens = q.size(1), heads = q.size(2), dim = cache.dim(), group = heads / cache.heads();
  for (int64_t b = 0; b < q.size(0); ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t length = length_of(b), full = length / cache.block() * cache.block();
        const float* query = static_cast<const float*>(q.data_ptr()) + b * stride(q, 0) + i * stride(q, 1) + h * stride(q, 2);
        float* result = static_cast<float*>(out.data_ptr()) + b * stride(out, 0) + i * stride(out, 1) + h * stride(out, 2);
        const int64_t seen = std::max<int64_t>(0, length - tokens + i + 1);
        std::vector<double> scores(seen), sum(dim, 0.0);
        double top = -std::numeric_limits<double>::infinity(), total = 0;
        for (int64_t t = 0; t < seen; ++t) {
          double score = 0;
          for (int64_t c = 0; c < dim; ++c) score += double(query[c]) * cache.at(true, b, h / group, t, c, full);
          scores[t] = score * scale;
          top = std::max(top, scores[t]);
        }
        for (int64_t t = 0; t < seen; ++t) {
          const double p = std::exp(scores[t] - top);
          total += p;
          for (int64_t c = 0; c < dim; ++c) sum[c] += p * cache.at(false, b, h / group, t, c, full);
        }
#if defined(FAULT_WRONG)
        total *= 1.05;
#endif
        for (int64_t c = 0; c < dim; ++c) result[c] = seen ? float(sum[c] / total) : 0.0f;
        if (lse) {
          float* value = static_cast<float*>(lse.value().data_ptr()) + (b * heads + h) * tokens + i;
          *value = seen ? float(top + std::log(total)) : -std::numeric_limits<float>::infinity();
        }
      }
}

// The plan of this module is the length of each sequence before the step, -1
// where it takes no part.
int64_t plan_size(int64_t batch, int64_t, int64_t) { return batch; }

void plan(TensorView lengths, TensorView made, int64_t tokens, bool append, bool skip_empty, int64_t limit, int64_t) {
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int32_t length = numbers(lengths)[b];
    numbers(made)[b] = length > 0 || (append && !skip_empty) ? length : -1;
    if (append && numbers(made)[b] >= 0) require_room(length, tokens, limit);
  }
}

void advance(TensorView lengths, Optional<TensorView> counts, int64_t tokens, int64_t limit, int64_t) {
  const auto more = [&](int64_t b) -> int64_t { return counts ? numbers(counts.value())[b] : numbers(lengths)[b] > 0 ? tokens : 0; };
  for (int64_t b = 0; b < lengths.size(0); ++b) require_room(numbers(lengths)[b], more(b), limit);
  for (int64_t b = 0; b < lengths.size(0); ++b) numbers(lengths)[b] += static_cast<int32_t>(more(b));
}

void crop(TensorView, TensorView, Optional<TensorView>, int64_t, int64_t, int64_t) { TVM_FFI_THROW(ValueError) << "no tokens can be taken back"; }

void attend(TensorView q, TensorView packed, TensorView k_residual, TensorView v_residual, TensorView lengths, Optional<TensorView> table,
            Optional<TensorView>, Optional<TensorView>, TensorView out, Optional<TensorView> lse, Optional<TensorView>, TensorView,
            Optional<TensorView> plan, double scale, int64_t) {
  const int32_t* before = numbers(plan ? plan.value() : lengths);
  run(q, Cache{packed, k_residual, v_residual, lengths, table}, [&](int64_t b) { return before[b]; }, out, lse, scale);
}

void decode(TensorView q, TensorView k, TensorView v, TensorView packed, TensorView k_residual, TensorView v_residual, TensorView lengths,
            Optional<TensorView> table, Optional<TensorView>, Optional<TensorView>, TensorView out, Optional<TensorView> lse, Optional<TensorView>,
            TensorView, Optional<TensorView> plan, double scale, int64_t, int64_t limit, int64_t, bool advance) {
  const Cache cache{packed, k_residual, v_residual, lengths, table};
  for (int64_t b = 0; b < lengths.size(0); ++b)
    if (numbers(plan ? plan.value() : lengths)[b] >= 0) require_room(numbers(lengths)[b], q.size(1), limit);
  std::vector<int32_t> after;
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int32_t before = numbers(plan ? plan.value() : lengths)[b];
    after.push_back(before < 0 ? 0 : before + static_cast<int32_t>(q.size(1)));
    for (int64_t h = 0; before >= 0 && h < cache.heads(); ++h)
      for (int64_t t = 0; t < q.size(1); ++t) {
        const int64_t position = before + t;
        cache.append(k, v, b, h, t, position);
        if ((position + 1) % cache.block() == 0) cache.flush(b, h, position / cache.block());
      }
    if (advance) *cache.length(b) = after[b];
  }
  run(q, cache, [&](int64_t b) { return after[b]; }, out, lse, scale);
}

void unpack(TensorView packed, TensorView k_residual, TensorView v_residual, TensorView lengths, Optional<TensorView> table,
            Optional<TensorView>, Optional<TensorView>, Optional<TensorView>, TensorView k, TensorView v) {
  const Cache cache{packed, k_residual, v_residual, lengths, table};
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int64_t length = *cache.length(b), full = length / cache.block() * cache.block();
    for (int key = 0; key < 2; ++key) {
      const TensorView& to = key ? k : v;
      for (int64_t t = 0; t < length; ++t)
        for (int64_t h = 0; h < cache.heads(); ++h)
          for (int64_t c = 0; c < cache.dim(); ++c)
            static_cast<float*>(to.data_ptr())[b * stride(to, 0) + t * stride(to, 1) + h * stride(to, 2) + c] =
                cache.at(key, b, h, t, c, full);
    }
  }
}

int64_t workspace_bytes(int64_t batch, int64_t, int64_t) {
#if defined(FAULT_GREED)
  return batch << 40;
#endif
  return 64 * batch;
}
int64_t split_tokens(int64_t, int64_t, int64_t) { return 0; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, attend)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unpack, unpack)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, workspace_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(split_tokens, split_tokens)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_size, plan_size)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(advance, advance)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(crop, crop)
