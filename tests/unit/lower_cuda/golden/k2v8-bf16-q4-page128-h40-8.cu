#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 12 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<2, kvgen::Axis::channel, 128, true>;
using Value = kvgen::Quant<8, kvgen::Axis::token, 128, true>;
using ResidualRows = kvgen::ResidualRows<128, 0, 0, 0, 4>;
using Format = kvgen::Format<__nv_bfloat16, Key, Value, 128, 128, ResidualRows>;
static_assert(Format::kSubtileBytes == 5248 && Format::kHeaderBytes == 512 && Format::kBlockBytes == 21504);
static_assert(kvgen::pack_smem_bytes<Format>() == 5632);

#line 28 "cuda/module.cu.jinja"
struct Schedule {
  // Shared memory of a CTA: offsets in bytes; kSlot is the size of a KV tile.
  struct StaticMemory {
    static constexpr int kSlot = 11008, kBarriers = 88064, kQuery = 88064, kMerge = 92160, kPages = 125184, kWorkTiles = 125248, kScalars = 126272, kFlags = 126912, kCluster = 126928, kFlush = 0, kTotal = 126976;
  };
  struct PlannedMemory {
    static constexpr int kSlot = 11008, kBarriers = 88064, kQuery = 88064, kMerge = 92160, kPages = 125184, kWorkTiles = 125248, kScalars = 126272, kFlags = 126912, kCluster = 126928, kFlush = 0, kTotal = 126976;
  };
  static constexpr int kWarps = 8;
  static constexpr int kTileSubtiles = 2;
  static constexpr int kTilesInFlight = 1;
  static constexpr int kCtasPerSm = 1;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::two_level;
  static constexpr int kCluster = 1;
  static constexpr int kGroup = 5;
  static constexpr int kMaxQLen = 4;
  static constexpr int kQTiles = 2;
  static constexpr bool kPaged = true;
  static constexpr int kPageBlocks = 1;
  static constexpr int kWindowPlaces = 0;
  static constexpr bool kExactQ = true;
  static constexpr bool kOverlap = false;
  using Mask = kvgen::CausalMask;
  using ScoreModifier = kvgen::NoModifier;
  using Sinks = kvgen::NoSinks;
};

struct Shape {
  static constexpr int kKvHeads = 8;
  static constexpr int kPage = 128;
  static constexpr bool kSinks = Schedule::Sinks::kActive;
};

using Module = kvgen::Module<Format, Schedule, Shape>;

}  // namespace

KVGEN_EXPORT_MODULE(Module)
