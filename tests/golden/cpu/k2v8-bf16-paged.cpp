#line 1 "cpu/module.cpp.jinja"
// Attention over a quantized KV cache: bfloat16, K int2 per token in groups of 24, V int8 per channel in groups of 32, symmetric.
#include "kvgen/module.hpp"
#include "kvgen/residual_rows.hpp"

namespace {

struct Config {
  using Element = kvgen::Bfloat;
  using Param = kvgen::Half;
  static constexpr DLDataType dtype = kvgen::ffi::kBfloat16;
  static constexpr int q_heads = 10, kv_heads = 2, head_dim = 96;
  static constexpr float softcap = 30.0f;
  static constexpr int window = 512;
  static constexpr bool sinks = false;

  // The packed layout: tokens and bytes.
  static constexpr int block = 64, subtile = 32, page_blocks = 1, window_places = 0;
  using Residual = kvgen::ResidualRows<block, 0, 0, 0, 1>;
  static constexpr int block_bytes = 9088, header_bytes = 384, subtile_bytes = 4352;
#line 26 "cpu/module.cpp.jinja"

  struct Key {
    static constexpr int bits = 2, group = 24, boosted = 0;
    static constexpr bool per_channel = false, zero = true, rows_are_tokens = true;
    static constexpr int codes_offset = 0;
    static constexpr int params_offset = 768;
  };
#line 26 "cpu/module.cpp.jinja"

  struct Value {
    static constexpr int bits = 8, group = 32, boosted = 0;
    static constexpr bool per_channel = true, zero = false, rows_are_tokens = false;
    static constexpr int codes_offset = 1280;
    static constexpr int params_offset = 0;
  };
#line 34 "cpu/module.cpp.jinja"

  // The launch.
  static constexpr kvgen::Dot dot = kvgen::Dot::fp32;
  static constexpr int rows = 5, key_tiles = 2, value_tiles = 2;
  static constexpr int chunk = 256, split_tokens = 4096, prefetch = 8;
  static constexpr int expanded = 160, workers = 256;
};

}  // namespace

KVGEN_CPU_MODULE(Config)
