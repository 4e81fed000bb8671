#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 12 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<2, kvgen::Axis::channel, 128, true, 32, kvgen::Select::mean_abs>;
using Value = kvgen::Quant<2, kvgen::Axis::token, 128, true>;
using ResidualRows = kvgen::ResidualRows<128, 32, 128, 0, 1>;
using Format = kvgen::Format<__half, Key, Value, 128, 128, ResidualRows>;
static_assert(Format::kSubtileBytes == 2432 && Format::kHeaderBytes == 640 && Format::kBlockBytes == 10368);
static_assert(kvgen::pack_smem_bytes<Format>() == 10912);

#line 28 "cuda/module.cu.jinja"
struct Schedule {
  // Shared memory of a CTA: offsets in bytes; kSlot is the size of a KV tile.
  struct StaticMemory {
    static constexpr int kSlot = 10272, kBarriers = 123264, kQuery = 123264, kMerge = 127360, kPages = 152128, kWorkTiles = 152224, kScalars = 153760, kFlags = 154592, kCluster = 154608, kFlush = 0, kTotal = 156800;
  };
  struct PlannedMemory {
    static constexpr int kSlot = 10272, kBarriers = 123264, kQuery = 123264, kMerge = 127360, kPages = 152128, kWorkTiles = 152224, kScalars = 153760, kFlags = 154592, kCluster = 154608, kFlush = 0, kTotal = 154624;
  };
  static constexpr int kWarps = 12;
  static constexpr int kTileSubtiles = 4;
  static constexpr int kTilesInFlight = 1;
  static constexpr int kCtasPerSm = 1;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::cluster;
  static constexpr int kCluster = 2;
  static constexpr int kGroup = 4;
  static constexpr int kMaxQLen = 1;
  static constexpr int kQTiles = 1;
  static constexpr bool kPaged = true;
  static constexpr int kPageBlocks = 1;
  static constexpr int kWindowPlaces = 0;
  static constexpr bool kExactQ = false;
  static constexpr bool kOverlap = true;
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
