// Division by a number that the host knows before a kernel runs.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KVGEN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVGEN_HOST_DEVICE inline
#endif

namespace kvgen {

// A number that divides by a multiplication and a shift (Granlund and Montgomery, "Division by invariant integers using multiplication",
// 1994). A GPU has no instruction that divides integers, and a compiler puts some 25 others in its place. Dividends are not negative.
// A Divisor may hold zero as long as nothing is divided by it.
class Divisor {
 public:
  constexpr Divisor(int value) : value_(value) {  // not explicit, so that a member of this type can be initialized from an int
    while ((int64_t{1} << shift_) < value) ++shift_;
    if (value > 0) multiplier_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - value) << 32) / value + 1);
  }
  KVGEN_HOST_DEVICE operator int() const { return value_; }
  KVGEN_HOST_DEVICE friend int operator/(int dividend, const Divisor& by) {
    const uint32_t n = static_cast<uint32_t>(dividend);
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * by.multiplier_) >> 32);
    return static_cast<int>((n + high) >> by.shift_);
  }
  friend int64_t operator/(int64_t dividend, const Divisor& by) { return dividend / by.value_; }  // for the host
  KVGEN_HOST_DEVICE friend int operator%(int dividend, const Divisor& by) { return dividend - dividend / by * by.value_; }

 private:
  int value_ = 0;
  int shift_ = 0;            // the least for which value <= 2^shift
  uint32_t multiplier_ = 0;  // 2^32 * (2^shift - value) / value + 1
};

}  // namespace kvgen
