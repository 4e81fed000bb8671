// Merges the warps' states of a head through shared memory into the result of the CTA.
#pragma once
#include "kvgen/epilogue/workspace.cuh"
#include "kvgen/format/rotate.cuh"
#include "kvgen/mainloop/softmax.cuh"

namespace kvgen {

// The result of a CTA for a tile of query rows. A thread has every kStride-th channel of one row, so it computes each warp's rescaling
// factor once.
template <class Traits>
struct CtaResult {
  static constexpr int kElements = Traits::kTileQRows * Traits::kHeadDim;
  static constexpr int per_thread(int least) { return Traits::kHeadDim % least ? per_thread(least + 1) : least; }
  // Rotated channels of a row lie in the lanes of one warp: a power of two of them.
  static constexpr int row_lanes(int most) {
    return most > 32 || Traits::kHeadDim % most || most * Traits::kTileQRows > Traits::kThreads ? row_lanes(most / 2) : most;
  }
  static constexpr int kPerThread = kRotated<typename Traits::Value> ? Traits::kHeadDim / row_lanes(32)
                                                                     : per_thread(ceil_div(kElements, Traits::kThreads)),
                       kStride = Traits::kHeadDim / kPerThread;
  PartialSum<kPerThread> sum;

  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / kStride; }
  __device__ __forceinline__ static int channel() { return static_cast<int>(threadIdx.x) % kStride; }
  // Whether this thread has elements of the result.
  __device__ __forceinline__ static bool any() { return row() < Traits::kTileQRows; }
  // Multiplies sums of codes by V's static scales.
  __device__ __forceinline__ void scale(const float* scales) {
    if (!any()) return;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sum.value[i] *= scales[channel() + i * kStride];
  }
  // Rotates the output back. The rotation is linear, so it does not matter that it precedes the sum over splits. All threads call it.
  __device__ __forceinline__ void rotate_back() {
    if constexpr (kRotated<typename Traits::Value>) {
      mix_channels<Rotation<typename Traits::Value>, 1, kStride>(sum.value, threadIdx.x % 32);
      negate_channels<Rotation<typename Traits::Value>, 1, kStride>(sum.value, 0, threadIdx.x % 32);
    }
  }
};

// Writes a warp's state of a tile of query rows to shared memory, in the order of channels.
template <class Traits>
__device__ __forceinline__ void publish_state(State<Traits>& state, float* buffer, RowStats* stats, int warp, int lane) {
#pragma unroll
  for (int lanes = Traits::kQueryTwice ? 2 : 4; lanes < 32; lanes *= 2)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.row_sum[c] += __shfl_xor_sync(~0u, state.row_sum[c], lanes);
#pragma unroll
      for (int q = 0; q < Traits::kValueGroups; ++q) state.affine[q][c] += __shfl_xor_sync(~0u, state.affine[q][c], lanes);
    }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = 2 * (lane % 4) + c, g = lane / 4;
    if (row >= Traits::kTileQRows) continue;
    if (g == 0) stats[warp * 8 + row] = RowStats{state.row_max[c], state.row_sum[c]};
    float* to = buffer + (warp * Traits::kTileQRows + row) * Traits::kMergeStride;
#pragma unroll
    for (int u = 0; u < Traits::kRowTiles; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[Traits::ValueRuns::tile_channel(u, g / 2) + g % 2 + 2 * half] =
            state.out[u][2 * half + c] + state.affine[u * Traits::kValueGroups / Traits::kRowTiles][c];
  }
}

// Merges the published states. A CTA barrier must precede the call.
template <class Traits>
__device__ __forceinline__ void merge_warps(const float* buffer, const RowStats* stats, CtaResult<Traits>& result) {
  if (!result.any()) return;
  const int row = result.row();
  const float* from = buffer + row * Traits::kMergeStride + result.channel();
  result.sum.template add<Traits::kWarps>(
      [&](int warp) { return stats[warp * 8 + row]; },
      [&](int warp, int i) { return from[warp * Traits::kTileQRows * Traits::kMergeStride + i * result.kStride]; });
}

