// Static scales of K and V: given with a cache, one for every channel of a KV head, and not stored in blocks. The packed loop multiplies
// codes as they are: q is multiplied by K's scales when it is published, the sums of a head by V's when they are merged. Where groups have
// scales too (NVFP4), the channels of a head have one static scale, and only the factors of K's products have it.
#pragma once
#include <cstdint>
#include <type_traits>

namespace kvgen {

template <class Op, class = void>
constexpr bool kStatic = false;
template <class Op>
constexpr bool kStatic<Op, std::void_t<typename Op::StaticScale>> = true;
template <class Op>
constexpr bool kTwoLevels = kStatic<Op> && Op::kParams > 0;
template <class Op>
constexpr bool kStaticAlone = kStatic<Op> && Op::kParams == 0;

// A head's scales of K or of V, in a tensor [2, kv_heads, head_dim].
struct StaticScales {
  const float* key = nullptr;
  const float* value = nullptr;

  template <class Format>
  __device__ __forceinline__ static StaticScales of(const float* scales, int kv_heads, int head) {
    StaticScales found;
    if constexpr (kStatic<typename Format::Key>) found.key = scales + head * Format::kHeadDim;
    if constexpr (kStatic<typename Format::Value>) found.value = scales + (kv_heads + head) * Format::kHeadDim;
    return found;
  }
};

}  // namespace kvgen
