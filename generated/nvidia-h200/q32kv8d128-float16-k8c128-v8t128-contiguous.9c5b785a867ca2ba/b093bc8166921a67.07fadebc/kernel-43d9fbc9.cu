#line 1 "tilelang/module.cu.jinja"
// Decode attention over a quantized KV cache: one variant, lowered by TileLang 0.1.15.
#include "kvgen/host/exports.cuh"
#include "kvgen/tilelang_host.cuh"
#include "kvgen/tilelang_step.cuh"

namespace {

using Key = kvgen::Quant<8, kvgen::Axis::channel, 128, true>;
using Value = kvgen::Quant<8, kvgen::Axis::token, 128, true>;
using Format = kvgen::Format<__half, Key, Value, 128, 128>;
static_assert(Format::kSubtileBytes == 8320 && Format::kHeaderBytes == 512 && Format::kBlockBytes == 33792);

struct Schedule {
  static constexpr int kThreads = 256;
  static constexpr int kCtasPerSm = 1;
  static constexpr int kTileTokens = 128;
  static constexpr int kTileBytes = 33792;
  static constexpr int kRingBytes = 137216;
  static constexpr int kQRows = 4;
  static constexpr int kQTiles = 1;
  static constexpr kvgen::Splits kSplits = kvgen::Splits::automatic;
  static constexpr bool kCluster = false;
  static constexpr int kGroup = 4;
  static constexpr int kMaxQLen = 1;
  static constexpr int kWindow = 0;
  static constexpr bool kPaged = false;
  static constexpr int kWindowPlaces = 0;
  static constexpr bool kOverlap = false;  // launches wait for those before them
};

struct Shape {
  static constexpr int kKvHeads = 8;
  static constexpr int kPage = 0;
  static constexpr bool kSinks = false;
};

template <class... Arguments>
__device__ __forceinline__ void flush_block(Arguments... arguments) {
  kvgen::flush_tail<Format, Schedule::kThreads>(arguments...);
}

}  // namespace

