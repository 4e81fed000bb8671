// Loads q of one KV head as B fragments in shared memory: [tile of query rows][run of channels][32 lanes] of 16 bytes, two k-steps, or of 8
// bytes, one k-step of a half run. Each row is multiplied by a power of two that brings its largest element to [8, 16), so that q * scale
// keeps its bits; to [0.5, 1) for integer products, whose constants reach 24 times the largest q * scale. Where columns 4..7 of the MMA
// carry the rounding error of q * scale, a second copy holds -q for them and zeros for columns 0..3.
#pragma once
#include <type_traits>

#include "kvgen/format/places.cuh"
#include "kvgen/format/rotate.cuh"
#include "kvgen/host/args.cuh"
#include "kvgen/mainloop/traits.cuh"

namespace kvgen {

// Byte offset of a lane's fragments of a run, within q's.
template <class Traits>
__device__ __forceinline__ int query_offset(int tile, int x, int lane) {
  using Runs = typename Traits::KeyRuns;
  return tile * Traits::kHeadDim * 16 + Runs::channel(x) * 16 + lane * (Runs::is_half(x) ? 8 : 16);
}

// Loads a lane's fragments of a run; of a half run they are in x and y.
template <class Traits>
__device__ __forceinline__ uint4 load_query(uint32_t fragments, int tile, int x, int lane) {
  const uint32_t at = fragments + query_offset<Traits>(tile, x, lane);
  if (!Traits::KeyRuns::is_half(x)) return ptx::load_shared16(at);
  const uint2 v = ptx::load_shared8(at);
  return make_uint4(v.x, v.y, 0, 0);
}

template <class Traits>
struct QueryLoader {
  using Element = typename Traits::Format::Element;
  using Runs = typename Traits::KeyRuns;
  static constexpr int kVectors = Runs::kCount;
  static constexpr int kRounds = ceil_div(Traits::kQTiles, Traits::kWarps);  // tiles of query rows that a warp loads
  uint4 raw[kRounds][kVectors];
  const float* scales = nullptr;  // static ones of K

  // Starts the loads of q. A sequence beyond the batch gives zeros.
  __device__ void fetch(const AttendArgs& args, const Head& head, int warp, int lane) {
    scales = StaticScales::of<typename Traits::Format>(args.scales, args.cache.kv_heads, head.head).key;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int tile = round * Traits::kWarps + warp, at = tile * 8 + (Traits::kQueryTwice ? lane / 4 % 4 : lane / 4),
                head_row = Traits::head_row(head.run, at), query = head_row / Traits::kGroup;
      const bool valid = tile < Traits::kQTiles && head.sequence < args.cache.batch && at < Traits::kQRows && query < args.q_len;
#pragma unroll
      for (int x = 0; x < kVectors; ++x) raw[round][x] = make_uint4(0, 0, 0, 0);
      if (!valid) continue;
      const Element* row = args.q.row<const Element>(head.sequence, query, head.head * Traits::kGroup + head_row % Traits::kGroup);
#pragma unroll
      for (int x = 0; x < kVectors; ++x) raw[round][x] = load_run(Runs::at(row, x, lane % 4), Runs::is_half(x));
    }
  }

