#line 1 "cpu/module.cpp.jinja"
// Attention over a quantized KV cache: float32, K not quantized, V not quantized.
#include "kvgen/module.hpp"
#include "kvgen/residual_rows.hpp"

namespace {

struct Config {
  using Element = float;
  using Param = float;
  static constexpr DLDataType dtype = kvgen::ffi::kFloat32;
  static constexpr int q_heads = 2, kv_heads = 2, head_dim = 64;
  static constexpr float softcap = 0.0f;
  static constexpr int window = 0;
  static constexpr bool sinks = false;

  // The packed layout: tokens and bytes.
  static constexpr int block = 128, subtile = 32, page_blocks = 0, window_places = 0;
  using Residual = kvgen::ResidualRows<block, 0, 0, 0, 1>;
  static constexpr int block_bytes = 65536, header_bytes = 0, subtile_bytes = 16384;
#line 26 "cpu/module.cpp.jinja"

  struct Key {
    static constexpr int bits = 16, group = 64, boosted = 0;
    static constexpr bool per_channel = false, zero = false, rows_are_tokens = true;
    static constexpr int codes_offset = 0;
    static constexpr int params_offset = 8192;
  };
#line 26 "cpu/module.cpp.jinja"

  struct Value {
    static constexpr int bits = 16, group = 64, boosted = 0;
    static constexpr bool per_channel = false, zero = false, rows_are_tokens = false;
    static constexpr int codes_offset = 8192;
    static constexpr int params_offset = 16384;
  };
#line 34 "cpu/module.cpp.jinja"

  // The launch.
  static constexpr kvgen::Dot dot = kvgen::Dot::fp32;
  static constexpr int rows = 1, key_tiles = 8, value_tiles = 4;
  static constexpr int chunk = 128, split_tokens = 4096, prefetch = 8;
  static constexpr int expanded = 256, workers = 256;
};

}  // namespace

KVGEN_CPU_MODULE(Config)
