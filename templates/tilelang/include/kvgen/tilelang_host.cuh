// The host side of the kernels that TileLang generated: grids, workspaces, plans, kernel arguments.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kvgen/host/args.cuh"
#include "kvgen/host/launch.cuh"
#include "kvgen/schedule/split_model.cuh"
#include "kvgen/tilelang.cuh"

namespace kvgen {

enum class Splits { automatic, wave };  // by a cost model; as many as run at once

// The kernels' arguments by the names that TileLang gave them. Strides and offsets count 16 bytes. The grid is `ctas` x `splits`. With
// a plan, the CTAs are workers, and `tiles_at` is where the plan's work tiles begin, counted in work tiles.
struct TileArgs {
  uint *q, *packed, *k_residual, *v_residual, *out;
  int *lengths, *table, *arrivals, *flushed, *readers, *plan, *overflow;
  float *lse, *partial, *stats;
  int64_t q_batch, q_token, q_head, out_batch, out_token, out_head;
  int64_t fresh_k, fresh_k_batch, fresh_k_token, fresh_k_head;  // new tokens, as offsets from the residual
  int64_t fresh_v, fresh_v_batch, fresh_v_token, fresh_v_head;
  int64_t packed_outer, packed_head, table_stride;
  int fresh, q_len, with_lse, ctas, runs, splits, limit, advance, tiles_at, empty_at;
  float scale;
};

// Numbers of a variant: kThreads, kCtasPerSm, kSplits, kCluster (whether the splits of a head are a cluster), kTileTokens, kTileBytes,
// kWaveBytes (see SplitModel), kRingBytes, kQRows (of a CTA), kQTiles, kWindow (0 without a sliding window).
template <class Format, class Schedule>
struct TileHost {
  static constexpr int kMaxRuns = ceil_div(Schedule::kGroup * Schedule::kMaxQLen, 8 * Schedule::kQTiles);
  static constexpr int kMaxSplits = Schedule::kCluster ? 8 : 256;
  static constexpr int kMaxBatch = kMaxPlanBatch;

  static int resident_ctas() { return multiprocessors() * Schedule::kCtasPerSm; }

  static int runs(int q_len) { return ceil_div(Schedule::kGroup * q_len, 8 * Schedule::kQTiles); }

  // Upper bound of the splits over all lengths, for the size of the workspace.
  static int most_splits(int cells) { return model(cells).most(kMaxSplits); }

  // Packed KV tiles that the splits of a sequence of `max_len` tokens read. With a sliding window these are the tiles that hold its tokens:
  // one more where it begins inside a tile.
  static int visible_tiles(int max_len) {
    const int reached = Schedule::kWindow + Schedule::kMaxQLen - 1 + Schedule::kTileTokens;
    return std::max(1, (Schedule::kWindow > 0 ? std::min(max_len, reached) : max_len) / Schedule::kTileTokens);
  }

  static int choose_splits(int cells, int max_len) {
    const int tiles = visible_tiles(max_len), most = std::min(most_splits(cells), tiles);
    if (Schedule::kSplits == Splits::wave) return std::clamp(resident_ctas() / cells, 1, most);
    return model(cells).cheapest(tiles, most);
  }

  // Counters, which every launch leaves at zero and whose positions depend on the batch only, then `slots` partial results.
  struct Workspace {
    int64_t arrivals, flushed, readers, stats, partial, bytes;
    Workspace(int batch, int kv_heads, int64_t slots) {
      const int64_t heads = static_cast<int64_t>(batch) * kv_heads;
      arrivals = 0;
      flushed = arrivals + heads * kMaxRuns * 4;
      readers = flushed + heads * 4;
      stats = (readers + batch * 4 + 127) / 128 * 128;
      partial = (stats + slots * Schedule::kQRows * 8 + 127) / 128 * 128;
      bytes = partial + slots * Schedule::kQRows * Format::kHeadDim * 4;
    }
  };

  // Slots for every split of any length, and for the work tiles of a plan.
  static int64_t workspace_bytes(int batch, int kv_heads, int, int) {
    const int heads = batch * kv_heads;
    const int64_t cells = static_cast<int64_t>(heads) * kMaxRuns;
    return Workspace(batch, kv_heads, std::max(cells * most_splits(heads), cells + resident_ctas())).bytes;
  }

  // Tokens of a split if all lengths are `max_len`; 0 if sequences are not split. Verification chooses its lengths by it.
  static int64_t split_tokens(int batch, int kv_heads, int max_len, int q_len) {
    if (batch == 0) return 0;
    const int splits = choose_splits(batch * kv_heads * runs(q_len), max_len);
    return splits == 1 ? 0 : ceil_div(visible_tiles(max_len), splits) * Schedule::kTileTokens;
  }

