#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 4 "cuda/module.cu.jinja"
#include "kvgen/mainloop/sliding_window.cuh"
#line 10 "cuda/module.cu.jinja"
#include "kvgen/epilogue/learned_sinks.cuh"
#line 12 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<8, kvgen::Axis::channel, 128, true>;
using Value = kvgen::Quant<8, kvgen::Axis::token, 64, true>;
using ResidualRows = kvgen::ResidualRows<128, 0, 0, 0, 1>;
using Format = kvgen::Format<__nv_bfloat16, Key, Value, 64, 128, ResidualRows>;
static_assert(Format::kSubtileBytes == 4224 && Format::kHeaderBytes == 256 && Format::kBlockBytes == 17152);
static_assert(kvgen::pack_smem_bytes<Format>() == 2816);

#line 28 "cuda/module.cu.jinja"
struct Schedule {
  // Shared memory of a CTA: offsets in bytes; kSlot is the size of a KV tile.
  struct StaticMemory {
    static constexpr int kSlot = 4480, kBarriers = 71680, kQuery = 71680, kMerge = 72704, kPages = 89344, kWorkTiles = 89344, kScalars = 90368, kFlags = 90944, kCluster = 90960, kFlush = 0, kTotal = 91008;
  };
  struct PlannedMemory {
    static constexpr int kSlot = 4480, kBarriers = 71680, kQuery = 71680, kMerge = 72704, kPages = 89344, kWorkTiles = 89344, kScalars = 90368, kFlags = 90944, kCluster = 90960, kFlush = 0, kTotal = 91008;
  };
  static constexpr int kWarps = 8;
  static constexpr int kTileSubtiles = 1;
  static constexpr int kTilesInFlight = 2;
  static constexpr int kCtasPerSm = 1;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::last_cta;
  static constexpr int kCluster = 1;
  static constexpr int kGroup = 8;
  static constexpr int kMaxQLen = 1;
  static constexpr int kQTiles = 1;
  static constexpr bool kPaged = false;
  static constexpr int kPageBlocks = 0;
  static constexpr int kWindowPlaces = 3;
  static constexpr bool kExactQ = true;
  static constexpr bool kOverlap = true;
  using Mask = kvgen::SlidingWindow<128>;
  using ScoreModifier = kvgen::NoModifier;
  using Sinks = kvgen::LearnedSinks;
};

struct Shape {
  static constexpr int kKvHeads = 8;
  static constexpr int kPage = 0;
  static constexpr bool kSinks = Schedule::Sinks::kActive;
};

using Module = kvgen::Module<Format, Schedule, Shape>;

}  // namespace

KVGEN_EXPORT_MODULE(Module)
