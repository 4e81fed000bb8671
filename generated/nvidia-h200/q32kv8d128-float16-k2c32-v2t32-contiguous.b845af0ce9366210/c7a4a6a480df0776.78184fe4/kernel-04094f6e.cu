#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 12 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<2, kvgen::Axis::channel, 32, true>;
using Value = kvgen::Quant<2, kvgen::Axis::token, 32, true>;
using ResidualRows = kvgen::ResidualRows<128, 0, 0, 0, 1>;
using Format = kvgen::Format<__half, Key, Value, 128, 128, ResidualRows>;
static_assert(Format::kSubtileBytes == 2560 && Format::kHeaderBytes == 2048 && Format::kBlockBytes == 12288);
static_assert(kvgen::pack_smem_bytes<Format>() == 10240);

#line 28 "cuda/module.cu.jinja"
struct Schedule {
  // Shared memory of a CTA: offsets in bytes; kSlot is the size of a KV tile.
  struct StaticMemory {
    static constexpr int kSlot = 3072, kBarriers = 49152, kQuery = 49152, kMerge = 53248, kPages = 69760, kWorkTiles = 69760, kScalars = 70784, kFlags = 71360, kCluster = 71376, kFlush = 0, kTotal = 73984;
  };
  struct PlannedMemory {
    static constexpr int kSlot = 3072, kBarriers = 49152, kQuery = 49152, kMerge = 53248, kPages = 69760, kWorkTiles = 69760, kScalars = 70784, kFlags = 71360, kCluster = 71376, kFlush = 0, kTotal = 71424;
  };
  static constexpr int kWarps = 8;
  static constexpr int kTileSubtiles = 1;
  static constexpr int kTilesInFlight = 2;
  static constexpr int kCtasPerSm = 1;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::cluster;
  static constexpr int kCluster = 8;
  static constexpr int kGroup = 4;
  static constexpr int kMaxQLen = 1;
  static constexpr int kQTiles = 1;
  static constexpr bool kPaged = false;
  static constexpr int kPageBlocks = 0;
  static constexpr int kWindowPlaces = 0;
  static constexpr bool kExactQ = false;
  static constexpr bool kOverlap = true;
  using Mask = kvgen::CausalMask;
  using ScoreModifier = kvgen::NoModifier;
  using Sinks = kvgen::NoSinks;
};

struct Shape {
  static constexpr int kKvHeads = 8;
  static constexpr int kPage = 0;
  static constexpr bool kSinks = Schedule::Sinks::kActive;
};

using Module = kvgen::Module<Format, Schedule, Shape>;

}  // namespace

KVGEN_EXPORT_MODULE(Module)
