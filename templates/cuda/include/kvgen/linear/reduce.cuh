// The sums of a CTA's warps, and of a cluster's CTAs, in their order; bias, activation and residual; the stores.
#pragma once
#include "kvgen/linear/weights.cuh"

namespace kvgen::linear {

enum class Epilogue { none, silu_mul, add };

// Of one call. Strides are in bytes.
struct Arguments {
  const uint8_t* x;
  const uint8_t* packed;
  const uint8_t* bias;
  const uint8_t* residual;
  uint8_t* out;
  int64_t x_stride, residual_stride, out_stride;
  int rows;
};

template <class Schedule>
class Sums {
  using Element = typename Schedule::Element;
  using Packed = Layout<Schedule>;
  static constexpr int kBlock = 16 * Schedule::kTiles * Schedule::kWarpsN, kThreads = Schedule::kWarpsN * Schedule::kWarpsK * 32;
  static constexpr int kPitch = 4 * (kBlock + 4);  // bytes of a row of x: a warp's stores meet no bank twice
  static constexpr int kWarpBytes = Schedule::kRows * kPitch, kColumns = Schedule::kRows / 8;
  static constexpr bool kGated = Schedule::kEpilogue == Epilogue::silu_mul;
  static constexpr int kOutputs = kGated ? kBlock / 2 : kBlock;  // of a row of x

  const Arguments& a_;
  uint32_t shared_;
  int block_, rank_;

 public:
  static constexpr int kBytes = Schedule::kWarpsK * kWarpBytes;

  __device__ Sums(const Arguments& a, uint32_t shared, int block, int rank) : a_(a), shared_(shared), block_(block), rank_(rank) {}

  __device__ __forceinline__ void store(const float (&total)[Schedule::kTiles][kColumns][4]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp % Schedule::kWarpsN * 16 * Schedule::kTiles + lane / 4;
    const uint32_t mine = shared_ + warp / Schedule::kWarpsN * kWarpBytes + lane % 4 * 2 * kPitch + 4 * row;
#pragma unroll
    for (int t = 0; t < Schedule::kTiles; ++t)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          constexpr float kUnfold = 1.f / Decoder<Element, Schedule::kBits>::kFold;  // of rows g + 8
          store_shared_float(mine + (8 * c + j % 2) * kPitch + 4 * (16 * t + j / 2 * 8), j < 2 ? total[t][c][j] : total[t][c][j] * kUnfold);
        }
    __syncthreads();
    if constexpr (Schedule::kSplit > 1) add_warps();
    const int items = a_.rows * (kOutputs / 4);
    for (int item = items * rank_ / Schedule::kSplit + threadIdx.x; item < items * (rank_ + 1) / Schedule::kSplit; item += kThreads)
      finish(item / (kOutputs / 4), item % (kOutputs / 4) * 4);
#if KVGEN_SM90
    if constexpr (Schedule::kSplit > 1) ptx::cluster_arrive_relaxed(), ptx::cluster_wait();  // others read this CTA's sums
#endif
  }

 private:
  // Four neighbouring rows of W of the sum over the CTA's warps.
  __device__ __forceinline__ float4 over_warps(int x_row, int row) const {
    float4 sum = load_shared_floats(shared_ + x_row * kPitch + 4 * row);
#pragma unroll
    for (int k = 1; k < Schedule::kWarpsK; ++k) add(sum, load_shared_floats(shared_ + k * kWarpBytes + x_row * kPitch + 4 * row));
    return sum;
  }
  __device__ __forceinline__ static void add(float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

  // Sums over warps in place of the first warp's, for the CTAs of the cluster.
  __device__ __forceinline__ void add_warps() const {
#if KVGEN_SM90
    if constexpr (Schedule::kWarpsK > 1)
      for (int item = threadIdx.x; item < a_.rows * (kBlock / 4); item += kThreads) {
        const int x_row = item / (kBlock / 4), row = item % (kBlock / 4) * 4;
        const float4 sum = over_warps(x_row, row);
        ptx::store_shared16(shared_ + x_row * kPitch + 4 * row, {sum.x, sum.y, sum.z, sum.w});
      }
    ptx::cluster_arrive(), ptx::cluster_wait();
#endif
  }
  __device__ __forceinline__ float4 over_all(int x_row, int row) const {
    if constexpr (Schedule::kSplit == 1) return over_warps(x_row, row);
    float4 sum = {};
    const int first = block_ % Schedule::kShare * Schedule::kSplit;  // of the CTAs that have the same tiles
#if KVGEN_SM90
#pragma unroll
    for (int cta = 0; cta < Schedule::kSplit; ++cta)
      add(sum, load_cluster_floats(ptx::cluster_address(shared_ + x_row * kPitch + 4 * row, first + cta)));
#endif
    return sum;
  }

  // Four elements as floats.
  __device__ __forceinline__ static float4 elements(const uint8_t* from) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    const float2 low = to_floats<Element>(v.x), high = to_floats<Element>(v.y);
    return {low.x, low.y, high.x, high.y};
  }
  // The product of four rows of W, scaled where a row has one scale, with the bias that begins at row `bias`.
  __device__ __forceinline__ float4 product(int x_row, int row, int bias) const {
    float4 v = over_all(x_row, row);
    if constexpr (!Packed::kGrouped) {
      const float4 scale = elements(a_.packed + Packed::kRowScales + 2 * (block_ * kBlock + row));
      v = {v.x * scale.x, v.y * scale.y, v.z * scale.z, v.w * scale.w};
    }
    if constexpr (Schedule::kBias) add(v, elements(a_.bias + 2 * bias));
    return v;
  }
  __device__ __forceinline__ static float gated(float gate, float up) { return gate / (1.f + __expf(-gate)) * up; }

  // Four outputs of a row of x, from the block's output `at` on. Gate and up rows alternate by tiles.
  __device__ __forceinline__ void finish(int x_row, int at) const {
    const int output = block_ * kOutputs + at;
    if (output >= (kGated ? Schedule::kN / 2 : Schedule::kN)) return;
    float4 v;
    if constexpr (kGated) {
      const int gate = at / 16 * 32 + at % 16;
      const float4 g = product(x_row, gate, output), u = product(x_row, gate + 16, Schedule::kN / 2 + output);
      v = {gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w)};
    } else {
      v = product(x_row, at, output);
    }
    if constexpr (Schedule::kEpilogue == Epilogue::add) add(v, elements(a_.residual + x_row * a_.residual_stride + 2 * output));
    const Element out[4] = {from_float<Element>(v.x), from_float<Element>(v.y), from_float<Element>(v.z), from_float<Element>(v.w)};
    *reinterpret_cast<uint2*>(a_.out + x_row * a_.out_stride + 2 * output) = *reinterpret_cast<const uint2*>(out);
  }
};

}  // namespace kvgen::linear
