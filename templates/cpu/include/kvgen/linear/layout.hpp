// Where codes, scales and zeros of a weight [n, k] lie (docs/linear.md, "On a CPU"; kvgen/format/weights.py packs it).
//
// A tile has 16 rows, a block 4 tiles, the last one maybe fewer. A block is one stream of memory: units of `group` channels (64 where a
// whole row has one scale), and in a unit the codes of 64 channels of every tile, of the next 64 channels, and so on, then the scales of
// all tiles, then their zeros. Scales and zeros of whole rows lie behind all blocks.
#pragma once

#include "kvgen/codec/integers.hpp"

namespace kvgen::linear {

constexpr int kRun = 64;        // channels of a run: those of a tile's codes that lie together
constexpr int kBlockTiles = 4;  // tiles of a block

template <class C>
struct Layout {
  using Code = Integers<C::bits, true>;
  using Scale = typename C::Scale;
  static constexpr bool row = C::group == 0;
  static constexpr int tiles = C::n / kLanes;
  // Channels whose products are summed before a scale meets the sum. Of a whole row's any number would do.
  static constexpr int unit = !row ? C::group : C::k % (2 * kRun) == 0 ? 2 * kRun : kRun;
  static constexpr int units = C::k / unit, runs = unit / kRun;
  static constexpr int run_bytes = kRun * kLanes * C::bits / 8;
  static constexpr int scale_bytes = kLanes * sizeof(Scale), zero_bytes = C::zero ? kLanes : 0;  // of a tile
  static constexpr int params = row ? 0 : scale_bytes + zero_bytes;
  static constexpr int64_t tile_bytes = int64_t{units} * (runs * run_bytes + params);
  static constexpr int64_t bytes = tiles * (tile_bytes + (row ? scale_bytes + zero_bytes : 0));

  static int tiles_of(int block) { return tiles - block * kBlockTiles < kBlockTiles ? tiles - block * kBlockTiles : kBlockTiles; }
};

// Some tiles of one block, unit by unit.
template <class C>
class Stream {
  using L = Layout<C>;

 public:
  Stream(const uint8_t* packed, int tile)
      : all_(L::tiles_of(tile / kBlockTiles)),
        first_(tile % kBlockTiles),
        at_(packed + (tile - first_) * L::tile_bytes),
        scales_(packed + L::tiles * L::tile_bytes + tile * L::scale_bytes),
        zeros_(packed + L::tiles * (L::tile_bytes + L::scale_bytes) + tile * L::zero_bytes) {}

  // Codes of a run of tile `t`, counted from the first.
  const uint8_t* codes(int run, int t) const { return at_ + (run * all_ + first_ + t) * L::run_bytes; }

  F32 scale(int t) const {
    return load_floats<typename L::Scale>(L::row ? scales_ + t * L::scale_bytes : params() + (first_ + t) * L::scale_bytes);
  }

  // The scale that belongs to the sum of this unit alone.
  F32 unit_scale(int t) const { return L::row ? splat<F32>(1.0f) : scale(t); }

  I32 zero(int t) const {
    const uint8_t* from = L::row ? zeros_ + t * L::zero_bytes : params() + all_ * L::scale_bytes + (first_ + t) * L::zero_bytes;
    return bytes(from);
  }

  void next() { at_ += all_ * (L::runs * L::run_bytes + L::params); }

 private:
  const uint8_t* params() const { return at_ + all_ * L::runs * L::run_bytes; }

  static I32 bytes(const uint8_t* from) {
#ifdef __AVX512F__
    return (I32)_mm512_cvtepu8_epi32((__m128i)load<Lanes<uint8_t, 16>>(from));
#else
    int32_t wide[kLanes];
    for (int i = 0; i < kLanes; ++i) wide[i] = from[i];
    return load<I32>(wide);
#endif
  }

  int all_, first_;
  const uint8_t *at_, *scales_, *zeros_;
};

}  // namespace kvgen::linear
