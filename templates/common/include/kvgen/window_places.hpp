// Where the packed blocks of a contiguous cache with a sliding window lie: in a ring buffer of a few places.
// kvgen/reference/window.py is the same for the host, and computes the number of places.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KVGEN_PLACES_FN __host__ __device__ static constexpr
#else
#define KVGEN_PLACES_FN static constexpr
#endif

namespace kvgen {

// With 0 places, every block has a place of its own.
template <int kPlaces>
struct WindowPlaces {
  static constexpr bool kInTurn = kPlaces > 0;

  KVGEN_PLACES_FN int64_t place(int64_t block) {
    if constexpr (kInTurn) return static_cast<uint32_t>(block) % static_cast<uint32_t>(kPlaces);
    return block;
  }
  // The oldest block that is still stored, of a sequence that had at most `packed` packed blocks.
  KVGEN_PLACES_FN int first(int packed) { return kInTurn && packed > kPlaces ? packed - kPlaces : 0; }
};

}  // namespace kvgen