extern "C" __global__ void attend_static_kernel(int* __restrict__ arrivals, uint* __restrict__ k_residual, int* __restrict__ lengths, float* __restrict__ lse, uint* __restrict__ out, int* __restrict__ overflow, const uint* __restrict__ packed, float* __restrict__ partial, const uint* __restrict__ q, int* __restrict__ readers, float* __restrict__ stats, uint* __restrict__ v_residual, int advance, int ctas, int fresh, int64_t fresh_k, int64_t fresh_k_batch, int64_t fresh_k_head, int64_t fresh_k_token, int64_t fresh_v, int64_t fresh_v_batch, int64_t fresh_v_head, int64_t fresh_v_token, int limit, int64_t out_batch, int64_t out_head, int64_t out_token, int64_t packed_head, int64_t packed_outer, int64_t q_batch, int64_t q_head, int q_len, int64_t q_token, int runs, float scale, int splits, int with_lse);
extern "C" __global__ void __launch_bounds__(256, 1) attend_static_kernel(int* __restrict__ arrivals, uint* __restrict__ k_residual, int* __restrict__ lengths, float* __restrict__ lse, uint* __restrict__ out, int* __restrict__ overflow, const uint* __restrict__ packed, float* __restrict__ partial, const uint* __restrict__ q, int* __restrict__ readers, float* __restrict__ stats, uint* __restrict__ v_residual, int advance, int ctas, int fresh, int64_t fresh_k, int64_t fresh_k_batch, int64_t fresh_k_head, int64_t fresh_k_token, int64_t fresh_v, int64_t fresh_v_batch, int64_t fresh_v_head, int64_t fresh_v_token, int limit, int64_t out_batch, int64_t out_head, int64_t out_token, int64_t packed_head, int64_t packed_outer, int64_t q_batch, int64_t q_head, int q_len, int64_t q_token, int runs, float scale, int splits, int with_lse) {
  int place[3];
  int64_t row[2];
  uint raw[16];
  int work[5];
  uint k_rows[32];
  uint v_rows[32];
  int64_t source[1];
  extern __shared__ __align__(1024) uint memory[];
  float v[2];
  float row_sum[2];
  float row_max[2];
  float bias[2];
  float zo[4];
  float o[32];
  int limit_1[2];
  float top[3];
  int flag[1];
  float factor[2];
  uint q_1[16];
  float score_scale[2];
  float row_factor[4];
  uint ones[4];
  float q_sum[4];
  uint middle[4];
  float c[8];
  uint a[8];
  float prob[8];
  uint pb[4];
  int completed[1];
  float key_zero[4];
  uint words[4];
  uint qs[16];
  uint qx[4];
  float x[8];
  uint params[4];
  float state[32];
  float value[32];
  place[0] = (((int)blockIdx.x) >> 3);
  place[1] = (((int)blockIdx.x) & 7);
  place[2] = 0;
  int q_row = (((((int)threadIdx.x) & 15) >> 2) + place[2]);
  int head = ((place[1] * 4) + (q_row & 3));
  row[0] = (((((int64_t)place[0]) * q_batch) + ((((int64_t)q_row) >> (int64_t)2) * q_token)) + (((int64_t)head) * q_head));
  #pragma unroll
  for (int x_1 = 0; x_1 < 4; ++x_1) {
    uint broadcast_var = (uint)0;
    uint4 condval;
    if ((q_row < (q_len * 4))) {
      condval = *(uint4*)(q + (((((int64_t)x_1) * (int64_t)16) + (row[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)));
    } else {
      condval = make_uint4(broadcast_var, broadcast_var, broadcast_var, broadcast_var);
    }
    *(uint4*)(raw + (x_1 * 4)) = condval;
  }
  int length = lengths[place[(int64_t)0]];
  work[0] = (length >> 7);
  work[1] = (length & 127);
  work[2] = (work[1] + fresh);
  work[4] = (((work[0] + splits) - 1) / splits);
  work[3] = (((int)blockIdx.y) * work[4]);
  work[4] = max(0, min(work[4], (work[0] - work[3])));
  if ((limit - fresh) < ((work[0] * 128) + work[1])) {
    if (((int)threadIdx.x) == 0) {
      overflow[0] = 1;
    }
  } else {
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row[0] = (((((int64_t)place[0]) * (int64_t)16384) + (((int64_t)place[1]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 16), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      if (((work[1] + 16) <= (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16))) && (work[1] < work[2])) {
        row[0] = (((fresh_k + (((int64_t)place[0]) * fresh_k_batch)) + ((((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 16), (work[2] - 1))) - ((int64_t)work[1])) * fresh_k_token)) + (((int64_t)place[1]) * fresh_k_head));
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row[1] = (((((int64_t)place[0]) * (int64_t)16384) + (((int64_t)place[1]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 8), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      if (((work[1] + 8) <= (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16))) && (work[1] < work[2])) {
        row[1] = (((fresh_k + (((int64_t)place[0]) * fresh_k_batch)) + ((((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 8), (work[2] - 1))) - ((int64_t)work[1])) * fresh_k_token)) + (((int64_t)place[1]) * fresh_k_head));
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        *(uint4*)(k_rows + (chunk * 8)) = *(uint4*)(k_residual + (((((int64_t)chunk) * (int64_t)16) + (row[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)));
        *(uint4*)(k_rows + ((chunk * 8) + 4)) = *(uint4*)(k_residual + (((((int64_t)chunk) * (int64_t)16) + (row[1] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)));
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row[0] = (((((int64_t)place[0]) * (int64_t)16384) + (((int64_t)place[1]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 16), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      if (((work[1] + 16) <= (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16))) && (work[1] < work[2])) {
        row[0] = (((fresh_v + (((int64_t)place[0]) * fresh_v_batch)) + ((((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 16), (work[2] - 1))) - ((int64_t)work[1])) * fresh_v_token)) + (((int64_t)place[1]) * fresh_v_head));
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row[1] = (((((int64_t)place[0]) * (int64_t)16384) + (((int64_t)place[1]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 8), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      if (((work[1] + 8) <= (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16))) && (work[1] < work[2])) {
        row[1] = (((fresh_v + (((int64_t)place[0]) * fresh_v_batch)) + ((((int64_t)min(((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) - 8), (work[2] - 1))) - ((int64_t)work[1])) * fresh_v_token)) + (((int64_t)place[1]) * fresh_v_head));
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int chunk_1 = 0; chunk_1 < 4; ++chunk_1) {
        *(uint4*)(v_rows + (chunk_1 * 8)) = *(uint4*)(v_residual + (((((int64_t)chunk_1) * (int64_t)16) + (row[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)));
        *(uint4*)(v_rows + ((chunk_1 * 8) + 4)) = *(uint4*)(v_residual + (((((int64_t)chunk_1) * (int64_t)16) + (row[1] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)));
      }
    }
    if ((((int)threadIdx.x) >> 5) < work[4]) {
      source[0] = (((((((int64_t)((int)threadIdx.x)) >> (int64_t)5) * (int64_t)2112) + (((int64_t)work[3]) * (int64_t)2112)) + (((int64_t)place[0]) * packed_outer)) + (((int64_t)place[1]) * packed_head));
    }
    if ((((int)threadIdx.x) >> 5) < work[4]) {
      tl::cp_async_gs<16>((&(memory[((((((int)threadIdx.x) >> 5) * 4288) + ((((int)threadIdx.x) & 31) * 4)) + 4160)])), (&(packed[((source[0] * (int64_t)4) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4))])));
    }
    if ((((int)threadIdx.x) >> 5) < work[4]) {
      #pragma unroll
      for (int i = 0; i < 16; ++i) {
        tl::cp_async_gs<16>((&(memory[((((((int)threadIdx.x) >> 5) * 4288) + (i * 128)) + ((((int)threadIdx.x) & 31) * 4))])), (&(packed[((((((int64_t)i) * (int64_t)128) + (source[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4)) + (int64_t)128)])));
      }
    }
    if ((((int)threadIdx.x) >> 5) < work[4]) {
      kvgen::copy_async16_if<8>((&(memory[((((((int)threadIdx.x) >> 5) * 4288) + ((((int)threadIdx.x) & 31) * 4)) + 2048)])), (&(packed[(((source[0] * (int64_t)4) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4)) + (int64_t)2176)])), (((int)threadIdx.x) & 31));
    }
    tl::cp_async_commit();
    if ((((int)threadIdx.x) >> 5) < work[4]) {
      #pragma unroll
      for (int i_1 = 0; i_1 < 16; ++i_1) {
        tl::cp_async_gs<16>((&(memory[(((((((int)threadIdx.x) >> 5) * 4288) + (i_1 * 128)) + ((((int)threadIdx.x) & 31) * 4)) + 2080)])), (&(packed[((((((int64_t)i_1) * (int64_t)128) + (source[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4)) + (int64_t)2208)])));
      }
    }
    if ((((int)threadIdx.x) >> 5) < work[4]) {
      kvgen::copy_async16_if<8>((&(memory[((((((int)threadIdx.x) >> 5) * 4288) + ((((int)threadIdx.x) & 31) * 4)) + 4128)])), (&(packed[(((source[0] * (int64_t)4) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4)) + (int64_t)4256)])), (((int)threadIdx.x) & 31));
    }
    tl::cp_async_commit();
    v[0] = 0x1p-10f/*9.765625e-04*/;
    #pragma unroll
    for (int i_2 = 0; i_2 < 2; ++i_2) {
      row_sum[i_2] = 0x0p+0f/*0.000000e+00*/;
      row_max[i_2] = -0x1p+100f/*-1.267651e+30*/;
      bias[i_2] = 0x1p+100f/*1.267651e+30*/;
    }
    #pragma unroll
    for (int i_3 = 0; i_3 < 4; ++i_3) {
      zo[i_3] = 0x0p+0f/*0.000000e+00*/;
    }
    #pragma unroll
    for (int i_4 = 0; i_4 < 32; ++i_4) {
      o[i_4] = 0x0p+0f/*0.000000e+00*/;
    }
    int token = (((place[2] >> 1) + (((int)threadIdx.x) & 1)) >> 1);
    limit_1[0] = (((work[0] * 128) + work[2]) - max(0, ((q_len - token) - 1)));
    int token_1 = ((((place[2] + 1) >> 1) + (((int)threadIdx.x) & 1)) >> 1);
    limit_1[1] = (((work[0] * 128) + work[2]) - max(0, ((q_len - token_1) - 1)));
    top[0] = 0x0p+0f/*0.000000e+00*/;
    #pragma unroll
    for (int i_5 = 0; i_5 < 16; ++i_5) {
      top[0] = max(top[0], fabsf(kvgen::half_low(raw[i_5])));
      top[0] = max(top[0], fabsf(kvgen::half_high(raw[i_5])));
    }
    top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 1, 32));
    top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 2, 32));
    float v_ = top[0];
    flag[0] = min(((int)((*(uint *)(&(v_))) >> (uint)23)), 253);
    uint v__1 = ((uint)(254 - flag[0])) << (uint)23;
    factor[0] = (*(float *)(&(v__1)));
    uint v__2 = ((uint)flag[0]) << (uint)23;
    factor[1] = (*(float *)(&(v__2)));
    #pragma unroll
    for (int i_6 = 0; i_6 < 16; ++i_6) {
      q_1[i_6] = kvgen::ptx::pack_half2((kvgen::half_low(raw[i_6]) * factor[0]), (kvgen::half_high(raw[i_6]) * factor[0]));
    }
    float power = __shfl_sync((uint)4294967295, factor[1], ((((int)threadIdx.x) & 3) * 8));
    score_scale[0] = ((scale * power) * 0x1p+24f/*1.677722e+07*/);
    float power_1 = __shfl_sync((uint)4294967295, factor[1], (((((int)threadIdx.x) & 3) * 8) + 4));
    score_scale[1] = ((scale * power_1) * 0x1p+24f/*1.677722e+07*/);
    float condval_1;
    if (((((int)threadIdx.x) & 3) < 2)) {
      condval_1 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_1 = 0x1p+0f/*1.000000e+00*/;
    }
    row_factor[0] = (condval_1 * score_scale[0]);
    float condval_2;
    if (((((int)threadIdx.x) & 3) < 2)) {
      condval_2 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_2 = 0x1p+0f/*1.000000e+00*/;
    }
    row_factor[1] = (condval_2 * score_scale[1]);
    float condval_3;
    if (((((int)threadIdx.x) & 3) < 2)) {
      condval_3 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_3 = 0x1p+0f/*1.000000e+00*/;
    }
    row_factor[2] = (condval_3 * score_scale[0]);
    float condval_4;
    if (((((int)threadIdx.x) & 3) < 2)) {
      condval_4 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_4 = 0x1p+0f/*1.000000e+00*/;
    }
    row_factor[3] = (condval_4 * score_scale[1]);
    ones[0] = (uint)1006648320;
    ones[1] = (uint)0;
    ones[2] = (uint)1006648320;
    ones[3] = (uint)0;
    #pragma unroll
    for (int i_7 = 0; i_7 < 4; ++i_7) {
      q_sum[i_7] = 0x0p+0f/*0.000000e+00*/;
    }
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 0));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 2));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 4));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 6));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 8));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 10));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 12));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 14));
    middle[0] = (uint)1475893240;
    middle[1] = (uint)0;
    middle[2] = (uint)3623409656;
    middle[3] = (uint)0;
    if ((((int)threadIdx.x) >> 5) == 0) {
      #pragma unroll
      for (int i_8 = 0; i_8 < 4; ++i_8) {
        *(uint4*)(memory + (((i_8 * 128) + ((((int)threadIdx.x) & 31) * 4)) + 34304)) = *(uint4*)(q_1 + (i_8 * 4));
      }
    }
    __syncthreads();
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      if (work[1] < work[2]) {
        if ((((work[1] + 16) <= (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16))) && ((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) < (work[2] + 16))) && ((((8 - (((int)threadIdx.x) >> 5)) * splits) - ((int)blockIdx.y)) < 9)) {
          #pragma unroll
          for (int chunk_2 = 0; chunk_2 < 4; ++chunk_2) {
            *(uint4*)(k_residual + ((((((((((int64_t)place[0]) * (int64_t)65536) + (((int64_t)place[1]) * (int64_t)8192)) + (((int64_t)((8 - (((int)threadIdx.x) >> 5)) * splits)) * (int64_t)1024)) + (((((int64_t)((int)threadIdx.x)) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)chunk_2) * (int64_t)16)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)) - (((int64_t)((int)blockIdx.y)) * (int64_t)1024)) - (int64_t)1024)) = *(uint4*)(k_rows + (chunk_2 * 8));
            *(uint4*)(v_residual + ((((((((((int64_t)place[0]) * (int64_t)65536) + (((int64_t)place[1]) * (int64_t)8192)) + (((int64_t)((8 - (((int)threadIdx.x) >> 5)) * splits)) * (int64_t)1024)) + (((((int64_t)((int)threadIdx.x)) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)chunk_2) * (int64_t)16)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)) - (((int64_t)((int)blockIdx.y)) * (int64_t)1024)) - (int64_t)1024)) = *(uint4*)(v_rows + (chunk_2 * 8));
          }
        }
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      if (work[1] < work[2]) {
        if ((((work[1] + 8) <= (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16))) && ((((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) < (work[2] + 8))) && ((((8 - (((int)threadIdx.x) >> 5)) * splits) - ((int)blockIdx.y)) < 9)) {
          #pragma unroll
          for (int chunk_3 = 0; chunk_3 < 4; ++chunk_3) {
            *(uint4*)(k_residual + ((((((((((int64_t)place[0]) * (int64_t)65536) + (((int64_t)place[1]) * (int64_t)8192)) + (((int64_t)((8 - (((int)threadIdx.x) >> 5)) * splits)) * (int64_t)1024)) + (((((int64_t)((int)threadIdx.x)) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)chunk_3) * (int64_t)16)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)) - (((int64_t)((int)blockIdx.y)) * (int64_t)1024)) - (int64_t)512)) = *(uint4*)(k_rows + ((chunk_3 * 8) + 4));
            *(uint4*)(v_residual + ((((((((((int64_t)place[0]) * (int64_t)65536) + (((int64_t)place[1]) * (int64_t)8192)) + (((int64_t)((8 - (((int)threadIdx.x) >> 5)) * splits)) * (int64_t)1024)) + (((((int64_t)((int)threadIdx.x)) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)chunk_3) * (int64_t)16)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)3) * (int64_t)4)) - (((int64_t)((int)blockIdx.y)) * (int64_t)1024)) - (int64_t)512)) = *(uint4*)(v_rows + ((chunk_3 * 8) + 4));
          }
        }
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int i_9 = 0; i_9 < 8; ++i_9) {
        c[i_9] = 0x0p+0f/*0.000000e+00*/;
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int chunk_4 = 0; chunk_4 < 4; ++chunk_4) {
        #pragma unroll
        for (int y = 0; y < 2; ++y) {
          a[0] = k_rows[((chunk_4 * 8) + (y * 2))];
          a[1] = k_rows[(((chunk_4 * 8) + (y * 2)) + 4)];
          a[2] = k_rows[(((chunk_4 * 8) + (y * 2)) + 1)];
          a[3] = k_rows[(((chunk_4 * 8) + (y * 2)) + 5)];
          tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(c + 0), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(raw + ((chunk_4 * 4) + (y * 2))));
        }
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      float condval_5;
      if (((((((work[0] * 128) + (((8 - (((int)threadIdx.x) >> 5)) * splits) * 16)) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) < (limit_1[0] + 16)) && ((((int)threadIdx.x) & 3) < 2))) {
        condval_5 = (c[0] * scale);
      } else {
        condval_5 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[0] = condval_5;
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      float condval_6;
      if (((((((work[0] * 128) + (((8 - (((int)threadIdx.x) >> 5)) * splits) * 16)) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) < (limit_1[0] + 8)) && ((((int)threadIdx.x) & 3) < 2))) {
        condval_6 = (c[2] * scale);
      } else {
        condval_6 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[2] = condval_6;
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      float condval_7;
      if (((((((work[0] * 128) + (((8 - (((int)threadIdx.x) >> 5)) * splits) * 16)) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) < (limit_1[1] + 16)) && ((((int)threadIdx.x) & 3) < 2))) {
        condval_7 = (c[1] * scale);
      } else {
        condval_7 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[1] = condval_7;
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      float condval_8;
      if (((((((work[0] * 128) + (((8 - (((int)threadIdx.x) >> 5)) * splits) * 16)) + ((((int)threadIdx.x) & 31) >> 2)) - (((int)blockIdx.y) * 16)) < (limit_1[1] + 8)) && ((((int)threadIdx.x) & 3) < 2))) {
        condval_8 = (c[3] * scale);
      } else {
        condval_8 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[3] = condval_8;
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = max(prob[0], prob[2]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = max(prob[1], prob[3]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 2, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 4, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 8, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 16, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = max(top[0], (row_max[0] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 2, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 4, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 8, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 16, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = max(top[1], (row_max[1] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[0] = 0x1p-14f/*6.103516e-05*/;
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 2, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 4, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 8, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 16, 32));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      v[0] = max(v[0], (factor[0] * 0x1p+4f/*1.600000e+01*/));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[0] = (top[0] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[0] = kvgen::ptx::exp2((row_max[0] - top[0]));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_max[0] = top[0];
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_sum[0] = (row_sum[0] * factor[0]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      top[1] = (top[1] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      factor[1] = kvgen::ptx::exp2((row_max[1] - top[1]));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_max[1] = top[1];
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_sum[1] = (row_sum[1] * factor[1]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int at = 0; at < 4; ++at) {
        zo[at] = (zo[at] * factor[(at & 1)]);
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int i_10 = 0; i_10 < 32; ++i_10) {
        o[i_10] = (o[i_10] * factor[(i_10 & 1)]);
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      prob[0] = kvgen::ptx::exp2((prob[0] - row_max[0]));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_sum[0] = (row_sum[0] + prob[0]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      prob[2] = kvgen::ptx::exp2((prob[2] - row_max[0]));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_sum[0] = (row_sum[0] + prob[2]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      prob[1] = kvgen::ptx::exp2((prob[1] - row_max[1]));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_sum[1] = (row_sum[1] + prob[1]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      prob[3] = kvgen::ptx::exp2((prob[3] - row_max[1]));
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      row_sum[1] = (row_sum[1] + prob[3]);
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      uint pair = kvgen::ptx::pack_half2(prob[0], prob[1]);
      pb[0] = kvgen::ptx::transpose(pair);
      uint pair_1 = kvgen::ptx::pack_half2(prob[2], prob[3]);
      pb[1] = kvgen::ptx::transpose(pair_1);
      #pragma unroll
      for (int chunk_5 = 0; chunk_5 < 4; ++chunk_5) {
        #pragma unroll
        for (int y_1 = 0; y_1 < 2; ++y_1) {
          a[0] = kvgen::ptx::transpose(v_rows[((chunk_5 * 8) + (y_1 * 2))]);
          a[1] = kvgen::ptx::transpose(v_rows[(((chunk_5 * 8) + (y_1 * 2)) + 1)]);
          a[2] = kvgen::ptx::transpose(v_rows[(((chunk_5 * 8) + (y_1 * 2)) + 4)]);
          a[3] = kvgen::ptx::transpose(v_rows[(((chunk_5 * 8) + (y_1 * 2)) + 5)]);
          tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(o + ((chunk_5 * 8) + (y_1 * 4))), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(pb + 0));
        }
      }
    }
    if (((((8 - (((int)threadIdx.x) >> 5)) * splits) * 16) - (((int)blockIdx.y) * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int i_11 = 0; i_11 < 32; ++i_11) {
        o[i_11] = (o[i_11] * 0x1p-24f/*5.960464e-08*/);
      }
    }
    for (int index = 0; index < max(0, (((work[4] + 7) - (((int)threadIdx.x) >> 5)) >> 3)); ++index) {
      #pragma unroll
      for (int sub = 0; sub < 4; ++sub) {
        tl::cp_async_wait<1>();
        __syncwarp();
        if (sub == 0) {
          #pragma unroll
          for (int i_12 = 0; i_12 < 4; ++i_12) {
            key_zero[i_12] = 0x0p+0f/*0.000000e+00*/;
          }
          #pragma unroll
          for (int x_2 = 0; x_2 < 4; ++x_2) {
            *(uint4*)(qx + 0) = *(uint4*)(memory + (((x_2 * 128) + ((((int)threadIdx.x) & 31) * 4)) + 34304));
            #pragma unroll
            for (int y_2 = 0; y_2 < 2; ++y_2) {
              *(uint4*)(words + 0) = *(uint4*)(memory + ((((((((int)threadIdx.x) >> 5) * 4288) + (x_2 * 32)) + (y_2 * 16)) + ((((int)threadIdx.x) & 3) * 4)) + 4160));
              uint scale_1 = words[1];
              uint plain = qx[(y_2 * 2)];
              qs[((x_2 * 4) + (y_2 * 2))] = kvgen::multiply_half2(plain, scale_1);
              uint rest = kvgen::lost_half2(plain, scale_1, qs[((x_2 * 4) + (y_2 * 2))]);
              uint condval_9;
              if (((((int)threadIdx.x) & 31) < 16)) {
                condval_9 = qs[((x_2 * 4) + (y_2 * 2))];
              } else {
                condval_9 = rest;
              }
              qs[((x_2 * 4) + (y_2 * 2))] = condval_9;
              uint scale_2 = words[3];
              uint plain_1 = qx[((y_2 * 2) + 1)];
              qs[(((x_2 * 4) + (y_2 * 2)) + 1)] = kvgen::multiply_half2(plain_1, scale_2);
              uint rest_1 = kvgen::lost_half2(plain_1, scale_2, qs[(((x_2 * 4) + (y_2 * 2)) + 1)]);
              uint condval_10;
              if (((((int)threadIdx.x) & 31) < 16)) {
                condval_10 = qs[(((x_2 * 4) + (y_2 * 2)) + 1)];
              } else {
                condval_10 = rest_1;
              }
              qs[(((x_2 * 4) + (y_2 * 2)) + 1)] = condval_10;
              tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(key_zero + 0), reinterpret_cast<const unsigned*>(words + 0), reinterpret_cast<const unsigned*>(qx + (y_2 * 2)));
            }
          }
          key_zero[0] = (key_zero[0] * (score_scale[0] * 0x1p-24f/*5.960464e-08*/));
          key_zero[1] = (key_zero[1] * (score_scale[1] * 0x1p-24f/*5.960464e-08*/));
          bias[0] = (key_zero[0] - row_max[0]);
          bias[1] = (key_zero[1] - row_max[1]);
        }
        #pragma unroll
        for (int i_13 = 0; i_13 < 8; ++i_13) {
          c[i_13] = 0x0p+0f/*0.000000e+00*/;
        }
        #pragma unroll
        for (int i_14 = 0; i_14 < 8; ++i_14) {
          x[i_14] = 0x0p+0f/*0.000000e+00*/;
        }
        #pragma unroll
        for (int vector = 0; vector < 8; ++vector) {
          *(uint4*)(words + 0) = *(uint4*)(memory + (((((((int)threadIdx.x) >> 5) * 4288) + ((sub & 1) * 2080)) + (vector * 128)) + ((((int)threadIdx.x) & 31) * 4)));
          #pragma unroll
          for (int i_15 = 0; i_15 < 2; ++i_15) {
            a[0] = (words[(i_15 * 2)] & (uint)16711935);
            a[1] = (words[((i_15 * 2) + 1)] & (uint)16711935);
            a[2] = kvgen::ptx::odd_bytes(words[(i_15 * 2)]);
            a[3] = kvgen::ptx::odd_bytes(words[((i_15 * 2) + 1)]);
            tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(c + ((vector >> 2) * 4)), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(qs + (((vector & 3) * 4) + (i_15 * 2))));
          }
        }
        float condval_11;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_11 = c[0];
        } else {
          condval_11 = c[4];
        }
        v[1] = condval_11;
        float condval_12;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_12 = c[4];
        } else {
          condval_12 = c[0];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_12, 2, 32));
        x[0] = v[1];
        float condval_13;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_13 = c[1];
        } else {
          condval_13 = c[5];
        }
        v[1] = condval_13;
        float condval_14;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_14 = c[5];
        } else {
          condval_14 = c[1];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_14, 2, 32));
        x[1] = v[1];
        float condval_15;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_15 = c[2];
        } else {
          condval_15 = c[6];
        }
        v[1] = condval_15;
        float condval_16;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_16 = c[6];
        } else {
          condval_16 = c[2];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_16, 2, 32));
        x[2] = v[1];
        float condval_17;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_17 = c[3];
        } else {
          condval_17 = c[7];
        }
        v[1] = condval_17;
        float condval_18;
        if (((((int)threadIdx.x) & 3) < 2)) {
          condval_18 = c[7];
        } else {
          condval_18 = c[3];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_18, 2, 32));
        x[3] = v[1];
        *(uint2*)(params + 0) = *(uint2*)(memory + (((((((int)threadIdx.x) >> 5) * 4288) + ((sub & 1) * 2080)) + (((((int)threadIdx.x) & 31) >> 1) * 2)) + 2048));
        top[2] = max(kvgen::half_low(params[0]), kvgen::half_low(params[1]));
        prob[0] = fmaf(x[0], row_factor[0], bias[0]);
        prob[2] = fmaf(x[2], row_factor[2], bias[0]);
        prob[1] = fmaf(x[1], row_factor[1], bias[1]);
        prob[3] = fmaf(x[3], row_factor[3], bias[1]);
        flag[0] = __any_sync((uint)4294967295, ((int)((0x1p+3f/*8.000000e+00*/ < max(max(max(max(prob[0], prob[0]), prob[2]), prob[1]), prob[3])) || (v[0] < top[2]))));
        if (flag[0] != 0) {
          top[0] = -0x1p+100f/*-1.267651e+30*/;
        }
        if (flag[0] != 0) {
          float value_1 = fmaf(x[0], row_factor[0], key_zero[0]);
          top[0] = max(top[0], value_1);
          float value_2 = fmaf(x[2], row_factor[2], key_zero[0]);
          top[0] = max(top[0], value_2);
          top[1] = -0x1p+100f/*-1.267651e+30*/;
          float value_3 = fmaf(x[1], row_factor[1], key_zero[1]);
          top[1] = max(top[1], value_3);
          float value_4 = fmaf(x[3], row_factor[3], key_zero[1]);
          top[1] = max(top[1], value_4);
          float scale_3 = top[2];
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 2, 32));
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 4, 32));
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 8, 32));
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 16, 32));
          top[0] = max(top[0], (row_max[0] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 2, 32));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 4, 32));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 8, 32));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 16, 32));
          top[1] = max(top[1], (row_max[1] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
          factor[0] = max(scale_3, 0x1p-14f/*6.103516e-05*/);
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 2, 32));
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 4, 32));
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 8, 32));
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 16, 32));
          v[0] = max(v[0], (factor[0] * 0x1p+4f/*1.600000e+01*/));
          top[0] = (top[0] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
          factor[0] = kvgen::ptx::exp2((row_max[0] - top[0]));
          row_max[0] = top[0];
          row_sum[0] = (row_sum[0] * factor[0]);
          top[1] = (top[1] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
          factor[1] = kvgen::ptx::exp2((row_max[1] - top[1]));
          row_max[1] = top[1];
          row_sum[1] = (row_sum[1] * factor[1]);
          #pragma unroll
          for (int at_1 = 0; at_1 < 4; ++at_1) {
            zo[at_1] = (zo[at_1] * factor[(at_1 & 1)]);
          }
          #pragma unroll
          for (int i_16 = 0; i_16 < 32; ++i_16) {
            o[i_16] = (o[i_16] * factor[(i_16 & 1)]);
          }
          bias[0] = (key_zero[0] - row_max[0]);
          bias[1] = (key_zero[1] - row_max[1]);
          prob[0] = fmaf(x[0], row_factor[0], bias[0]);
          prob[2] = fmaf(x[2], row_factor[2], bias[0]);
          prob[1] = fmaf(x[1], row_factor[1], bias[1]);
          prob[3] = fmaf(x[3], row_factor[3], bias[1]);
        }
        #pragma unroll
        for (int i_17 = 0; i_17 < 4; ++i_17) {
          prob[i_17] = kvgen::ptx::exp2(prob[i_17]);
        }
        row_sum[0] = (row_sum[0] + prob[0]);
        zo[2] = (zo[2] + (prob[0] * (kvgen::half_high(params[0]) + (kvgen::half_low(params[0]) * 0x1.fep+6f/*1.275000e+02*/))));
        row_sum[0] = (row_sum[0] + prob[2]);
        zo[2] = (zo[2] + (prob[2] * (kvgen::half_high(params[1]) + (kvgen::half_low(params[1]) * 0x1.fep+6f/*1.275000e+02*/))));
        row_sum[1] = (row_sum[1] + prob[1]);
        zo[3] = (zo[3] + (prob[1] * (kvgen::half_high(params[0]) + (kvgen::half_low(params[0]) * 0x1.fep+6f/*1.275000e+02*/))));
        row_sum[1] = (row_sum[1] + prob[3]);
        zo[3] = (zo[3] + (prob[3] * (kvgen::half_high(params[1]) + (kvgen::half_low(params[1]) * 0x1.fep+6f/*1.275000e+02*/))));
        float scale_4 = kvgen::half_low(params[0]);
        uint pair_2 = kvgen::ptx::pack_half2((prob[0] * scale_4), (prob[1] * scale_4));
        pb[0] = kvgen::ptx::transpose(pair_2);
        pb[2] = __shfl_xor_sync((uint)4294967295, pb[0], 16);
        float scale_5 = kvgen::half_low(params[1]);
        uint pair_3 = kvgen::ptx::pack_half2((prob[2] * scale_5), (prob[3] * scale_5));
        pb[1] = kvgen::ptx::transpose(pair_3);
        pb[3] = __shfl_xor_sync((uint)4294967295, pb[1], 16);
        tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(zo + 0), reinterpret_cast<const unsigned*>(middle + 0), reinterpret_cast<const unsigned*>(pb + 0));
        tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(zo + 0), reinterpret_cast<const unsigned*>(middle + 0), reinterpret_cast<const unsigned*>(pb + 2));
        #pragma unroll
        for (int vector_1 = 0; vector_1 < 8; ++vector_1) {
          *(uint4*)(words + 0) = *(uint4*)(memory + ((((((((int)threadIdx.x) >> 5) * 4288) + ((sub & 1) * 2080)) + (vector_1 * 128)) + ((((int)threadIdx.x) & 31) * 4)) + 1024));
          #pragma unroll
          for (int i_18 = 0; i_18 < 2; ++i_18) {
            a[0] = (((~words[(i_18 * 2)]) & (uint)16711935) | (uint)2147516416);
            a[1] = (((~words[((i_18 * 2) + 1)]) & (uint)16711935) | (uint)2147516416);
            a[2] = kvgen::ptx::odd_bytes(words[(i_18 * 2)]);
            a[3] = kvgen::ptx::odd_bytes(words[((i_18 * 2) + 1)]);
            tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(o + (((vector_1 & 3) * 8) + (i_18 * 4))), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(pb + ((vector_1 >> 2) * 2)));
          }
        }
        __syncwarp();
        if ((((((sub + 2) >> 2) * 8) + (index * 8)) + (((int)threadIdx.x) >> 5)) < work[4]) {
          if (((sub + 2) % 4) == 0) {
            source[0] = ((((((((((int64_t)sub) + (int64_t)2) >> (int64_t)2) * (int64_t)16896) + (((int64_t)index) * (int64_t)16896)) + ((((int64_t)((int)threadIdx.x)) >> (int64_t)5) * (int64_t)2112)) + (((int64_t)work[3]) * (int64_t)2112)) + (((int64_t)place[0]) * packed_outer)) + (((int64_t)place[1]) * packed_head));
          }
        }
        if ((((((sub + 2) >> 2) * 8) + (index * 8)) + (((int)threadIdx.x) >> 5)) < work[4]) {
          if (((sub + 2) % 4) == 0) {
            tl::cp_async_gs<16>((&(memory[((((((int)threadIdx.x) >> 5) * 4288) + ((((int)threadIdx.x) & 31) * 4)) + 4160)])), (&(packed[((source[0] * (int64_t)4) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4))])));
          }
        }
        if ((((((sub + 2) >> 2) * 8) + (index * 8)) + (((int)threadIdx.x) >> 5)) < work[4]) {
          #pragma unroll
          for (int i_19 = 0; i_19 < 16; ++i_19) {
            tl::cp_async_gs<16>((&(memory[(((((((int)threadIdx.x) >> 5) * 4288) + ((sub & 1) * 2080)) + (i_19 * 128)) + ((((int)threadIdx.x) & 31) * 4))])), (&(packed[(((((((((int64_t)sub) + (int64_t)2) & (int64_t)3) * (int64_t)2080) + (((int64_t)i_19) * (int64_t)128)) + (source[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4)) + (int64_t)128)])));
          }
        }
        if ((((((sub + 2) >> 2) * 8) + (index * 8)) + (((int)threadIdx.x) >> 5)) < work[4]) {
          kvgen::copy_async16_if<8>((&(memory[(((((((int)threadIdx.x) >> 5) * 4288) + ((sub & 1) * 2080)) + ((((int)threadIdx.x) & 31) * 4)) + 2048)])), (&(packed[((((((((int64_t)sub) + (int64_t)2) & (int64_t)3) * (int64_t)2080) + (source[0] * (int64_t)4)) + ((((int64_t)((int)threadIdx.x)) & (int64_t)31) * (int64_t)4)) + (int64_t)2176)])), (((int)threadIdx.x) & 31));
        }
        tl::cp_async_commit();
      }
    }
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 2, 32));
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 4, 32));
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 8, 32));
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 16, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 2, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 4, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 8, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 16, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 2, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 4, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 8, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 16, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 2, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 4, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 8, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 16, 32));
    tl::cp_async_wait<0>();
    __syncthreads();
    if ((advance != 0) && (((int)threadIdx.x) == 0)) {
      flag[0] = atomicAdd((&(readers[place[(int64_t)0]])), 1);
    }
    if ((((int)threadIdx.x) & 3) < 2) {
      #pragma unroll
      for (int i_20 = 0; i_20 < 4; ++i_20) {
        float v__3 = (o[(i_20 * 8)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_20 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2))] = (*(uint *)(&(v__3)));
        float v__4 = (o[((i_20 * 8) + 2)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_20 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 2)] = (*(uint *)(&(v__4)));
        float v__5 = (o[((i_20 * 8) + 4)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_20 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 4)] = (*(uint *)(&(v__5)));
        float v__6 = (o[((i_20 * 8) + 6)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_20 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 6)] = (*(uint *)(&(v__6)));
      }
      if (((((int)threadIdx.x) & 31) >> 2) == 0) {
        float v__7 = row_max[0];
        memory[((((((int)threadIdx.x) >> 5) * 8) + ((((int)threadIdx.x) & 3) * 4)) + 4128)] = (*(uint *)(&(v__7)));
        float v__8 = row_sum[0];
        memory[((((((int)threadIdx.x) >> 5) * 8) + ((((int)threadIdx.x) & 3) * 4)) + 4129)] = (*(uint *)(&(v__8)));
      }
      #pragma unroll
      for (int i_21 = 0; i_21 < 4; ++i_21) {
        float v__9 = (o[((i_21 * 8) + 1)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_21 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 129)] = (*(uint *)(&(v__9)));
        float v__10 = (o[((i_21 * 8) + 3)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_21 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 131)] = (*(uint *)(&(v__10)));
        float v__11 = (o[((i_21 * 8) + 5)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_21 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 133)] = (*(uint *)(&(v__11)));
        float v__12 = (o[((i_21 * 8) + 7)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[(((((((((int)threadIdx.x) >> 5) * 516) + ((((int)threadIdx.x) & 3) * 258)) + (i_21 * 32)) + (((((int)threadIdx.x) & 31) >> 3) * 8)) + ((((int)threadIdx.x) & 7) >> 2)) + 135)] = (*(uint *)(&(v__12)));
      }
      if (((((int)threadIdx.x) & 31) >> 2) == 0) {
        float v__13 = row_max[1];
        memory[((((((int)threadIdx.x) >> 5) * 8) + ((((int)threadIdx.x) & 3) * 4)) + 4130)] = (*(uint *)(&(v__13)));
        float v__14 = row_sum[1];
        memory[((((((int)threadIdx.x) >> 5) * 8) + ((((int)threadIdx.x) & 3) * 4)) + 4131)] = (*(uint *)(&(v__14)));
      }
    }
    __syncthreads();
    top[0] = -0x1p+100f/*-1.267651e+30*/;
    #pragma unroll
    for (int warp = 0; warp < 8; ++warp) {
      uint v__15 = memory[(((warp * 8) + ((((int)threadIdx.x) >> 6) * 2)) + 4128)];
      top[0] = max(top[0], (*(float *)(&(v__15))));
    }
    top[1] = 0x0p+0f/*0.000000e+00*/;
    factor[0] = 0x0p+0f/*0.000000e+00*/;
    factor[1] = 0x0p+0f/*0.000000e+00*/;
    #pragma unroll
    for (int warp_1 = 0; warp_1 < 8; ++warp_1) {
      uint v__16 = memory[(((warp_1 * 8) + ((((int)threadIdx.x) >> 6) * 2)) + 4128)];
      v[0] = kvgen::ptx::exp2(((*(float *)(&(v__16))) - top[0]));
      uint v__17 = memory[(((warp_1 * 8) + ((((int)threadIdx.x) >> 6) * 2)) + 4129)];
      top[1] = (top[1] + (v[0] * (*(float *)(&(v__17)))));
      uint output = memory[(((warp_1 * 516) + ((((int)threadIdx.x) >> 6) * 129)) + ((((int)threadIdx.x) & 63) * 2))];
      uint _reinterpret_tmp = output;
      factor[0] = (factor[0] + (v[0] * (*(float *)(&(_reinterpret_tmp)))));
      uint output_1 = memory[((((warp_1 * 516) + ((((int)threadIdx.x) >> 6) * 129)) + ((((int)threadIdx.x) & 63) * 2)) + 1)];
      uint _reinterpret_tmp_1 = output_1;
      factor[1] = (factor[1] + (v[0] * (*(float *)(&(_reinterpret_tmp_1)))));
    }
    if (splits == 1) {
      int token_2 = (((((int)threadIdx.x) >> 6) + place[2]) >> 2);
      int head_1 = ((place[1] * 4) + (((((int)threadIdx.x) >> 6) + place[2]) & 3));
      if (token_2 < q_len) {
        float condval_19;
        if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
          condval_19 = 0x0p+0f/*0.000000e+00*/;
        } else {
          condval_19 = (0x1p+0f/*1.000000e+00*/ / top[1]);
        }
        float condval_20;
        if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
          condval_20 = 0x0p+0f/*0.000000e+00*/;
        } else {
          condval_20 = (0x1p+0f/*1.000000e+00*/ / top[1]);
        }
        out[(((((((int64_t)place[0]) * out_batch) * (int64_t)4) + ((((int64_t)token_2) * out_token) * (int64_t)4)) + ((((int64_t)head_1) * out_head) * (int64_t)4)) + (((int64_t)((int)threadIdx.x)) & (int64_t)63))] = kvgen::ptx::pack_half2((factor[0] * condval_19), (factor[1] * condval_20));
        if ((with_lse != 0) && ((((int)threadIdx.x) % 64) == 0)) {
          float condval_21;
          if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
            condval_21 = -CUDART_INF_F;
          } else {
            condval_21 = ((top[0] + log2f(top[1])) * 0x1.62e43p-1f/*6.931472e-01*/);
          }
          lse[((((((int64_t)place[(int64_t)0]) * (int64_t)32) + ((int64_t)head_1)) * ((int64_t)q_len)) + ((int64_t)token_2))] = condval_21;
        }
      }
    } else {
      partial[((((((int64_t)((int)blockIdx.x)) * ((int64_t)splits)) * (int64_t)512) + (((int64_t)((int)blockIdx.y)) * (int64_t)512)) + (((int64_t)((int)threadIdx.x)) * (int64_t)2))] = factor[0];
      partial[(((((((int64_t)((int)blockIdx.x)) * ((int64_t)splits)) * (int64_t)512) + (((int64_t)((int)blockIdx.y)) * (int64_t)512)) + (((int64_t)((int)threadIdx.x)) * (int64_t)2)) + (int64_t)1)] = factor[1];
      if ((((int)threadIdx.x) % 64) == 0) {
        stats[((((((int64_t)((int)blockIdx.x)) * ((int64_t)splits)) * (int64_t)8) + (((int64_t)((int)blockIdx.y)) * (int64_t)8)) + ((((int64_t)((int)threadIdx.x)) >> (int64_t)6) * (int64_t)2))] = top[0];
        stats[(((((((int64_t)((int)blockIdx.x)) * ((int64_t)splits)) * (int64_t)8) + (((int64_t)((int)blockIdx.y)) * (int64_t)8)) + ((((int64_t)((int)threadIdx.x)) >> (int64_t)6) * (int64_t)2)) + (int64_t)1)] = top[1];
      }
    }
    completed[0] = 1;
    if (1 < splits) {
      __syncthreads();
      if (((int)threadIdx.x) == 0) {
        memory[0] = kvgen::ptx::arrive((&(arrivals[((int)blockIdx.x)])));
      }
      __syncthreads();
      completed[0] = ((int)(((int)memory[0]) == (splits - 1)));
      if (completed[0] != 0) {
        if (((int)threadIdx.x) == 0) {
          arrivals[((int)blockIdx.x)] = 0;
        }
      }
      if (completed[0] != 0) {
        top[0] = -0x1p+100f/*-1.267651e+30*/;
        top[1] = 0x0p+0f/*0.000000e+00*/;
        factor[0] = 0x0p+0f/*0.000000e+00*/;
        factor[1] = 0x0p+0f/*0.000000e+00*/;
        for (int index_1 = 0; index_1 < ((splits + 15) >> 4); ++index_1) {
          #pragma unroll
          for (int s = 0; s < 16; ++s) {
            state[(s * 2)] = -0x1p+100f/*-1.267651e+30*/;
            state[((s * 2) + 1)] = 0x0p+0f/*0.000000e+00*/;
            value[(s * 2)] = 0x0p+0f/*0.000000e+00*/;
            value[((s * 2) + 1)] = 0x0p+0f/*0.000000e+00*/;
            if (((index_1 * 16) + s) < splits) {
              int64_t pair_4 = kvgen::load_pair((&(stats[((((((int64_t)index_1) * (int64_t)128) + (((int64_t)(((int)blockIdx.x) * splits)) * (int64_t)8)) + (((int64_t)s) * (int64_t)8)) + ((((int64_t)((int)threadIdx.x)) >> (int64_t)6) * (int64_t)2))])));
              uint v__18 = (uint)pair_4;
              state[(s * 2)] = (*(float *)(&(v__18)));
              uint v__19 = (uint)(pair_4 >> (int64_t)32);
              state[((s * 2) + 1)] = (*(float *)(&(v__19)));
              int64_t pair_5 = kvgen::load_pair((&(partial[((((((int64_t)index_1) * (int64_t)8192) + (((int64_t)(((int)blockIdx.x) * splits)) * (int64_t)512)) + (((int64_t)s) * (int64_t)512)) + (((int64_t)((int)threadIdx.x)) * (int64_t)2))])));
              uint v__20 = (uint)pair_5;
              value[(s * 2)] = (*(float *)(&(v__20)));
              uint v__21 = (uint)(pair_5 >> (int64_t)32);
              value[((s * 2) + 1)] = (*(float *)(&(v__21)));
            }
          }
          v[0] = top[0];
          #pragma unroll
          for (int s_1 = 0; s_1 < 16; ++s_1) {
            top[0] = max(top[0], state[(s_1 * 2)]);
          }
          v[0] = kvgen::ptx::exp2((v[0] - top[0]));
          top[1] = (top[1] * v[0]);
          factor[0] = (factor[0] * v[0]);
          factor[1] = (factor[1] * v[0]);
          #pragma unroll
          for (int s_2 = 0; s_2 < 16; ++s_2) {
            v[0] = kvgen::ptx::exp2((state[(s_2 * 2)] - top[0]));
            top[1] = (top[1] + (v[0] * state[((s_2 * 2) + 1)]));
            factor[0] = (factor[0] + (v[0] * value[(s_2 * 2)]));
            factor[1] = (factor[1] + (v[0] * value[((s_2 * 2) + 1)]));
          }
        }
        int token_3 = (((((int)threadIdx.x) >> 6) + place[2]) >> 2);
        int head_2 = ((place[1] * 4) + (((((int)threadIdx.x) >> 6) + place[2]) & 3));
        if (token_3 < q_len) {
          float condval_22;
          if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
            condval_22 = 0x0p+0f/*0.000000e+00*/;
          } else {
            condval_22 = (0x1p+0f/*1.000000e+00*/ / top[1]);
          }
          float condval_23;
          if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
            condval_23 = 0x0p+0f/*0.000000e+00*/;
          } else {
            condval_23 = (0x1p+0f/*1.000000e+00*/ / top[1]);
          }
          out[(((((((int64_t)place[0]) * out_batch) * (int64_t)4) + ((((int64_t)token_3) * out_token) * (int64_t)4)) + ((((int64_t)head_2) * out_head) * (int64_t)4)) + (((int64_t)((int)threadIdx.x)) & (int64_t)63))] = kvgen::ptx::pack_half2((factor[0] * condval_22), (factor[1] * condval_23));
          if ((with_lse != 0) && ((((int)threadIdx.x) % 64) == 0)) {
            float condval_24;
            if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
              condval_24 = -CUDART_INF_F;
            } else {
              condval_24 = ((top[0] + log2f(top[1])) * 0x1.62e43p-1f/*6.931472e-01*/);
            }
            lse[((((((int64_t)place[(int64_t)0]) * (int64_t)32) + ((int64_t)head_2)) * ((int64_t)q_len)) + ((int64_t)token_3))] = condval_24;
          }
        }
      }
    }
    if (((0 < fresh) && (128 <= work[2])) && (completed[0] != 0)) {
      if (completed[0] != 0) {
        __syncthreads();
      }
    }
    if (((0 < fresh) && (128 <= work[2])) && (completed[0] != 0)) {
      if (completed[0] != 0) {
        source[0] = (((((int64_t)work[0]) * (int64_t)2112) + (((int64_t)place[0]) * packed_outer)) + (((int64_t)place[1]) * packed_head));
      }
    }
    if (((0 < fresh) && (128 <= work[2])) && (completed[0] != 0)) {
      if (completed[0] != 0) {
        flush_block((&(k_residual[((((int64_t)place[0]) * (int64_t)65536) + (((int64_t)place[1]) * (int64_t)8192))])), (&(v_residual[((((int64_t)place[0]) * (int64_t)65536) + (((int64_t)place[1]) * (int64_t)8192))])), (&(packed[(source[0] * (int64_t)4)])), ((((fresh_k + (((int64_t)place[0]) * fresh_k_batch)) + (((int64_t)place[1]) * fresh_k_head)) - (((int64_t)place[1]) * (int64_t)2048)) - (((int64_t)place[0]) * (int64_t)16384)), fresh_k_token, ((((fresh_v + (((int64_t)place[0]) * fresh_v_batch)) + (((int64_t)place[1]) * fresh_v_head)) - (((int64_t)place[1]) * (int64_t)2048)) - (((int64_t)place[0]) * (int64_t)16384)), fresh_v_token, work[1], work[2], (&(memory[0])));
      }
    }
    if ((advance != 0) && (((int)threadIdx.x) == 0)) {
      if (flag[0] == (((runs * splits) * 8) - 1)) {
        readers[place[(int64_t)0]] = 0;
      }
      if (flag[0] == (((runs * splits) * 8) - 1)) {
        lengths[place[(int64_t)0]] = (lengths[place[(int64_t)0]] + fresh);
      }
    }
  }
}