  // Rotates and normalizes q, and writes to shared memory: its fragments, per row the factor from products to log2 units, and per K group
  // the sum of q.
  template <class Shared>
  __device__ void publish(const AttendArgs& args, const Shared& shared, int warp, int lane) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
      if (const int tile = round * Traits::kWarps + warp; tile < Traits::kQTiles) {
        if constexpr (kRotated<typename Traits::Key>) rotate_query<Rotation<typename Traits::Key>, Runs, Element>(raw[round], lane);
        publish_tile(args, shared, raw[round], scales, tile, lane);
      }
  }

 private:
  template <class Shared>
  __device__ static void publish_tile(const AttendArgs& args, const Shared& shared, const uint4 (&raw)[kVectors], const float* scales,
                                      int tile, int lane) {
    const float largest = largest_of_row(raw);
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    const int shift = largest > 0.f ? max(-100, min(100, (Traits::kIntegerKeys ? -1 : 3) - exponent)) : 0;
    float group_sums[Traits::kKeyGroups] = {};
    const __half2 negate = __float2half2_rn(lane < 16 ? 0.f : -1.f);
#pragma unroll
    for (int x = 0; x < kVectors; ++x) {
      const bool half = Runs::is_half(x);
      const uint4 v = scaled(raw[x], shift, half, group_sums[Runs::channel(x) * Traits::kKeyGroups / Traits::kHeadDim]);
      uint8_t* place = shared.fragments + query_offset<Traits>(tile, x, lane);
      store_run(place, v, half);
      if constexpr (Traits::kErrorInCopy && !Traits::kScaledOnce)
        store_run(place + Traits::kQueryPlainBytes,
                  make_uint4(multiply(v.x, negate), multiply(v.y, negate), multiply(v.z, negate), multiply(v.w, negate)), half);
    }
    const int at = tile * 8 + lane / 4;
    constexpr float kFactor = 1.4426950408889634f * score_factor<Rotation<typename Traits::Key>>();
    if (lane % 4 == 0) shared.factors[at] = args.scale * kFactor * power_of_two(-shift);
    if constexpr (kStaticAlone<typename Traits::Key>) publish_scaled(shared, raw, scales, shift, tile, lane);
    if constexpr (kTwoLevels<typename Traits::Key>)
      if (lane % 4 == 0) shared.packed_factors()[at] = shared.factors[at] * *scales;
    if constexpr (!Traits::kKeyPerToken) return;
#pragma unroll
    for (int q = 0; q < Traits::kKeyGroups; ++q) {
      float sum = group_sums[q];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) shared.query_sums[q * Traits::kQTiles * 8 + at] = sum;
    }
  }

  // Static scales of K: q times the scales over the largest of them, rounded to fp16, as a second copy; per row the sum of that and its
  // factor, which has the largest. The rounding error is in columns 4..7 of that copy, or a third one.
  template <class Shared>
  __device__ static void publish_scaled(const Shared& shared, const uint4 (&raw)[kVectors], const float* scales, int shift, int tile,
                                        int lane) {
    float largest = 0.f, sum = 0.f;
#pragma unroll
    for (int x = 0; x < kVectors; ++x)
#pragma unroll
      for (int i = 0; i < Runs::lane_channels(x); ++i) largest = fmaxf(largest, scales[Runs::lane_channel(x, lane % 4) + i]);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    const float inverse = 1.f / largest;
#pragma unroll
    for (int x = 0; x < kVectors; ++x) {
      const bool half = Runs::is_half(x);
      float unused;
      const uint4 v = scaled(raw[x], shift, half, unused);
      uint32_t words[4] = {v.x, v.y, v.z, v.w}, errors[4] = {};
      const float* of_lane = scales + Runs::lane_channel(x, lane % 4);
#pragma unroll
      for (int i = 0; i < (half ? 2 : 4); ++i) {
        const float2 f = __half22float2(ptx::as_half2(words[i]));
        const float2 product = make_float2(f.x * (of_lane[2 * i] * inverse), f.y * (of_lane[2 * i + 1] * inverse));
        words[i] = ptx::pack_half2(product.x, product.y);
        const float2 rounded = __half22float2(ptx::as_half2(words[i]));
        errors[i] = ptx::pack_half2(product.x - rounded.x, product.y - rounded.y);
        if constexpr (Traits::kErrorInCopy)
          if (lane >= 16) words[i] = errors[i];
        sum += Traits::kCarryError ? product.x + product.y : rounded.x + rounded.y;
      }
      uint8_t* place = shared.fragments + Traits::kQueryPlainBytes + query_offset<Traits>(tile, x, lane);
      store_run(place, make_uint4(words[0], words[1], words[2], words[3]), half);
      if constexpr (Traits::kCarryError && !Traits::kQueryTwice)
        store_run(place + Traits::kQueryPlainBytes, make_uint4(errors[0], errors[1], errors[2], errors[3]), half);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (const int at = tile * 8 + lane / 4; lane % 4 == 0)
      shared.query_sums[at] = sum, shared.packed_factors()[at] = shared.factors[at] * largest;
  }

  __device__ static float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23); }
  __device__ static uint32_t multiply(uint32_t x, __half2 factor) { return ptx::as_u32(__hmul2(ptx::as_half2(x), factor)); }
  __device__ static float largest_of_row(const uint4 (&raw)[kVectors]) {
    Pair<Element> most = __habs2(as_pair<Element>(raw[0].x));
#pragma unroll
    for (int x = 0; x < kVectors; ++x)
      for (uint32_t word : {raw[x].x, raw[x].y, raw[x].z, raw[x].w}) most = __hmax2(most, __habs2(as_pair<Element>(word)));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
      most = __hmax2(most, as_pair<Element>(__shfl_xor_sync(~0u, reinterpret_cast<uint32_t&>(most), lanes)));
    const float2 f = to_floats<Element>(reinterpret_cast<uint32_t&>(most));
    return fmaxf(f.x, f.y);
  }
  // Multiplies by 2^shift, which may exceed the range of fp16: two exact multiplications replace one. Adds the lane's channels to `sum`.
  __device__ static uint4 scaled(const uint4& v, int shift, bool half, float& sum) {
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
    const int first = min(shift, 15);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& word = words[i];
      if constexpr (std::is_same_v<Element, Bfloat>) {
        const float2 f = to_floats<Element>(word);
        word = ptx::pack_half2(f.x * power_of_two(shift), f.y * power_of_two(shift));
      } else {
        word = multiply(multiply(word, __float2half2_rn(power_of_two(first))), __float2half2_rn(power_of_two(shift - first)));
      }
      if constexpr (Traits::kKeyPerToken) {
        const float2 f = __half22float2(ptx::as_half2(word));
        if (!half || i < 2) sum += f.x + f.y;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Byte offset of a channel of row 0 in a tile of B fragments in shared memory. Of K per channel, only the last run may be a half run.
template <class Traits>
__device__ __forceinline__ int query_offset(int channel) {
  return channel / 32 * 512 + channel % 32 * 2;
}

// The address of the channel at that offset in row `row`. Rows are 64 bytes apart, and `at` is where the row begins in the first run; in
// the half run they are 32 bytes apart.
template <class Traits>
__device__ __forceinline__ uint32_t query_address(uint32_t at, int row, uint32_t offset) {
  if (Traits::KeyRuns::kHalf == 0 || offset < Traits::KeyRuns::kFull * 512) return at + offset;
  return at + offset - row * 32;
}

// q * scale of two elements, rounded to fp16. With kErrorInCopy, lanes 0..15 (columns 0..3) have `negated` = 0 and return the rounded
// product; the other lanes have `negated` = -q and return its rounding error. Without it, with kCarryError, the error goes to *error.
template <class Traits>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t q, uint32_t negated, uint32_t scale, uint32_t* error) {
  const __half2 q2 = ptx::as_half2(q), scale2 = ptx::as_half2(scale);
  if constexpr (Traits::kErrorInCopy) return ptx::as_u32(__hfma2(q2, scale2, __hmul2(ptx::as_half2(negated), scale2)));
  const __half2 product = __hmul2(q2, scale2);
  if constexpr (Traits::kCarryError) *error = ptx::as_u32(__hfma2(q2, scale2, __hneg2(product)));
  return ptx::as_u32(product);
}

// Loads scales and zeros of K for the channels of a lane in one k-step. Of symmetric codes the zeros are the scales.
template <class Traits>
__device__ __forceinline__ void load_key_params(uint32_t params, int step, int lane, uint32_t (&scale)[2], uint32_t (&zero)[2]) {
  const int quad = step * 4 + lane % 4;
  if constexpr (Traits::Key::kZero) {
    const uint4 v = ptx::load_shared16(params + quad * 16);
    zero[0] = v.x, scale[0] = v.y, zero[1] = v.z, scale[1] = v.w;
  } else {
    const uint2 v = ptx::load_shared8(params + quad * 8);
    zero[0] = scale[0] = v.x, zero[1] = scale[1] = v.y;
  }
}

// B fragments of a tile of query rows for every k-step: `high`, and the rounding error `low` where it has its own registers.
template <class Traits>
struct QueryFragments {
  using Runs = typename Traits::KeyRuns;
  static constexpr bool kLow = Traits::kCarryError && !Traits::kQueryTwice;
  uint32_t high[Traits::kSteps][2];
  uint32_t low[kLow ? Traits::kSteps : 1][2];
  uint32_t apart[Traits::kQueryApart ? Traits::kSteps : 1][2];  // for the second MMA tile

  // The operands for one of the MMA tiles of a sub-tile.
  __device__ __forceinline__ const uint32_t (&of(int rows, int step) const)[2] {
    if constexpr (Traits::kQueryApart)
      if (rows) return apart[step];
    return high[step];
  }

  // Loads q as it was published: unscaled, for K with scales per token or without scales, or times static scales.
  __device__ __forceinline__ void load(uint32_t fragments, int tile, int lane) {
    load(fragments, tile, lane, high);
    if constexpr (kLow) load(fragments + Traits::kQueryPlainBytes, tile, lane, low);
    if constexpr (Traits::kQueryApart)
#pragma unroll
      for (int i = 0; i < 2 * Traits::kSteps; ++i) {
        uint32_t &first = high[i / 2][i % 2], &second = apart[i / 2][i % 2];
        second = lane < 16 ? 0 : first;
        if (lane >= 16) first = 0;
      }
  }

  // Loads q times the scales of a K group. Also computes the rows' sums of q * zero (symmetric codes: q * scale).
  __device__ __forceinline__ void load_scaled(uint32_t fragments, uint32_t params, int tile, int lane, float (&affine)[2]) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int x = 0; x < Runs::kCount; ++x) {
      const uint4 q = load_query<Traits>(fragments, tile, x, lane);
      uint4 negated = make_uint4(0, 0, 0, 0);
      if constexpr (Traits::kErrorInCopy) negated = load_query<Traits>(fragments + Traits::kQueryPlainBytes, tile, x, lane);
      const int step = Runs::tile(x);
      scale_step(step, q.x, q.y, negated.x, negated.y, params, lane, even);
      if (!Runs::is_half(x)) scale_step(step + 1, q.z, q.w, negated.z, negated.w, params, lane, odd);
    }
    affine[0] = even[0] + odd[0], affine[1] = even[1] + odd[1];
  }

 private:
  __device__ __forceinline__ static void load(uint32_t fragments, int tile, int lane, uint32_t (&to)[Traits::kSteps][2]) {
#pragma unroll
    for (int x = 0; x < Runs::kCount; ++x) {
      const uint4 q = load_query<Traits>(fragments, tile, x, lane);
      const int step = Runs::tile(x);
      to[step][0] = q.x, to[step][1] = q.y;
      if (!Runs::is_half(x)) to[step + 1][0] = q.z, to[step + 1][1] = q.w;
    }
  }
  __device__ __forceinline__ void scale_step(int step, uint32_t q0, uint32_t q1, uint32_t negated0, uint32_t negated1, uint32_t params,
                                             int lane, float (&affine)[4]) {
    uint32_t scale[2], zero[2];
    load_key_params<Traits>(params, step, lane, scale, zero);
    // A's rows 0..7 are the zeros. Its rows 8..15 are the scales, whose sums nothing uses: one load returns both, and this order of
    // registers needs no moves.
    ptx::mma(affine, zero[0], scale[0], zero[1], scale[1], q0, q1);
    high[step][0] = scaled_pair<Traits>(q0, negated0, scale[0], &low[kLow ? step : 0][0]);
    high[step][1] = scaled_pair<Traits>(q1, negated1, scale[1], &low[kLow ? step : 0][1]);
  }
};

}  // namespace kvgen
