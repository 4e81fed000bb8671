#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 4 "cuda/module.cu.jinja"
#include "kvgen/mainloop/sliding_window.cuh"
#line 7 "cuda/module.cu.jinja"
#include "kvgen/mainloop/softcap.cuh"
#line 12 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<8, kvgen::Axis::channel, 128, true>;
using Value = kvgen::Quant<8, kvgen::Axis::token, 128, true>;
using ResidualRows = kvgen::ResidualRows<128, 0, 0, 0, 1>;
using Format = kvgen::Format<__nv_bfloat16, Key, Value, 256, 128, ResidualRows>;
static_assert(Format::kSubtileBytes == 16640 && Format::kHeaderBytes == 1024 && Format::kBlockBytes == 67584);
static_assert(kvgen::pack_smem_bytes<Format>() == 11264);

#line 23 "cuda/module.cu.jinja"
struct Cap {
  static constexpr float kValue = 50.0f;
};

#line 28 "cuda/module.cu.jinja"
struct Schedule {
  // Shared memory of a CTA: offsets in bytes; kSlot is the size of a KV tile.
  struct StaticMemory {
    static constexpr int kSlot = 17664, kBarriers = 141312, kQuery = 141312, kMerge = 149504, kPages = 157728, kWorkTiles = 157728, kScalars = 158240, kFlags = 158560, kCluster = 158576, kFlush = 0, kTotal = 158592;
  };
  struct PlannedMemory {
    static constexpr int kSlot = 17664, kBarriers = 141312, kQuery = 141312, kMerge = 149504, kPages = 157728, kWorkTiles = 157728, kScalars = 158240, kFlags = 158560, kCluster = 158576, kFlush = 0, kTotal = 158592;
  };
  static constexpr int kWarps = 4;
  static constexpr int kTileSubtiles = 1;
  static constexpr int kTilesInFlight = 2;
  static constexpr int kCtasPerSm = 1;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::last_cta;
  static constexpr int kCluster = 1;
  static constexpr int kGroup = 2;
  static constexpr int kMaxQLen = 1;
  static constexpr int kQTiles = 1;
  static constexpr bool kPaged = false;
  static constexpr int kPageBlocks = 0;
  static constexpr int kWindowPlaces = 34;
  static constexpr bool kExactQ = true;
  static constexpr bool kOverlap = true;
  using Mask = kvgen::SlidingWindow<4096>;
  using ScoreModifier = kvgen::Softcap<Cap>;
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