extern "C" __global__ void attend_planned_kernel(int* __restrict__ arrivals, uint* __restrict__ k_residual, float* __restrict__ lse, uint* __restrict__ out, const uint* __restrict__ packed, float* __restrict__ partial, const int* __restrict__ plan, const uint* __restrict__ q, float* __restrict__ stats, uint* __restrict__ v_residual, int ctas, int empty_at, int fresh, int64_t fresh_k, int64_t fresh_k_batch, int64_t fresh_k_head, int64_t fresh_k_token, int64_t fresh_v, int64_t fresh_v_batch, int64_t fresh_v_head, int64_t fresh_v_token, int64_t out_batch, int64_t out_head, int64_t out_token, int64_t packed_head, int64_t packed_outer, int64_t q_batch, int64_t q_head, int q_len, int64_t q_token, float scale, int splits, int tiles_at, int with_lse);
extern "C" __global__ void __launch_bounds__(256, 1) attend_planned_kernel(int* __restrict__ arrivals, uint* __restrict__ k_residual, float* __restrict__ lse, uint* __restrict__ out, const uint* __restrict__ packed, float* __restrict__ partial, const int* __restrict__ plan, const uint* __restrict__ q, float* __restrict__ stats, uint* __restrict__ v_residual, int ctas, int empty_at, int fresh, int64_t fresh_k, int64_t fresh_k_batch, int64_t fresh_k_head, int64_t fresh_k_token, int64_t fresh_v, int64_t fresh_v_batch, int64_t fresh_v_head, int64_t fresh_v_token, int64_t out_batch, int64_t out_head, int64_t out_token, int64_t packed_head, int64_t packed_outer, int64_t q_batch, int64_t q_head, int q_len, int64_t q_token, float scale, int splits, int tiles_at, int with_lse) {
  float top[3];
  float factor[2];
  int bounds[2];
  int tile[8];
  int place[5];
  int64_t row[2];
  uint raw[16];
  uint k_rows[32];
  uint v_rows[32];
  int work[4];
  int64_t source[1];
  extern __shared__ __align__(1024) uint memory[];
  float v[2];
  float row_sum[2];
  float row_max[2];
  float bias[2];
  float zo[4];
  float o[32];
  int limit[2];
  int flag[1];
  uint q_1[16];
  float score_scale[2];
  float row_factor[4];
  uint ones[4];
  float q_sum[4];
  uint middle[4];
  float c[8];
  uint a[8];
  float prob[8];
  uint pb[4];
  float key_zero[4];
  uint words[4];
  uint qs[16];
  uint qx[4];
  float x[8];
  uint params[4];
  int place_1[5];
  int work_1[4];
  int completed[1];
  float state[32];
  float value[32];
  top[1] = 0x0p+0f/*0.000000e+00*/;
  factor[0] = 0x0p+0f/*0.000000e+00*/;
  factor[1] = 0x0p+0f/*0.000000e+00*/;
  for (int i = 0; i < ((((plan[0] + ctas) - ((int)blockIdx.x)) - 1) / ctas); ++i) {
    for (int head = 0; head < 8; ++head) {
      for (int index = 0; index < q_len; ++index) {
        float condval;
        if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
          condval = 0x0p+0f/*0.000000e+00*/;
        } else {
          condval = (0x1p+0f/*1.000000e+00*/ / top[1]);
        }
        float inverse = condval;
        out[(((((((int64_t)plan[((((int64_t)empty_at) + ((int64_t)((int)blockIdx.x))) + (((int64_t)i) * ((int64_t)ctas)))]) * out_batch) * (int64_t)4) + ((((int64_t)index) * out_token) * (int64_t)4)) + ((((((int64_t)head) * (int64_t)4) + (((int64_t)((int)threadIdx.x)) >> (int64_t)6)) * out_head) * (int64_t)4)) + (((int64_t)((int)threadIdx.x)) & (int64_t)63))] = kvgen::ptx::pack_half2((factor[0] * inverse), (factor[1] * inverse));
        if ((with_lse != 0) && ((((int)threadIdx.x) % 64) == 0)) {
          float condval_1;
          if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
            condval_1 = -CUDART_INF_F;
          } else {
            condval_1 = ((top[0] + log2f(top[1])) * 0x1.62e43p-1f/*6.931472e-01*/);
          }
          lse[(((((((int64_t)plan[((((int64_t)empty_at) + ((int64_t)((int)blockIdx.x))) + (((int64_t)i) * ((int64_t)ctas)))]) * (int64_t)32) + (((int64_t)head) * (int64_t)4)) + (((int64_t)((int)threadIdx.x)) >> (int64_t)6)) * ((int64_t)q_len)) + ((int64_t)index))] = condval_1;
        }
      }
    }
  }
  *(int2*)(bounds + 0) = *(int2*)(plan + ((((int64_t)((int)blockIdx.x)) * (int64_t)2) + (int64_t)8));
  for (int index_1 = bounds[0]; index_1 < bounds[1]; ++index_1) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      *(int4*)(tile + (half * 4)) = *(int4*)(plan + (((((int64_t)tiles_at) * (int64_t)8) + (((int64_t)index_1) * (int64_t)8)) + (((int64_t)half) * (int64_t)4)));
    }
    place[0] = tile[1];
    place[1] = 0;
    place[2] = ((tile[0] * 8) + tile[1]);
    place[3] = (tile[6] - tile[4]);
    place[4] = kvgen::ptx::pinned(((int)threadIdx.x));
    int q_row = (((place[4] & 15) >> 2) + place[1]);
    int head_1 = ((place[0] * 4) + (q_row & 3));
    row[0] = (((((int64_t)tile[0]) * q_batch) + ((((int64_t)q_row) >> (int64_t)2) * q_token)) + (((int64_t)head_1) * q_head));
    #pragma unroll
    for (int x_1 = 0; x_1 < 4; ++x_1) {
      uint broadcast_var = (uint)0;
      uint4 condval_2;
      if ((q_row < (q_len * 4))) {
        condval_2 = *(uint4*)(q + (((((int64_t)x_1) * (int64_t)16) + (row[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)));
      } else {
        condval_2 = make_uint4(broadcast_var, broadcast_var, broadcast_var, broadcast_var);
      }
      *(uint4*)(raw + (x_1 * 4)) = condval_2;
    }
    #pragma unroll
    for (int i_1 = 0; i_1 < 32; ++i_1) {
      k_rows[i_1] = (uint)0;
      v_rows[i_1] = (uint)0;
    }
    work[0] = (tile[7] >> 7);
    work[1] = (tile[7] & 127);
    work[2] = (work[1] + fresh);
    work[3] = (tile[3] - tile[2]);
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      row[0] = (((((int64_t)tile[0]) * (int64_t)16384) + (((int64_t)place[0]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 16), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      if (((work[1] + 16) <= (((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16))) && (work[1] < work[2])) {
        row[0] = (((fresh_k + (((int64_t)tile[0]) * fresh_k_batch)) + ((((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 16), (work[2] - 1))) - ((int64_t)work[1])) * fresh_k_token)) + (((int64_t)place[0]) * fresh_k_head));
      }
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      row[1] = (((((int64_t)tile[0]) * (int64_t)16384) + (((int64_t)place[0]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 8), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      if (((work[1] + 8) <= (((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16))) && (work[1] < work[2])) {
        row[1] = (((fresh_k + (((int64_t)tile[0]) * fresh_k_batch)) + ((((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 8), (work[2] - 1))) - ((int64_t)work[1])) * fresh_k_token)) + (((int64_t)place[0]) * fresh_k_head));
      }
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        *(uint4*)(k_rows + (chunk * 8)) = *(uint4*)(k_residual + (((((int64_t)chunk) * (int64_t)16) + (row[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)));
        *(uint4*)(k_rows + ((chunk * 8) + 4)) = *(uint4*)(k_residual + (((((int64_t)chunk) * (int64_t)16) + (row[1] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)));
      }
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      row[0] = (((((int64_t)tile[0]) * (int64_t)16384) + (((int64_t)place[0]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 16), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      if (((work[1] + 16) <= (((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16))) && (work[1] < work[2])) {
        row[0] = (((fresh_v + (((int64_t)tile[0]) * fresh_v_batch)) + ((((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 16), (work[2] - 1))) - ((int64_t)work[1])) * fresh_v_token)) + (((int64_t)place[0]) * fresh_v_head));
      }
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      row[1] = (((((int64_t)tile[0]) * (int64_t)16384) + (((int64_t)place[0]) * (int64_t)2048)) + (((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 8), (work[2] - 1))) * (int64_t)16));
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      if (((work[1] + 8) <= (((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16))) && (work[1] < work[2])) {
        row[1] = (((fresh_v + (((int64_t)tile[0]) * fresh_v_batch)) + ((((int64_t)min(((((((8 - (place[4] >> 5)) * tile[5]) * 16) + ((place[4] & 31) >> 2)) - (tile[4] * 16)) - 8), (work[2] - 1))) - ((int64_t)work[1])) * fresh_v_token)) + (((int64_t)place[0]) * fresh_v_head));
      }
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int chunk_1 = 0; chunk_1 < 4; ++chunk_1) {
        *(uint4*)(v_rows + (chunk_1 * 8)) = *(uint4*)(v_residual + (((((int64_t)chunk_1) * (int64_t)16) + (row[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)));
        *(uint4*)(v_rows + ((chunk_1 * 8) + 4)) = *(uint4*)(v_residual + (((((int64_t)chunk_1) * (int64_t)16) + (row[1] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)));
      }
    }
    int tile_1 = (place[4] >> 5);
    int place_2 = ((place[4] >> 5) * 4288);
    if (tile_1 < work[3]) {
      source[0] = ((((((int64_t)tile[2]) * (int64_t)2112) + (((int64_t)tile_1) * (int64_t)2112)) + (((int64_t)tile[0]) * packed_outer)) + (((int64_t)place[0]) * packed_head));
    }
    if (tile_1 < work[3]) {
      tl::cp_async_gs<16>((&(memory[((((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4) + ((int64_t)place_2)) + (int64_t)4160)])), (&(packed[((source[0] * (int64_t)4) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4))])));
    }
    if (tile_1 < work[3]) {
      #pragma unroll
      for (int i_2 = 0; i_2 < 16; ++i_2) {
        tl::cp_async_gs<16>((&(memory[(((((int64_t)i_2) * (int64_t)128) + ((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4)) + ((int64_t)place_2))])), (&(packed[((((((int64_t)i_2) * (int64_t)128) + (source[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4)) + (int64_t)128)])));
      }
    }
    if (tile_1 < work[3]) {
      kvgen::copy_async16_if<8>((&(memory[((((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4) + ((int64_t)place_2)) + (int64_t)2048)])), (&(packed[(((source[0] * (int64_t)4) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4)) + (int64_t)2176)])), (place[4] & 31));
    }
    tl::cp_async_commit();
    int tile_2 = (place[4] >> 5);
    int base = ((place[4] >> 5) * 4288);
    if (tile_2 < work[3]) {
      #pragma unroll
      for (int i_3 = 0; i_3 < 16; ++i_3) {
        tl::cp_async_gs<16>((&(memory[((((((int64_t)i_3) * (int64_t)128) + ((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4)) + ((int64_t)base)) + (int64_t)2080)])), (&(packed[((((((int64_t)i_3) * (int64_t)128) + (source[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4)) + (int64_t)2208)])));
      }
    }
    if (tile_2 < work[3]) {
      kvgen::copy_async16_if<8>((&(memory[((((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4) + ((int64_t)base)) + (int64_t)4128)])), (&(packed[(((source[0] * (int64_t)4) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4)) + (int64_t)4256)])), (place[4] & 31));
    }
    tl::cp_async_commit();
    v[0] = 0x1p-10f/*9.765625e-04*/;
    #pragma unroll
    for (int i_4 = 0; i_4 < 2; ++i_4) {
      row_sum[i_4] = 0x0p+0f/*0.000000e+00*/;
      row_max[i_4] = -0x1p+100f/*-1.267651e+30*/;
      bias[i_4] = 0x1p+100f/*1.267651e+30*/;
    }
    #pragma unroll
    for (int i_5 = 0; i_5 < 4; ++i_5) {
      zo[i_5] = 0x0p+0f/*0.000000e+00*/;
    }
    #pragma unroll
    for (int i_6 = 0; i_6 < 32; ++i_6) {
      o[i_6] = 0x0p+0f/*0.000000e+00*/;
    }
    int token = (((place[1] >> 1) + (place[4] & 1)) >> 1);
    limit[0] = (((work[0] * 128) + work[2]) - max(0, ((q_len - token) - 1)));
    int token_1 = ((((place[1] + 1) >> 1) + (place[4] & 1)) >> 1);
    limit[1] = (((work[0] * 128) + work[2]) - max(0, ((q_len - token_1) - 1)));
    top[0] = 0x0p+0f/*0.000000e+00*/;
    #pragma unroll
    for (int i_7 = 0; i_7 < 16; ++i_7) {
      top[0] = max(top[0], fabsf(kvgen::half_low(raw[i_7])));
      top[0] = max(top[0], fabsf(kvgen::half_high(raw[i_7])));
    }
    top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 1, 32));
    top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 2, 32));
    float v_ = top[0];
    flag[0] = min(((int)((*(uint *)(&(v_))) >> (uint)23)), 253);
    uint v__1 = ((uint)(254 - flag[0])) << (uint)23;
    factor[0] = (*(float *)(&(v__1)));
    uint v__2 = ((uint)flag[0]) << (uint)23;
    factor[1] = (*(float *)(&(v__2)));
    #pragma unroll
    for (int i_8 = 0; i_8 < 16; ++i_8) {
      q_1[i_8] = kvgen::ptx::pack_half2((kvgen::half_low(raw[i_8]) * factor[0]), (kvgen::half_high(raw[i_8]) * factor[0]));
    }
    float power = __shfl_sync((uint)4294967295, factor[1], ((place[4] & 3) * 8));
    score_scale[0] = ((scale * power) * 0x1p+24f/*1.677722e+07*/);
    float power_1 = __shfl_sync((uint)4294967295, factor[1], (((place[4] & 3) * 8) + 4));
    score_scale[1] = ((scale * power_1) * 0x1p+24f/*1.677722e+07*/);
    float condval_3;
    if (((place[4] & 3) < 2)) {
      condval_3 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_3 = 0x1p+0f/*1.000000e+00*/;
    }
    float own = condval_3;
    row_factor[0] = (own * score_scale[0]);
    float condval_4;
    if (((place[4] & 3) < 2)) {
      condval_4 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_4 = 0x1p+0f/*1.000000e+00*/;
    }
    float own_1 = condval_4;
    row_factor[1] = (own_1 * score_scale[1]);
    float condval_5;
    if (((place[4] & 3) < 2)) {
      condval_5 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_5 = 0x1p+0f/*1.000000e+00*/;
    }
    float own_2 = condval_5;
    row_factor[2] = (own_2 * score_scale[0]);
    float condval_6;
    if (((place[4] & 3) < 2)) {
      condval_6 = 0x1p+0f/*1.000000e+00*/;
    } else {
      condval_6 = 0x1p+0f/*1.000000e+00*/;
    }
    float own_3 = condval_6;
    row_factor[3] = (own_3 * score_scale[1]);
    ones[0] = (uint)1006648320;
    ones[1] = (uint)0;
    ones[2] = (uint)1006648320;
    ones[3] = (uint)0;
    #pragma unroll
    for (int i_9 = 0; i_9 < 4; ++i_9) {
      q_sum[i_9] = 0x0p+0f/*0.000000e+00*/;
    }
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 0));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 2));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 4));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 6));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 8));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 10));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 12));
    tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(q_sum + 0), reinterpret_cast<const unsigned*>(ones + 0), reinterpret_cast<const unsigned*>(q_1 + 14));
    middle[0] = (uint)1475893240;
    middle[1] = (uint)0;
    middle[2] = (uint)3623409656;
    middle[3] = (uint)0;
    if ((place[4] >> 5) == 0) {
      #pragma unroll
      for (int i_10 = 0; i_10 < 4; ++i_10) {
        *(uint4*)(memory + (((i_10 * 128) + ((place[4] & 31) * 4)) + 34304)) = *(uint4*)(q_1 + (i_10 * 4));
      }
    }
    __syncthreads();
    int first = (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) - 16);
    if (first < work[2]) {
      if (work[1] < work[2]) {
        if (((work[1] <= (((place[4] & 31) >> 2) + first)) && ((((place[4] & 31) >> 2) + first) < work[2])) && ((((place[4] & 31) >> 2) + first) < 128)) {
          #pragma unroll
          for (int chunk_2 = 0; chunk_2 < 4; ++chunk_2) {
            *(uint4*)(k_residual + ((((((((int64_t)tile[0]) * (int64_t)65536) + (((int64_t)place[0]) * (int64_t)8192)) + (((((int64_t)place[4]) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)first) * (int64_t)64)) + (((int64_t)chunk_2) * (int64_t)16)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4))) = *(uint4*)(k_rows + (chunk_2 * 8));
            *(uint4*)(v_residual + ((((((((int64_t)tile[0]) * (int64_t)65536) + (((int64_t)place[0]) * (int64_t)8192)) + (((((int64_t)place[4]) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)first) * (int64_t)64)) + (((int64_t)chunk_2) * (int64_t)16)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4))) = *(uint4*)(v_rows + (chunk_2 * 8));
          }
        }
      }
    }
    if (first < work[2]) {
      if (work[1] < work[2]) {
        if (((work[1] <= ((((place[4] & 31) >> 2) + first) + 8)) && (((((place[4] & 31) >> 2) + first) + 8) < work[2])) && ((((place[4] & 31) >> 2) + first) < 120)) {
          #pragma unroll
          for (int chunk_3 = 0; chunk_3 < 4; ++chunk_3) {
            *(uint4*)(k_residual + (((((((((int64_t)tile[0]) * (int64_t)65536) + (((int64_t)place[0]) * (int64_t)8192)) + (((((int64_t)place[4]) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)first) * (int64_t)64)) + (((int64_t)chunk_3) * (int64_t)16)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)) + (int64_t)512)) = *(uint4*)(k_rows + ((chunk_3 * 8) + 4));
            *(uint4*)(v_residual + (((((((((int64_t)tile[0]) * (int64_t)65536) + (((int64_t)place[0]) * (int64_t)8192)) + (((((int64_t)place[4]) & (int64_t)31) >> (int64_t)2) * (int64_t)64)) + (((int64_t)first) * (int64_t)64)) + (((int64_t)chunk_3) * (int64_t)16)) + ((((int64_t)place[4]) & (int64_t)3) * (int64_t)4)) + (int64_t)512)) = *(uint4*)(v_rows + ((chunk_3 * 8) + 4));
          }
        }
      }
    }
    if (first < work[2]) {
      #pragma unroll
      for (int i_11 = 0; i_11 < 8; ++i_11) {
        c[i_11] = 0x0p+0f/*0.000000e+00*/;
      }
    }
    if (first < work[2]) {
      #pragma unroll
      for (int chunk_4 = 0; chunk_4 < 4; ++chunk_4) {
        #pragma unroll
        for (int y = 0; y < 2; ++y) {
          a[0] = k_rows[((chunk_4 * 8) + (y * 2))];
          a[1] = k_rows[(((chunk_4 * 8) + (y * 2)) + 4)];
          a[2] = k_rows[(((chunk_4 * 8) + (y * 2)) + 1)];
          a[3] = k_rows[(((chunk_4 * 8) + (y * 2)) + 5)];
          tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(c + 0), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(raw + ((chunk_4 * 4) + (y * 2))));
        }
      }
    }
    if (first < work[2]) {
      float condval_7;
      if ((((((work[0] * 128) + ((place[4] & 31) >> 2)) + first) < limit[0]) && ((place[4] & 3) < 2))) {
        condval_7 = (c[0] * scale);
      } else {
        condval_7 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[0] = condval_7;
    }
    if (first < work[2]) {
      float condval_8;
      if (((((((work[0] * 128) + ((place[4] & 31) >> 2)) + first) + 8) < limit[0]) && ((place[4] & 3) < 2))) {
        condval_8 = (c[2] * scale);
      } else {
        condval_8 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[2] = condval_8;
    }
    if (first < work[2]) {
      float condval_9;
      if ((((((work[0] * 128) + ((place[4] & 31) >> 2)) + first) < limit[1]) && ((place[4] & 3) < 2))) {
        condval_9 = (c[1] * scale);
      } else {
        condval_9 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[1] = condval_9;
    }
    if (first < work[2]) {
      float condval_10;
      if (((((((work[0] * 128) + ((place[4] & 31) >> 2)) + first) + 8) < limit[1]) && ((place[4] & 3) < 2))) {
        condval_10 = (c[3] * scale);
      } else {
        condval_10 = -0x1p+101f/*-2.535301e+30*/;
      }
      prob[3] = condval_10;
    }
    if (first < work[2]) {
      top[0] = max(prob[0], prob[2]);
    }
    if (first < work[2]) {
      top[1] = max(prob[1], prob[3]);
    }
    if (first < work[2]) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 2, 32));
    }
    if (first < work[2]) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 4, 32));
    }
    if (first < work[2]) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 8, 32));
    }
    if (first < work[2]) {
      top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 16, 32));
    }
    if (first < work[2]) {
      top[0] = max(top[0], (row_max[0] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
    }
    if (first < work[2]) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 2, 32));
    }
    if (first < work[2]) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 4, 32));
    }
    if (first < work[2]) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 8, 32));
    }
    if (first < work[2]) {
      top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 16, 32));
    }
    if (first < work[2]) {
      top[1] = max(top[1], (row_max[1] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
    }
    if (first < work[2]) {
      factor[0] = 0x1p-14f/*6.103516e-05*/;
    }
    if (first < work[2]) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 2, 32));
    }
    if (first < work[2]) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 4, 32));
    }
    if (first < work[2]) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 8, 32));
    }
    if (first < work[2]) {
      factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 16, 32));
    }
    if (first < work[2]) {
      v[0] = max(v[0], (factor[0] * 0x1p+4f/*1.600000e+01*/));
    }
    if (first < work[2]) {
      top[0] = (top[0] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
    }
    if (first < work[2]) {
      factor[0] = kvgen::ptx::exp2((row_max[0] - top[0]));
    }
    if (first < work[2]) {
      row_max[0] = top[0];
    }
    if (first < work[2]) {
      row_sum[0] = (row_sum[0] * factor[0]);
    }
    if (first < work[2]) {
      top[1] = (top[1] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
    }
    if (first < work[2]) {
      factor[1] = kvgen::ptx::exp2((row_max[1] - top[1]));
    }
    if (first < work[2]) {
      row_max[1] = top[1];
    }
    if (first < work[2]) {
      row_sum[1] = (row_sum[1] * factor[1]);
    }
    if (first < work[2]) {
      #pragma unroll
      for (int at = 0; at < 4; ++at) {
        zo[at] = (zo[at] * factor[(at & 1)]);
      }
    }
    if (first < work[2]) {
      #pragma unroll
      for (int i_12 = 0; i_12 < 32; ++i_12) {
        o[i_12] = (o[i_12] * factor[(i_12 & 1)]);
      }
    }
    if (first < work[2]) {
      prob[0] = kvgen::ptx::exp2((prob[0] - row_max[0]));
    }
    if (first < work[2]) {
      row_sum[0] = (row_sum[0] + prob[0]);
    }
    if (first < work[2]) {
      prob[2] = kvgen::ptx::exp2((prob[2] - row_max[0]));
    }
    if (first < work[2]) {
      row_sum[0] = (row_sum[0] + prob[2]);
    }
    if (first < work[2]) {
      prob[1] = kvgen::ptx::exp2((prob[1] - row_max[1]));
    }
    if (first < work[2]) {
      row_sum[1] = (row_sum[1] + prob[1]);
    }
    if (first < work[2]) {
      prob[3] = kvgen::ptx::exp2((prob[3] - row_max[1]));
    }
    if (first < work[2]) {
      row_sum[1] = (row_sum[1] + prob[3]);
    }
    if (first < work[2]) {
      uint pair = kvgen::ptx::pack_half2(prob[0], prob[1]);
      pb[0] = kvgen::ptx::transpose(pair);
      uint pair_1 = kvgen::ptx::pack_half2(prob[2], prob[3]);
      pb[1] = kvgen::ptx::transpose(pair_1);
      #pragma unroll
      for (int chunk_5 = 0; chunk_5 < 4; ++chunk_5) {
        #pragma unroll
        for (int y_1 = 0; y_1 < 2; ++y_1) {
          a[0] = kvgen::ptx::transpose(v_rows[((chunk_5 * 8) + (y_1 * 2))]);
          a[1] = kvgen::ptx::transpose(v_rows[(((chunk_5 * 8) + (y_1 * 2)) + 1)]);
          a[2] = kvgen::ptx::transpose(v_rows[(((chunk_5 * 8) + (y_1 * 2)) + 4)]);
          a[3] = kvgen::ptx::transpose(v_rows[(((chunk_5 * 8) + (y_1 * 2)) + 5)]);
          tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(o + ((chunk_5 * 8) + (y_1 * 4))), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(pb + 0));
        }
      }
    }
    if (((((8 - (place[4] >> 5)) * tile[5]) * 16) - (tile[4] * 16)) < (work[2] + 16)) {
      #pragma unroll
      for (int i_13 = 0; i_13 < 32; ++i_13) {
        o[i_13] = (o[i_13] * 0x1p-24f/*5.960464e-08*/);
      }
    }
    for (int index_2 = 0; index_2 < max(0, (((work[3] + 7) - (place[4] >> 5)) >> 3)); ++index_2) {
      #pragma unroll
      for (int sub = 0; sub < 4; ++sub) {
        int subtile = (((place[4] >> 5) * 4288) + ((sub & 1) * 2080));
        tl::cp_async_wait<1>();
        __syncwarp();
        if (sub == 0) {
          #pragma unroll
          for (int i_14 = 0; i_14 < 4; ++i_14) {
            key_zero[i_14] = 0x0p+0f/*0.000000e+00*/;
          }
          #pragma unroll
          for (int x_2 = 0; x_2 < 4; ++x_2) {
            *(uint4*)(qx + 0) = *(uint4*)(memory + (((x_2 * 128) + ((place[4] & 31) * 4)) + 34304));
            #pragma unroll
            for (int y_2 = 0; y_2 < 2; ++y_2) {
              *(uint4*)(words + 0) = *(uint4*)(memory + ((((((((int64_t)place[(int64_t)4]) >> (int64_t)5) * (int64_t)4288) + (((int64_t)x_2) * (int64_t)32)) + (((int64_t)y_2) * (int64_t)16)) + ((((int64_t)place[(int64_t)4]) & (int64_t)3) * (int64_t)4)) + (int64_t)4160));
              uint scale_1 = words[1];
              uint plain = qx[(y_2 * 2)];
              qs[((x_2 * 4) + (y_2 * 2))] = kvgen::multiply_half2(plain, scale_1);
              uint rest = kvgen::lost_half2(plain, scale_1, qs[((x_2 * 4) + (y_2 * 2))]);
              uint condval_11;
              if (((place[4] & 31) < 16)) {
                condval_11 = qs[((x_2 * 4) + (y_2 * 2))];
              } else {
                condval_11 = rest;
              }
              qs[((x_2 * 4) + (y_2 * 2))] = condval_11;
              uint scale_2 = words[3];
              uint plain_1 = qx[((y_2 * 2) + 1)];
              qs[(((x_2 * 4) + (y_2 * 2)) + 1)] = kvgen::multiply_half2(plain_1, scale_2);
              uint rest_1 = kvgen::lost_half2(plain_1, scale_2, qs[(((x_2 * 4) + (y_2 * 2)) + 1)]);
              uint condval_12;
              if (((place[4] & 31) < 16)) {
                condval_12 = qs[(((x_2 * 4) + (y_2 * 2)) + 1)];
              } else {
                condval_12 = rest_1;
              }
              qs[(((x_2 * 4) + (y_2 * 2)) + 1)] = condval_12;
              tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(key_zero + 0), reinterpret_cast<const unsigned*>(words + 0), reinterpret_cast<const unsigned*>(qx + (y_2 * 2)));
            }
          }
          key_zero[0] = (key_zero[0] * (score_scale[0] * 0x1p-24f/*5.960464e-08*/));
          key_zero[1] = (key_zero[1] * (score_scale[1] * 0x1p-24f/*5.960464e-08*/));
          bias[0] = (key_zero[0] - row_max[0]);
          bias[1] = (key_zero[1] - row_max[1]);
        }
        #pragma unroll
        for (int i_15 = 0; i_15 < 8; ++i_15) {
          c[i_15] = 0x0p+0f/*0.000000e+00*/;
        }
        #pragma unroll
        for (int i_16 = 0; i_16 < 8; ++i_16) {
          x[i_16] = 0x0p+0f/*0.000000e+00*/;
        }
        #pragma unroll
        for (int vector = 0; vector < 8; ++vector) {
          for (int i_17 = 0; i_17 < 4; ++i_17) {
            words[i_17] = memory[((((((int64_t)vector) * (int64_t)128) + ((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4)) + ((int64_t)subtile)) + ((int64_t)i_17))];
          }
          #pragma unroll
          for (int i_18 = 0; i_18 < 2; ++i_18) {
            a[0] = (words[(i_18 * 2)] & (uint)16711935);
            a[1] = (words[((i_18 * 2) + 1)] & (uint)16711935);
            a[2] = kvgen::ptx::odd_bytes(words[(i_18 * 2)]);
            a[3] = kvgen::ptx::odd_bytes(words[((i_18 * 2) + 1)]);
            tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(c + ((vector >> 2) * 4)), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(qs + (((vector & 3) * 4) + (i_18 * 2))));
          }
        }
        float condval_13;
        if (((place[4] & 3) < 2)) {
          condval_13 = c[0];
        } else {
          condval_13 = c[4];
        }
        v[1] = condval_13;
        float condval_14;
        if (((place[4] & 3) < 2)) {
          condval_14 = c[4];
        } else {
          condval_14 = c[0];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_14, 2, 32));
        x[0] = v[1];
        float condval_15;
        if (((place[4] & 3) < 2)) {
          condval_15 = c[1];
        } else {
          condval_15 = c[5];
        }
        v[1] = condval_15;
        float condval_16;
        if (((place[4] & 3) < 2)) {
          condval_16 = c[5];
        } else {
          condval_16 = c[1];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_16, 2, 32));
        x[1] = v[1];
        float condval_17;
        if (((place[4] & 3) < 2)) {
          condval_17 = c[2];
        } else {
          condval_17 = c[6];
        }
        v[1] = condval_17;
        float condval_18;
        if (((place[4] & 3) < 2)) {
          condval_18 = c[6];
        } else {
          condval_18 = c[2];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_18, 2, 32));
        x[2] = v[1];
        float condval_19;
        if (((place[4] & 3) < 2)) {
          condval_19 = c[3];
        } else {
          condval_19 = c[7];
        }
        v[1] = condval_19;
        float condval_20;
        if (((place[4] & 3) < 2)) {
          condval_20 = c[7];
        } else {
          condval_20 = c[3];
        }
        v[1] = (v[1] + __shfl_xor_sync((uint)4294967295, condval_20, 2, 32));
        x[3] = v[1];
        int own_4 = (((place[4] & 3) >> 1) * 2);
        for (int i_19 = 0; i_19 < 2; ++i_19) {
          params[i_19] = memory[(((((((((int64_t)place[(int64_t)4]) & (int64_t)31) >> (int64_t)2) * (int64_t)4) + ((int64_t)subtile)) + ((int64_t)own_4)) + ((int64_t)i_19)) + (int64_t)2048)];
        }
        top[2] = max(kvgen::half_low(params[0]), kvgen::half_low(params[1]));
        prob[0] = fmaf(x[0], row_factor[0], bias[0]);
        prob[2] = fmaf(x[2], row_factor[2], bias[0]);
        prob[1] = fmaf(x[1], row_factor[1], bias[1]);
        prob[3] = fmaf(x[3], row_factor[3], bias[1]);
        flag[0] = __any_sync((uint)4294967295, ((int)((0x1p+3f/*8.000000e+00*/ < max(max(max(max(prob[0], prob[0]), prob[2]), prob[1]), prob[3])) || (v[0] < top[2]))));
        if (flag[0] != 0) {
          top[0] = -0x1p+100f/*-1.267651e+30*/;
        }
        if (flag[0] != 0) {
          float value_1 = fmaf(x[0], row_factor[0], key_zero[0]);
          top[0] = max(top[0], value_1);
          float value_2 = fmaf(x[2], row_factor[2], key_zero[0]);
          top[0] = max(top[0], value_2);
          top[1] = -0x1p+100f/*-1.267651e+30*/;
          float value_3 = fmaf(x[1], row_factor[1], key_zero[1]);
          top[1] = max(top[1], value_3);
          float value_4 = fmaf(x[3], row_factor[3], key_zero[1]);
          top[1] = max(top[1], value_4);
          float scale_3 = top[2];
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 2, 32));
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 4, 32));
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 8, 32));
          top[0] = max(top[0], __shfl_xor_sync((uint)4294967295, top[0], 16, 32));
          top[0] = max(top[0], (row_max[0] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 2, 32));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 4, 32));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 8, 32));
          top[1] = max(top[1], __shfl_xor_sync((uint)4294967295, top[1], 16, 32));
          top[1] = max(top[1], (row_max[1] - __log2f((v[0] * 0x1p-4f/*6.250000e-02*/))));
          factor[0] = max(scale_3, 0x1p-14f/*6.103516e-05*/);
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 2, 32));
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 4, 32));
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 8, 32));
          factor[0] = max(factor[0], __shfl_xor_sync((uint)4294967295, factor[0], 16, 32));
          v[0] = max(v[0], (factor[0] * 0x1p+4f/*1.600000e+01*/));
          top[0] = (top[0] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
          factor[0] = kvgen::ptx::exp2((row_max[0] - top[0]));
          row_max[0] = top[0];
          row_sum[0] = (row_sum[0] * factor[0]);
          top[1] = (top[1] + __log2f((v[0] * 0x1p-4f/*6.250000e-02*/)));
          factor[1] = kvgen::ptx::exp2((row_max[1] - top[1]));
          row_max[1] = top[1];
          row_sum[1] = (row_sum[1] * factor[1]);
          #pragma unroll
          for (int at_1 = 0; at_1 < 4; ++at_1) {
            zo[at_1] = (zo[at_1] * factor[(at_1 & 1)]);
          }
          #pragma unroll
          for (int i_20 = 0; i_20 < 32; ++i_20) {
            o[i_20] = (o[i_20] * factor[(i_20 & 1)]);
          }
          bias[0] = (key_zero[0] - row_max[0]);
          bias[1] = (key_zero[1] - row_max[1]);
          prob[0] = fmaf(x[0], row_factor[0], bias[0]);
          prob[2] = fmaf(x[2], row_factor[2], bias[0]);
          prob[1] = fmaf(x[1], row_factor[1], bias[1]);
          prob[3] = fmaf(x[3], row_factor[3], bias[1]);
        }
        #pragma unroll
        for (int i_21 = 0; i_21 < 4; ++i_21) {
          prob[i_21] = kvgen::ptx::exp2(prob[i_21]);
        }
        row_sum[0] = (row_sum[0] + prob[0]);
        zo[2] = (zo[2] + (prob[0] * (kvgen::half_high(params[0]) + (kvgen::half_low(params[0]) * 0x1.fep+6f/*1.275000e+02*/))));
        row_sum[0] = (row_sum[0] + prob[2]);
        zo[2] = (zo[2] + (prob[2] * (kvgen::half_high(params[1]) + (kvgen::half_low(params[1]) * 0x1.fep+6f/*1.275000e+02*/))));
        row_sum[1] = (row_sum[1] + prob[1]);
        zo[3] = (zo[3] + (prob[1] * (kvgen::half_high(params[0]) + (kvgen::half_low(params[0]) * 0x1.fep+6f/*1.275000e+02*/))));
        row_sum[1] = (row_sum[1] + prob[3]);
        zo[3] = (zo[3] + (prob[3] * (kvgen::half_high(params[1]) + (kvgen::half_low(params[1]) * 0x1.fep+6f/*1.275000e+02*/))));
        float scale_4 = kvgen::half_low(params[0]);
        uint pair_2 = kvgen::ptx::pack_half2((prob[0] * scale_4), (prob[1] * scale_4));
        pb[0] = kvgen::ptx::transpose(pair_2);
        pb[2] = __shfl_xor_sync((uint)4294967295, pb[0], 16);
        float scale_5 = kvgen::half_low(params[1]);
        uint pair_3 = kvgen::ptx::pack_half2((prob[2] * scale_5), (prob[3] * scale_5));
        pb[1] = kvgen::ptx::transpose(pair_3);
        pb[3] = __shfl_xor_sync((uint)4294967295, pb[1], 16);
        tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(zo + 0), reinterpret_cast<const unsigned*>(middle + 0), reinterpret_cast<const unsigned*>(pb + 0));
        tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(zo + 0), reinterpret_cast<const unsigned*>(middle + 0), reinterpret_cast<const unsigned*>(pb + 2));
        #pragma unroll
        for (int vector_1 = 0; vector_1 < 8; ++vector_1) {
          for (int i_22 = 0; i_22 < 4; ++i_22) {
            words[i_22] = memory[(((((((int64_t)vector_1) * (int64_t)128) + ((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4)) + ((int64_t)subtile)) + ((int64_t)i_22)) + (int64_t)1024)];
          }
          #pragma unroll
          for (int i_23 = 0; i_23 < 2; ++i_23) {
            a[0] = (((~words[(i_23 * 2)]) & (uint)16711935) | (uint)2147516416);
            a[1] = (((~words[((i_23 * 2) + 1)]) & (uint)16711935) | (uint)2147516416);
            a[2] = kvgen::ptx::odd_bytes(words[(i_23 * 2)]);
            a[3] = kvgen::ptx::odd_bytes(words[((i_23 * 2) + 1)]);
            tl::mma_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 16, false, true>(reinterpret_cast<float*>(o + (((vector_1 & 3) * 8) + (i_23 * 4))), reinterpret_cast<const unsigned*>(a + 0), reinterpret_cast<const unsigned*>(pb + ((vector_1 >> 2) * 2)));
          }
        }
        __syncwarp();
        int tile_3 = (((((sub + 2) >> 2) * 8) + (index_2 * 8)) + (place[4] >> 5));
        int base_1 = ((place[4] >> 5) * 4288);
        if (tile_3 < work[3]) {
          if (((sub + 2) % 4) == 0) {
            source[0] = ((((((int64_t)tile[2]) * (int64_t)2112) + (((int64_t)tile_3) * (int64_t)2112)) + (((int64_t)tile[0]) * packed_outer)) + (((int64_t)place[0]) * packed_head));
          }
        }
        if (tile_3 < work[3]) {
          if (((sub + 2) % 4) == 0) {
            tl::cp_async_gs<16>((&(memory[((((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4) + ((int64_t)base_1)) + (int64_t)4160)])), (&(packed[((source[0] * (int64_t)4) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4))])));
          }
        }
        if (tile_3 < work[3]) {
          #pragma unroll
          for (int i_24 = 0; i_24 < 16; ++i_24) {
            tl::cp_async_gs<16>((&(memory[(((((((int64_t)sub) & (int64_t)1) * (int64_t)2080) + (((int64_t)i_24) * (int64_t)128)) + ((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4)) + ((int64_t)base_1))])), (&(packed[(((((((((int64_t)sub) + (int64_t)2) & (int64_t)3) * (int64_t)2080) + (((int64_t)i_24) * (int64_t)128)) + (source[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4)) + (int64_t)128)])));
          }
        }
        if (tile_3 < work[3]) {
          kvgen::copy_async16_if<8>((&(memory[(((((((int64_t)sub) & (int64_t)1) * (int64_t)2080) + ((((int64_t)place[(int64_t)4]) & (int64_t)31) * (int64_t)4)) + ((int64_t)base_1)) + (int64_t)2048)])), (&(packed[((((((((int64_t)sub) + (int64_t)2) & (int64_t)3) * (int64_t)2080) + (source[0] * (int64_t)4)) + ((((int64_t)place[4]) & (int64_t)31) * (int64_t)4)) + (int64_t)2176)])), (place[4] & 31));
        }
        tl::cp_async_commit();
      }
    }
    int index_3 = kvgen::ptx::pinned(index_1);
    #pragma unroll
    for (int half_1 = 0; half_1 < 2; ++half_1) {
      *(int4*)(tile + (half_1 * 4)) = *(int4*)(plan + (((((int64_t)tiles_at) * (int64_t)8) + (((int64_t)index_3) * (int64_t)8)) + (((int64_t)half_1) * (int64_t)4)));
    }
    place_1[0] = tile[1];
    place_1[1] = 0;
    place_1[2] = ((tile[0] * 8) + tile[1]);
    place_1[3] = (tile[6] - tile[4]);
    place_1[4] = kvgen::ptx::pinned(((int)threadIdx.x));
    work_1[0] = (tile[7] >> 7);
    work_1[1] = (tile[7] & 127);
    work_1[2] = (work_1[1] + fresh);
    work_1[3] = (tile[3] - tile[2]);
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 2, 32));
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 4, 32));
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 8, 32));
    row_sum[0] = (row_sum[0] + __shfl_xor_sync((uint)4294967295, row_sum[0], 16, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 2, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 4, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 8, 32));
    zo[2] = (zo[2] + __shfl_xor_sync((uint)4294967295, zo[2], 16, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 2, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 4, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 8, 32));
    row_sum[1] = (row_sum[1] + __shfl_xor_sync((uint)4294967295, row_sum[1], 16, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 2, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 4, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 8, 32));
    zo[3] = (zo[3] + __shfl_xor_sync((uint)4294967295, zo[3], 16, 32));
    tl::cp_async_wait<0>();
    __syncthreads();
    int q_row_1 = ((place_1[4] & 3) * 2);
    if (q_row_1 < 4) {
      #pragma unroll
      for (int i_25 = 0; i_25 < 4; ++i_25) {
        int channel = (((i_25 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2));
        float v__3 = (o[(i_25 * 8)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_1) * (int64_t)129)) + ((int64_t)channel))] = (*(uint *)(&(v__3)));
        int channel_1 = ((((i_25 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2)) + 2);
        float v__4 = (o[((i_25 * 8) + 2)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_1) * (int64_t)129)) + ((int64_t)channel_1))] = (*(uint *)(&(v__4)));
        int channel_2 = ((((i_25 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2)) + 4);
        float v__5 = (o[((i_25 * 8) + 4)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_1) * (int64_t)129)) + ((int64_t)channel_2))] = (*(uint *)(&(v__5)));
        int channel_3 = ((((i_25 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2)) + 6);
        float v__6 = (o[((i_25 * 8) + 6)] * 0x1p+24f/*1.677722e+07*/) + (zo[2] + zo[0]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_1) * (int64_t)129)) + ((int64_t)channel_3))] = (*(uint *)(&(v__6)));
      }
      if (((place_1[4] & 31) >> 2) == 0) {
        float v__7 = row_max[0];
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)8) + (((int64_t)q_row_1) * (int64_t)2)) + (int64_t)4128)] = (*(uint *)(&(v__7)));
      }
      if (((place_1[4] & 31) >> 2) == 0) {
        float v__8 = row_sum[0];
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)8) + (((int64_t)q_row_1) * (int64_t)2)) + (int64_t)4129)] = (*(uint *)(&(v__8)));
      }
    }
    int q_row_2 = (((place_1[4] & 3) * 2) + 1);
    if (q_row_2 < 4) {
      #pragma unroll
      for (int i_26 = 0; i_26 < 4; ++i_26) {
        int channel_4 = (((i_26 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2));
        float v__9 = (o[((i_26 * 8) + 1)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_2) * (int64_t)129)) + ((int64_t)channel_4))] = (*(uint *)(&(v__9)));
        int channel_5 = ((((i_26 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2)) + 2);
        float v__10 = (o[((i_26 * 8) + 3)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_2) * (int64_t)129)) + ((int64_t)channel_5))] = (*(uint *)(&(v__10)));
        int channel_6 = ((((i_26 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2)) + 4);
        float v__11 = (o[((i_26 * 8) + 5)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_2) * (int64_t)129)) + ((int64_t)channel_6))] = (*(uint *)(&(v__11)));
        int channel_7 = ((((i_26 * 32) + (((place_1[4] & 31) >> 3) * 8)) + ((place_1[4] & 7) >> 2)) + 6);
        float v__12 = (o[((i_26 * 8) + 7)] * 0x1p+24f/*1.677722e+07*/) + (zo[3] + zo[1]);
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)516) + (((int64_t)q_row_2) * (int64_t)129)) + ((int64_t)channel_7))] = (*(uint *)(&(v__12)));
      }
      if (((place_1[4] & 31) >> 2) == 0) {
        float v__13 = row_max[1];
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)8) + (((int64_t)q_row_2) * (int64_t)2)) + (int64_t)4128)] = (*(uint *)(&(v__13)));
      }
      if (((place_1[4] & 31) >> 2) == 0) {
        float v__14 = row_sum[1];
        memory[((((((int64_t)place_1[(int64_t)4]) >> (int64_t)5) * (int64_t)8) + (((int64_t)q_row_2) * (int64_t)2)) + (int64_t)4129)] = (*(uint *)(&(v__14)));
      }
    }
    __syncthreads();
    int item = place_1[4];
    if (item < 256) {
      top[0] = -0x1p+100f/*-1.267651e+30*/;
      #pragma unroll
      for (int warp = 0; warp < 8; ++warp) {
        uint v__15 = memory[(((warp * 8) + ((item >> 6) * 2)) + 4128)];
        top[0] = max(top[0], (*(float *)(&(v__15))));
      }
      top[1] = 0x0p+0f/*0.000000e+00*/;
      factor[0] = 0x0p+0f/*0.000000e+00*/;
      factor[1] = 0x0p+0f/*0.000000e+00*/;
      #pragma unroll
      for (int warp_1 = 0; warp_1 < 8; ++warp_1) {
        uint v__16 = memory[(((warp_1 * 8) + ((item >> 6) * 2)) + 4128)];
        v[0] = kvgen::ptx::exp2(((*(float *)(&(v__16))) - top[0]));
        uint v__17 = memory[(((warp_1 * 8) + ((item >> 6) * 2)) + 4129)];
        top[1] = (top[1] + (v[0] * (*(float *)(&(v__17)))));
        uint output = memory[(((((int64_t)warp_1) * (int64_t)516) + ((((int64_t)item) >> (int64_t)6) * (int64_t)129)) + ((((int64_t)item) & (int64_t)63) * (int64_t)2))];
        uint _reinterpret_tmp = output;
        factor[0] = (factor[0] + (v[0] * (*(float *)(&(_reinterpret_tmp)))));
        uint output_1 = memory[((((((int64_t)warp_1) * (int64_t)516) + ((((int64_t)item) >> (int64_t)6) * (int64_t)129)) + ((((int64_t)item) & (int64_t)63) * (int64_t)2)) + (int64_t)1)];
        uint _reinterpret_tmp_1 = output_1;
        factor[1] = (factor[1] + (v[0] * (*(float *)(&(_reinterpret_tmp_1)))));
      }
      if (tile[5] == 1) {
        int token_2 = (((item >> 6) + place_1[1]) >> 2);
        int head_2 = ((place_1[0] * 4) + (((item >> 6) + place_1[1]) & 3));
        if (token_2 < q_len) {
          float condval_21;
          if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
            condval_21 = 0x0p+0f/*0.000000e+00*/;
          } else {
            condval_21 = (0x1p+0f/*1.000000e+00*/ / top[1]);
          }
          float condval_22;
          if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
            condval_22 = 0x0p+0f/*0.000000e+00*/;
          } else {
            condval_22 = (0x1p+0f/*1.000000e+00*/ / top[1]);
          }
          out[(((((((int64_t)tile[0]) * out_batch) * (int64_t)4) + ((((int64_t)token_2) * out_token) * (int64_t)4)) + ((((int64_t)head_2) * out_head) * (int64_t)4)) + (((int64_t)item) & (int64_t)63))] = kvgen::ptx::pack_half2((factor[0] * condval_21), (factor[1] * condval_22));
          if ((with_lse != 0) && ((item % 64) == 0)) {
            float condval_23;
            if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
              condval_23 = -CUDART_INF_F;
            } else {
              condval_23 = ((top[0] + log2f(top[1])) * 0x1.62e43p-1f/*6.931472e-01*/);
            }
            lse[((((((int64_t)tile[(int64_t)0]) * (int64_t)32) + ((int64_t)head_2)) * ((int64_t)q_len)) + ((int64_t)token_2))] = condval_23;
          }
        }
      } else {
        int row_1 = (((place_1[3] * 4) + (tile[4] * 4)) + (item >> 6));
        partial[((((int64_t)row_1) * (int64_t)128) + ((((int64_t)item) & (int64_t)63) * (int64_t)2))] = factor[0];
        partial[(((((int64_t)row_1) * (int64_t)128) + ((((int64_t)item) & (int64_t)63) * (int64_t)2)) + (int64_t)1)] = factor[1];
        if ((item % 64) == 0) {
          stats[(((int64_t)row_1) * (int64_t)2)] = top[0];
          stats[((((int64_t)row_1) * (int64_t)2) + (int64_t)1)] = top[1];
        }
      }
    }
    completed[0] = 1;
    if (1 < tile[5]) {
      __syncthreads();
    }
    if (1 < tile[5]) {
      if (place_1[4] == 0) {
        memory[0] = kvgen::ptx::arrive((&(arrivals[place_1[(int64_t)2]])));
      }
    }
    if (1 < tile[5]) {
      __syncthreads();
    }
    if (1 < tile[5]) {
      completed[0] = ((int)(((int)memory[0]) == (tile[5] - 1)));
    }
    if (1 < tile[5]) {
      if (completed[0] != 0) {
        if (place_1[4] == 0) {
          arrivals[place_1[(int64_t)2]] = 0;
        }
      }
    }
    if (1 < tile[5]) {
      if (completed[0] != 0) {
        int item_1 = place_1[4];
        if (item_1 < 256) {
          top[0] = -0x1p+100f/*-1.267651e+30*/;
          top[1] = 0x0p+0f/*0.000000e+00*/;
          factor[0] = 0x0p+0f/*0.000000e+00*/;
          factor[1] = 0x0p+0f/*0.000000e+00*/;
          for (int index_4 = 0; index_4 < ((tile[5] + 15) >> 4); ++index_4) {
            #pragma unroll
            for (int s = 0; s < 16; ++s) {
              state[(s * 2)] = -0x1p+100f/*-1.267651e+30*/;
              state[((s * 2) + 1)] = 0x0p+0f/*0.000000e+00*/;
              value[(s * 2)] = 0x0p+0f/*0.000000e+00*/;
              value[((s * 2) + 1)] = 0x0p+0f/*0.000000e+00*/;
              if (((index_4 * 16) + s) < tile[5]) {
                int64_t pair_4 = kvgen::load_pair((&(stats[((((((int64_t)index_4) * (int64_t)128) + (((int64_t)place_1[3]) * (int64_t)8)) + (((int64_t)s) * (int64_t)8)) + ((((int64_t)item_1) >> (int64_t)6) * (int64_t)2))])));
                uint v__18 = (uint)pair_4;
                state[(s * 2)] = (*(float *)(&(v__18)));
                uint v__19 = (uint)(pair_4 >> (int64_t)32);
                state[((s * 2) + 1)] = (*(float *)(&(v__19)));
                int64_t pair_5 = kvgen::load_pair((&(partial[((((((int64_t)index_4) * (int64_t)8192) + (((int64_t)place_1[3]) * (int64_t)512)) + (((int64_t)s) * (int64_t)512)) + (((int64_t)item_1) * (int64_t)2))])));
                uint v__20 = (uint)pair_5;
                value[(s * 2)] = (*(float *)(&(v__20)));
                uint v__21 = (uint)(pair_5 >> (int64_t)32);
                value[((s * 2) + 1)] = (*(float *)(&(v__21)));
              }
            }
            v[0] = top[0];
            #pragma unroll
            for (int s_1 = 0; s_1 < 16; ++s_1) {
              top[0] = max(top[0], state[(s_1 * 2)]);
            }
            v[0] = kvgen::ptx::exp2((v[0] - top[0]));
            top[1] = (top[1] * v[0]);
            factor[0] = (factor[0] * v[0]);
            factor[1] = (factor[1] * v[0]);
            #pragma unroll
            for (int s_2 = 0; s_2 < 16; ++s_2) {
              v[0] = kvgen::ptx::exp2((state[(s_2 * 2)] - top[0]));
              top[1] = (top[1] + (v[0] * state[((s_2 * 2) + 1)]));
              factor[0] = (factor[0] + (v[0] * value[(s_2 * 2)]));
              factor[1] = (factor[1] + (v[0] * value[((s_2 * 2) + 1)]));
            }
          }
          if ((((item_1 >> 6) + place_1[1]) >> 2) < q_len) {
            float condval_24;
            if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
              condval_24 = 0x0p+0f/*0.000000e+00*/;
            } else {
              condval_24 = (0x1p+0f/*1.000000e+00*/ / top[1]);
            }
            float condval_25;
            if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
              condval_25 = 0x0p+0f/*0.000000e+00*/;
            } else {
              condval_25 = (0x1p+0f/*1.000000e+00*/ / top[1]);
            }
            out[(((((((int64_t)tile[0]) * out_batch) * (int64_t)4) + (((((((int64_t)item_1) >> (int64_t)6) + ((int64_t)place_1[1])) >> (int64_t)2) * out_token) * (int64_t)4)) + ((((((int64_t)place_1[0]) * (int64_t)4) + (((((int64_t)item_1) >> (int64_t)6) + ((int64_t)place_1[1])) & (int64_t)3)) * out_head) * (int64_t)4)) + (((int64_t)item_1) & (int64_t)63))] = kvgen::ptx::pack_half2((factor[0] * condval_24), (factor[1] * condval_25));
          }
          if ((((item_1 >> 6) + place_1[1]) >> 2) < q_len) {
            if ((with_lse != 0) && ((item_1 % 64) == 0)) {
              float condval_26;
              if ((top[1] == 0x0p+0f/*0.000000e+00*/)) {
                condval_26 = -CUDART_INF_F;
              } else {
                condval_26 = ((top[0] + log2f(top[1])) * 0x1.62e43p-1f/*6.931472e-01*/);
              }
              lse[((((((int64_t)item_1) >> (int64_t)6) + ((int64_t)place_1[(int64_t)1])) >> (int64_t)2) + ((((((int64_t)tile[(int64_t)0]) * (int64_t)32) + (((int64_t)place_1[(int64_t)0]) * (int64_t)4)) + (((((int64_t)item_1) >> (int64_t)6) + ((int64_t)place_1[(int64_t)1])) & (int64_t)3)) * ((int64_t)q_len)))] = condval_26;
            }
          }
        }
      }
    }
    if (((0 < fresh) && (128 <= work_1[2])) && (completed[0] != 0)) {
      if (completed[0] != 0) {
        __syncthreads();
      }
    }
    if (((0 < fresh) && (128 <= work_1[2])) && (completed[0] != 0)) {
      if (completed[0] != 0) {
        source[0] = (((((int64_t)work_1[0]) * (int64_t)2112) + (((int64_t)tile[0]) * packed_outer)) + (((int64_t)place_1[0]) * packed_head));
      }
    }
    if (((0 < fresh) && (128 <= work_1[2])) && (completed[0] != 0)) {
      if (completed[0] != 0) {
        flush_block((&(k_residual[((((int64_t)tile[0]) * (int64_t)65536) + (((int64_t)place_1[0]) * (int64_t)8192))])), (&(v_residual[((((int64_t)tile[0]) * (int64_t)65536) + (((int64_t)place_1[0]) * (int64_t)8192))])), (&(packed[(source[0] * (int64_t)4)])), ((((fresh_k + (((int64_t)tile[0]) * fresh_k_batch)) + (((int64_t)place_1[0]) * fresh_k_head)) - (((int64_t)place_1[0]) * (int64_t)2048)) - (((int64_t)tile[0]) * (int64_t)16384)), fresh_k_token, ((((fresh_v + (((int64_t)tile[0]) * fresh_v_batch)) + (((int64_t)place_1[0]) * fresh_v_head)) - (((int64_t)place_1[0]) * (int64_t)2048)) - (((int64_t)tile[0]) * (int64_t)16384)), fresh_v_token, work_1[1], work_1[2], (&(memory[0])));
      }
    }
    __syncthreads();
  }
}