// The CTAs of a cluster share one split of a head, and reduce a tile of query rows through distributed shared memory. Each CTA sums a slice
// of the elements, which the others send to it. The stores count their bytes on the receiver's mbarrier, so a CTA waits only for the slice
// that it sums.

#if KVGEN_SM90
template <class Traits>
struct ClusterReduction {
  static constexpr int kCluster = Traits::kCluster, kElements = CtaResult<Traits>::kElements, kOwn = kElements / kCluster;
  // One thread per CTA of the cluster sends the row stats.
  static_assert(kElements % kCluster == 0 && CtaResult<Traits>::kStride >= kCluster);
  static constexpr int kBytes = kElements * 4 + kCluster * 64 + 16;  // of a tile of query rows: values, stats, barrier
  static_assert(Traits::kQTiles * kBytes <= Traits::Memory::kTotal - Traits::Memory::kCluster);
  float* values;    // [sender][element of this CTA's slice]
  RowStats* stats;  // [sender][row]
  uint32_t barrier;

  __device__ ClusterReduction(uint8_t* memory, int q_tile) {
    values = reinterpret_cast<float*>(memory + Traits::Memory::kCluster + q_tile * kBytes);
    stats = reinterpret_cast<RowStats*>(values + kElements);
    barrier = ptx::shared_address(stats + kCluster * 8);
  }
  // Announces to the cluster that this CTA's barriers are initialized; `run` waits until all CTAs have announced it. All threads call it.
  __device__ static void open(uint8_t* memory) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int tile = 0; tile < Traits::kQTiles; ++tile) ptx::barrier_init(ClusterReduction(memory, tile).barrier, 1);
      ptx::barrier_init_fence();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  // Sets the number of bytes that the barriers expect. Bytes that arrive earlier do not complete a barrier, since its arrival is still
  // missing.
  __device__ static void expect(uint8_t* memory) {
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int tile = 0; tile < Traits::kQTiles; ++tile)
      ptx::barrier_expect(ClusterReduction(memory, tile).barrier, kElements * 4 + kCluster * Traits::kTileQRows * 8);
  }
  // Passes the sums of this CTA's slice to `use(row, channel, sum)`.
  template <class Use>
  __device__ __forceinline__ void run(int q_tile, const CtaResult<Traits>& result, Use&& use) const {
    const int rank = blockIdx.x % kCluster;
    if (q_tile == 0) ptx::cluster_wait();
    if (const int row = result.row(), channel = result.channel(); result.any()) {
#pragma unroll
      for (int i = 0; i < result.kPerThread; ++i) {
        const int at = row * Traits::kHeadDim + channel + i * result.kStride;
        send(values + rank * kOwn + at % kOwn, at / kOwn, result.sum.value[i]);
      }
      if (channel < kCluster) send(stats + rank * 8 + row, channel, make_float2(result.sum.stats.row_max, result.sum.stats.row_sum));
    }
    ptx::barrier_wait(barrier, 0);
    for (int at = threadIdx.x; at < kOwn; at += Traits::kThreads) {
      const int row = (rank * kOwn + at) / Traits::kHeadDim, channel = (rank * kOwn + at) % Traits::kHeadDim;
      PartialSum<1> sum;
      sum.template add<kCluster>([&](int i) { return stats[i * 8 + row]; }, [&](int i, int) { return values[i * kOwn + at]; });
      use(row, channel, sum);
    }
  }

 private:
  template <class Value>
  __device__ __forceinline__ void send(void* place, int to, Value value) const {
    ptx::send_cluster(ptx::cluster_address(ptx::shared_address(place), to), value, ptx::cluster_address(barrier, to));
  }
};
#endif

}  // namespace kvgen
