#line 1 "cuda/matrix.cu.jinja"
// Quantizes a matrix to 8 bits per channel, and reads it back: one variant.
#include "kvgen/matrix/module.cuh"

namespace {

struct Schedule {
  using Element = float;
  static constexpr DLDataType kType = kvgen::ffi::kFloat32;
  static constexpr int kThreadsX = 32, kThreadsY = 8, kThreads = kThreadsX * kThreadsY;
  static constexpr int kVector = 4, kRows = 4;
  static constexpr bool kSharedScales = false, kStreaming = true;
  static constexpr kvgen::matrix::Quotient kQuotient = kvgen::matrix::Quotient::divide;
};

using Module = kvgen::matrix::Module<Schedule>;

}  // namespace

KVGEN_EXPORT_MATRIX(Module)