namespace {

struct Attend : kvgen::TileHost<Format, Schedule> {
  static cudaError_t launch(const kvgen::AttendArgs& args, bool append, cudaStream_t stream) {
    const kvgen::TileArgs t = arguments(args, append);
    if (args.plan)
      return start(attend_planned_kernel, t, 139264, false, stream,
                   t.arrivals, t.k_residual, t.lse, t.out, t.packed, t.partial, t.plan, t.q, t.stats, t.v_residual, t.ctas, t.empty_at,
                   t.fresh, t.fresh_k, t.fresh_k_batch, t.fresh_k_head, t.fresh_k_token, t.fresh_v, t.fresh_v_batch, t.fresh_v_head,
                   t.fresh_v_token, t.out_batch, t.out_head, t.out_token, t.packed_head, t.packed_outer, t.q_batch, t.q_head, t.q_len,
                   t.q_token, t.scale, t.splits, t.tiles_at, t.with_lse);
    return start(attend_static_kernel, t, 139264, Schedule::kCluster, stream,
                 t.arrivals, t.k_residual, t.lengths, t.lse, t.out, t.overflow, t.packed, t.partial, t.q, t.readers, t.stats,
                 t.v_residual, t.advance, t.ctas, t.fresh, t.fresh_k, t.fresh_k_batch, t.fresh_k_head, t.fresh_k_token, t.fresh_v,
                 t.fresh_v_batch, t.fresh_v_head, t.fresh_v_token, t.limit, t.out_batch, t.out_head, t.out_token, t.packed_head,
                 t.packed_outer, t.q_batch, t.q_head, t.q_len, t.q_token, t.runs, t.scale, t.splits, t.with_lse);
  }
};

using Module = kvgen::Exports<Format, Schedule, Shape, Attend>;

}  // namespace

KVGEN_EXPORT_MODULE(Module)
