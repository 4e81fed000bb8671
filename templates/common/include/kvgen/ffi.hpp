// The host side of a module: arguments of the TVM-FFI C ABI, checked with one sentence per mistake.
// Only the C header is used, so that a module compiles in a second and needs no C++ library of TVM.
#pragma once
#include <tvm/ffi/c_api.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace kvgen::ffi {

// A mistake of the caller: raised in Python as `kind` (an exception's name).
struct Error {
  const char* kind;
  char text[400];
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(const char* kind, const char* format, ...) {
  Error error{kind, {}};
  va_list values;
  va_start(values, format);
  std::vsnprintf(error.text, sizeof(error.text), format, values);
  va_end(values);
  throw error;
}

// Runs the body of an exported function; its int64_t result goes to Python, errors too.
template <class Body>
int guard(TVMFFIAny* result, Body body) {
  try {
    result->zero_padding = 0;
    result->v_int64 = 0;
    result->type_index = body(*result) ? kTVMFFIInt : kTVMFFINone;
    return 0;
  } catch (const Error& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind, error.text);
    return -1;
  }
}

constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kUint8{kDLUInt, 8, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kBfloat16{kDLBfloat, 16, 1};

inline const char* type_name(DLDataType type) {
  if (type.lanes != 1) return "a vector type";
  switch (type.code) {
    case kDLFloat: return type.bits == 16 ? "float16" : type.bits == 32 ? "float32" : type.bits == 64 ? "float64" : "a float type";
    case kDLBfloat: return "bfloat16";
    case kDLInt: return type.bits == 32 ? "int32" : type.bits == 64 ? "int64" : type.bits == 8 ? "int8" : "an int type";
    case kDLUInt: return type.bits == 8 ? "uint8" : "an unsigned type";
    default: return "another type";
  }
}

inline const char* device_name(int type) { return type == kDLCPU ? "the CPU" : type == kDLCUDA ? "a CUDA device" : "another device"; }

constexpr int64_t kAny = -1;

// A tensor whose shape was checked; strides are in elements.
template <int N>
struct View {
  char* data = nullptr;
  int64_t size[N] = {};
  int64_t stride[N] = {};

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// Requirements on a tensor's memory, beside its shape and the alignment of its elements.
enum class Memory {
  contiguous,  // one run
  blocks,      // one run that starts at a multiple of row_align bytes
  strided,     // any strides but the last, which is 1
  rows,        // the same, and every row starts at a multiple of row_align bytes
};

// Sizes and lengths are int32 in kernels: a larger one would wrap around.
inline int to_int(const char* function, const char* name, int64_t value) {
  if (value > INT32_MAX) fail("ValueError", "%s: %s is %lld, more than 2^31 - 1", function, name, (long long)value);
  return static_cast<int>(value);
}

// The arguments of one call.
class Args {
 public:
  const char* function;
  DLDevice device;  // of the tensors parsed so far

  Args(const char* function_, const TVMFFIAny* args, int32_t count, int32_t expected, DLDevice device_, int row_align)
      : function(function_), device(device_), args_(args), row_align_(row_align) {
    if (count != expected) fail("TypeError", "%s takes %d arguments, got %d", function, expected, count);
  }

  int64_t integer(int i, const char* name, int64_t least) const {
    const TVMFFIAny& arg = args_[i];
    if (arg.type_index != kTVMFFIInt) fail("TypeError", "%s: %s must be an int", function, name);
    if (arg.v_int64 < least)
      fail("ValueError", "%s: %s is %lld, must be at least %lld", function, name, (long long)arg.v_int64, (long long)least);
    return arg.v_int64;
  }
  int int32(int i, const char* name) const { return to_int(function, name, integer(i, name, 0)); }
  bool flag(int i, const char* name) const { return integer(i, name, 0) != 0; }

  double real(int i, const char* name) const {
    const TVMFFIAny& arg = args_[i];
    if (arg.type_index == kTVMFFIInt) return static_cast<double>(arg.v_int64);
    if (arg.type_index != kTVMFFIFloat) fail("TypeError", "%s: %s must be a float", function, name);
    return arg.v_float64;
  }

  bool given(int i) const { return args_[i].type_index != kTVMFFINone; }

  // The tensor at place i; `shape` may hold kAny. All tensors of a call lie on one device.
  template <int N>
  View<N> tensor(int i, const char* name, DLDataType type, const int64_t (&shape)[N], Memory memory) {
    const DLTensor& t = dltensor(i, name);
    if (t.dtype.code != type.code || t.dtype.bits != type.bits || t.dtype.lanes != 1)
      fail("TypeError", "%s: %s must be %s, is %s", function, name, type_name(type), type_name(t.dtype));
    check_device(t, name);
    if (t.ndim != N) fail("ValueError", "%s: %s must have %d dimensions, has %d", function, name, N, t.ndim);
    const bool strides = memory == Memory::strided || memory == Memory::rows;
    View<N> view;
    view.data = static_cast<char*>(t.data) + t.byte_offset;
    int64_t run = 1, items = 1;
    bool apart = false;
    for (int d = N - 1; d >= 0; --d) {
      view.size[d] = t.shape[d];
      view.stride[d] = t.strides ? t.strides[d] : run;
      if (shape[d] != kAny && shape[d] != t.shape[d])
        fail("ValueError", "%s: %s has size %lld in dimension %d, must be %lld", function, name, (long long)t.shape[d], d,
             (long long)shape[d]);
      apart |= !(strides && d != N - 1) && t.shape[d] > 1 && view.stride[d] != run;
      run *= t.shape[d];
      items *= t.shape[d];
    }
    if (items > 0 && apart)
      fail("ValueError", "%s: %s must be %s", function, name, strides ? "contiguous in its last dimension" : "contiguous");
    if (items > 0) check_alignment(view, name, type.bits / 8, memory);
    return view;
  }

 private:
  const DLTensor& dltensor(int i, const char* name) const {
    const TVMFFIAny& arg = args_[i];
    if (arg.type_index == kTVMFFIDLTensorPtr) return *static_cast<const DLTensor*>(arg.v_ptr);
    if (arg.type_index != kTVMFFITensor) fail("TypeError", "%s: %s must be a tensor", function, name);
    return *reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(arg.v_obj) + sizeof(TVMFFIObject));
  }

  void check_device(const DLTensor& t, const char* name) {
    if (t.device.device_type != device.device_type)
      fail("ValueError", "%s: %s must be on %s, is on %s", function, name, device_name(device.device_type),
           device_name(t.device.device_type));
    if (device.device_id >= 0 && t.device.device_id != device.device_id)
      fail("ValueError", "%s: %s is on device %d, the tensors before it on %d", function, name, t.device.device_id, device.device_id);
    device.device_id = t.device.device_id;
  }

  template <int N>
  void check_alignment(const View<N>& view, const char* name, int item, Memory memory) const {
    const bool wide = memory == Memory::blocks || memory == Memory::rows;
    const int row = wide && row_align_ > item ? row_align_ : item;
    const int to = wide && row < 4 && item == 1 ? 4 : row;  // bytes hold numbers of up to 4 bytes
    bool aligned = reinterpret_cast<uintptr_t>(view.data) % to == 0;
    if (memory == Memory::rows)
      for (int d = 0; d < N - 1; ++d) aligned = aligned && (view.size[d] < 2 || view.stride[d] * item % row == 0);
    if (!aligned)
      fail("ValueError", "%s: %s%s must start at %s of %d bytes", function, memory == Memory::rows ? "rows of " : "", name,
           memory == Memory::rows ? "multiples" : "a multiple", to);
  }

  const TVMFFIAny* args_;
  int row_align_;
};

// --- whether tensors share memory: a call must not write to bytes that it reads, nor write to bytes twice -----------------

using Run = std::pair<uintptr_t, uintptr_t>;  // bytes [first, second)

// The bytes from the first to the last of a tensor. Strides are not negative, since torch has no such tensors.
template <int N>
Run span_of(const View<N>& view, int64_t item) {
  int64_t last = 0;
  for (int d = 0; d < N; ++d) {
    if (view.size[d] == 0) return {};
    last += (view.size[d] - 1) * view.stride[d];
  }
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  return {begin, begin + static_cast<uintptr_t>((last + 1) * item)};
}

// The rows of a tensor whose last dimension is contiguous, in the order of memory.
template <int N>
std::vector<Run> rows_of(const View<N>& view, int64_t item) {
  int64_t count = 1;
  for (int d = 0; d < N - 1; ++d) count *= view.size[d];
  std::vector<Run> rows(count);
  for (int64_t row = 0; row < count; ++row) {
    int64_t at = 0, rest = row;
    for (int d = N - 2; d >= 0; rest /= view.size[d--]) at += rest % view.size[d] * view.stride[d];
    const auto begin = reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(at * item);
    rows[row] = {begin, begin + static_cast<uintptr_t>(view.size[N - 1] * item)};
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

// Raises where elements of a tensor that a call writes share memory, as those of an expanded one do (its stride is 0).
template <int N>
void check_once(const char* function, const char* name, const View<N>& written, int64_t item) {
  bool dense = true;
  int64_t run = 1;
  for (int d = N - 1; d >= 0; run *= written.size[d--]) dense = dense && (written.size[d] <= 1 || written.stride[d] == run);
  if (dense || run == 0) return;
  const std::vector<Run> rows = rows_of(written, item);
  for (size_t i = 1; i < rows.size(); ++i)
    if (rows[i].first < rows[i - 1].second) fail("ValueError", "%s: %s overlaps with itself", function, name);
}

// Raises where a tensor that a call writes shares memory with another. Their spans are compared, and only if these meet, all rows.
template <int N, int M>
void check_apart(const char* function, const char* name, const View<N>& written, int64_t item, const char* other_name, const View<M>& other,
                 int64_t other_item) {
  const Run a = span_of(written, item), b = span_of(other, other_item);
  if (!other || a.first >= b.second || b.first >= a.second) return;
  const std::vector<Run> rows = rows_of(written, item);
  for (const Run& run : rows_of(other, other_item)) {
    const auto after = std::lower_bound(rows.begin(), rows.end(), Run{run.second, 0});
    if (after != rows.begin() && run.first < (after - 1)->second) fail("ValueError", "%s: %s overlaps with %s", function, name, other_name);
  }
}

}  // namespace kvgen::ffi

#define KVGEN_EXPORT(name) \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result)
