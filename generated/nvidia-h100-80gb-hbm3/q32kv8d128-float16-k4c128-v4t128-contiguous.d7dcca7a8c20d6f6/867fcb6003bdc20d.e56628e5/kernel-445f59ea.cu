#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 12 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<4, kvgen::Axis::channel, 128, true>;
using Value = kvgen::Quant<4, kvgen::Axis::token, 128, true>;
using ResidualRows = kvgen::ResidualRows<128, 0, 0, 0, 1>;
using Format = kvgen::Format<__half, Key, Value, 128, 128, ResidualRows>;
static_assert(Format::kSubtileBytes == 4224 && Format::kHeaderBytes == 512 && Format::kBlockBytes == 17408);
static_assert(kvgen::pack_smem_bytes<Format>() == 5632);

#line 28 "cuda/module.cu.jinja"
struct Schedule {
  // Shared memory of a CTA: offsets in bytes; kSlot is the size of a KV tile.
  struct StaticMemory {
    static constexpr int kSlot = 4736, kBarriers = 37888, kQuery = 37888, kMerge = 41984, kPages = 50240, kWorkTiles = 50240, kScalars = 50752, kFlags = 51072, kCluster = 51088, kFlush = 0, kTotal = 51200;
  };
  struct PlannedMemory {
    static constexpr int kSlot = 4736, kBarriers = 37888, kQuery = 37888, kMerge = 41984, kPages = 50240, kWorkTiles = 50240, kScalars = 50752, kFlags = 51072, kCluster = 51088, kFlush = 0, kTotal = 51200;
  };
  static constexpr int kWarps = 4;
  static constexpr int kTileSubtiles = 1;
  static constexpr int kTilesInFlight = 2;
  static constexpr int kCtasPerSm = 2;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::last_cta;
  static constexpr int kCluster = 1;
  static constexpr int kGroup = 4;
  static constexpr int kMaxQLen = 1;
  static constexpr int kQTiles = 1;
  static constexpr bool kPaged = false;
  static constexpr int kPageBlocks = 0;
  static constexpr int kWindowPlaces = 0;
  static constexpr bool kExactQ = true;
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
