// The arrays in a CTA's shared memory. Their offsets are in the rendered source (kvgen/lower/cuda/shared.py).
#pragma once
#include "kvgen/epilogue/workspace.cuh"
#include "kvgen/mainloop/traits.cuh"
#include "kvgen/schedule/work_queue.cuh"

namespace kvgen {

template <class Traits>
struct Shared {
  uint8_t* memory;
  uint8_t* fragments;  // of q
  float* factors;      // per query row: converts products to scores in log2 units
  float* query_sums;   // per K group and query row: sum of q
  float* merge;
  RowStats* warp_stats;
  WorkTile* work_tiles;  // of all warps
  int* pages;            // of all warps: entries of the block table
  int* flags;

  __device__ explicit Shared(uint8_t* memory_) : memory(memory_) {
    fragments = memory + Traits::Memory::kQuery;
    factors = reinterpret_cast<float*>(memory + Traits::Memory::kScalars);
    query_sums = factors + Traits::kQTiles * 8;
    warp_stats = reinterpret_cast<RowStats*>(query_sums + Traits::kQTiles * 8 * Traits::kKeyGroups);
    flags = reinterpret_cast<int*>(memory + Traits::Memory::kFlags);
    merge = reinterpret_cast<float*>(memory + Traits::Memory::kMerge);
    work_tiles = reinterpret_cast<WorkTile*>(memory + Traits::Memory::kWorkTiles);
    pages = reinterpret_cast<int*>(memory + Traits::Memory::kPages);
  }
  __device__ uint32_t ring() const { return ptx::shared_address(memory); }
  __device__ uint32_t query() const { return ptx::shared_address(fragments); }
};

}  // namespace kvgen
