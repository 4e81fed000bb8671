#line 1 "cuda/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant.
#include "kvgen/module.cuh"
#line 9 "cuda/module.cu.jinja"

namespace {

using Key = kvgen::Quant<2, kvgen::Axis::channel, 128, true>;
using Value = kvgen::Quant<2, kvgen::Axis::token, 128, true>;
using Format = kvgen::Format<__half, Key, Value, 128, 128>;
static_assert(Format::kSubtileBytes == 2176 && Format::kHeaderBytes == 512 && Format::kBlockBytes == 9216);

#line 23 "cuda/module.cu.jinja"
struct Schedule {
  static constexpr int kWarps = 4;
  static constexpr int kTileSubtiles = 4;
  static constexpr int kTilesInFlight = 1;
  static constexpr int kCtasPerSm = 3;
  static constexpr kvgen::Copy kCopy = kvgen::Copy::cp_async;
  static constexpr kvgen::Reduction kReduction = kvgen::Reduction::last_cta;
  static constexpr int kCluster = 1;
  static constexpr int kGroup = 4;
  static constexpr int kMaxQLen = 1;
  static constexpr bool kPaged = false;
  static constexpr int kPageBlocks = 0;
  static constexpr bool kExactQ = true;
  static constexpr bool kOverlap = true;
  using Mask = kvgen::CausalMask;
  using ScoreModifier = kvgen::NoModifier;
};

struct Shape {
  static constexpr int kKvHeads = 8;
  static constexpr int kPage = 0;
};

using Module = kvgen::Module<Format, Schedule, Shape>;
static_assert(Module::Attend::kSharedBytes<Module::Attend::StaticTraits> == 50176, "traits.cuh and the search space count shared memory differently");

}  // namespace

KVGEN_EXPORT_MODULE(Module)
