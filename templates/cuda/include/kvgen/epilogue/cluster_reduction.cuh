// The CTAs of a cluster share one split of a head, and reduce a tile of query rows through distributed shared memory. Each CTA sums a slice
// of the elements, which the others send to it. The stores count their bytes on the receiver's mbarrier, so a CTA waits only for the slice
// that it sums.
#pragma once
#include "kvgen/epilogue/merge_warps.cuh"

#if KVGEN_SM90
namespace kvgen {

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

}  // namespace kvgen
#endif
