#line 1 "cpu/module.cpp.jinja"
// Attention over a quantized KV cache: float16, K int4 per channel in groups of 32, V int4 per token in groups of 64.
#include "kvgen/module.hpp"
#include "kvgen/residual_rows.hpp"

namespace {

struct Config {
  using Element = kvgen::Half;
  using Param = kvgen::Half;
  static constexpr DLDataType dtype = kvgen::ffi::kFloat16;
  static constexpr int q_heads = 32, kv_heads = 8, head_dim = 128;
  static constexpr float softcap = 0.0f;
  static constexpr int window = 0;
  static constexpr bool sinks = false;

  // The packed layout: tokens and bytes.
  static constexpr int block = 128, subtile = 32, page_blocks = 0, window_places = 0;
  using Residual = kvgen::ResidualRows<block, 0, 0, 0, 1>;
  static constexpr int block_bytes = 19456, header_bytes = 2048, subtile_bytes = 4352;
#line 26 "cpu/module.cpp.jinja"

  struct Key {
    static constexpr int bits = 4, group = 32, boosted = 0;
    static constexpr bool per_channel = true, zero = true, rows_are_tokens = true;
    static constexpr int codes_offset = 0;
    static constexpr int params_offset = 0;
  };
#line 26 "cpu/module.cpp.jinja"

  struct Value {
    static constexpr int bits = 4, group = 64, boosted = 0;
    static constexpr bool per_channel = false, zero = true, rows_are_tokens = false;
    static constexpr int codes_offset = 2048;
    static constexpr int params_offset = 4096;
  };
#line 34 "cpu/module.cpp.jinja"

  // The launch.
  static constexpr kvgen::Dot dot = kvgen::Dot::fp32;
  static constexpr int rows = 4, key_tiles = 4, value_tiles = 4;
  static constexpr int chunk = 128, split_tokens = 4096, prefetch = 8;
  static constexpr int expanded = 128, workers = 256;
};

}  // namespace

KVGEN_CPU_MODULE(Config)