  static PlanShape plan_shape(int batch, int kv_heads, int q_len, bool append) {
    PlanShape shape;
    shape.batch = batch, shape.heads = kv_heads * runs(q_len), shape.workers = resident_ctas();
    shape.tile_tokens = Schedule::kTileTokens, shape.block_tokens = Format::kTokens, shape.unpacked = Format::ResidualRows::kUnpacked;
    shape.head_cost = ceil_div(start_bytes(Schedule::kCtasPerSm, Schedule::kRingBytes), Schedule::kTileBytes);
    shape.least_tiles = Schedule::kThreads / 32;
    shape.tile_residual = tile_residual(Schedule::kTileBytes, Format::kHeadDim);
    shape.window = Schedule::kWindow, shape.q_len = q_len, shape.fresh = append ? q_len : 0;
    return shape;
  }

  // Arguments of the program that takes the plan of `a`, or, where it has none, of the static one.
  static TileArgs arguments(const AttendArgs& a, bool append) {
    TileArgs t = tensor_arguments(a, append);
    int64_t slots = 0;
    if (a.plan) {
      const PlanShape shape = plan_shape(a.cache.batch, a.cache.kv_heads, a.q_len, append);
      t.plan = const_cast<int*>(a.plan), t.ctas = shape.workers, t.splits = 1, slots = shape.most_work_tiles();
      t.tiles_at = shape.tiles_at() / kWorkTile, t.empty_at = shape.empty_at();
    } else {
      t.ctas = a.cache.batch * a.cache.kv_heads * t.runs, t.splits = choose_splits(t.ctas, a.max_len);
      slots = static_cast<int64_t>(t.ctas) * t.splits;
      t.limit = append ? a.limit : INT32_MAX, t.overflow = a.overflow, t.advance = append && a.advance;
    }
    char* work = static_cast<char*>(a.workspace);
    const Workspace at(a.cache.batch, a.cache.kv_heads, slots);
    t.arrivals = reinterpret_cast<int*>(work + at.arrivals), t.flushed = reinterpret_cast<int*>(work + at.flushed);
    t.readers = reinterpret_cast<int*>(work + at.readers);
    t.stats = reinterpret_cast<float*>(work + at.stats), t.partial = reinterpret_cast<float*>(work + at.partial);
    return t;
  }

  // Launches one of the programs, which takes `shared_bytes`; with `clusters` the splits of a head are a cluster.
  template <class... Parameters, class... Arguments>
  static cudaError_t start(void (*kernel)(Parameters...), const TileArgs& t, int shared_bytes, bool clusters, cudaStream_t stream,
                           Arguments... values) {
    const int bytes = std::max(shared_bytes, pack_smem_bytes<Format>());
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(t.ctas, t.splits), config.blockDim = dim3(Schedule::kThreads);
    config.dynamicSmemBytes = bytes, config.stream = stream;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1, cluster.val.clusterDim.y = t.splits;
    config.attrs = &cluster, config.numAttrs = clusters ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(values)...);
  }

 private:
  static constexpr int kWorkTile = sizeof(WorkTile) / sizeof(int);

  static TileArgs tensor_arguments(const AttendArgs& a, bool append) {
    constexpr int kElements = 8;  // in 16 bytes
    TileArgs t = {};
    t.q = static_cast<uint*>(a.q.data), t.out = static_cast<uint*>(a.out.data);
    t.packed = reinterpret_cast<uint*>(a.cache.packed);
    t.k_residual = static_cast<uint*>(a.cache.k_residual), t.v_residual = static_cast<uint*>(a.cache.v_residual);
    t.lengths = a.cache.lengths, t.table = const_cast<int*>(a.cache.block_table), t.lse = a.lse, t.with_lse = a.lse != nullptr;
    t.q_batch = a.q.batch_stride / kElements, t.q_token = a.q.token_stride / kElements, t.q_head = a.q.head_stride / kElements;
    t.out_batch = a.out.batch_stride / kElements, t.out_token = a.out.token_stride / kElements, t.out_head = a.out.head_stride / kElements;
    if (append) {
      t.fresh = a.q_len;
      t.fresh_k = distance(a.cache.k_residual, a.k_new.data), t.fresh_v = distance(a.cache.v_residual, a.v_new.data);
      t.fresh_k_batch = a.k_new.batch_stride / kElements, t.fresh_k_token = a.k_new.token_stride / kElements;
      t.fresh_k_head = a.k_new.head_stride / kElements, t.fresh_v_batch = a.v_new.batch_stride / kElements;
      t.fresh_v_token = a.v_new.token_stride / kElements, t.fresh_v_head = a.v_new.head_stride / kElements;
    }
    t.packed_outer = a.cache.outer_stride_bytes / 16, t.packed_head = a.cache.head_stride_bytes / 16, t.table_stride = a.cache.table_stride;
    t.q_len = a.q_len, t.scale = a.scale * 1.4426950408889634f, t.runs = runs(a.q_len);
    return t;
  }
  static SplitModel model(int cells) { return {cells, resident_ctas(), Schedule::kCtasPerSm, Schedule::kTileBytes, Schedule::kWaveBytes}; }
  static int64_t distance(const void* from, const void* to) {
    return (reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from)) / 16;
  }
};

}  // namespace kvgen
