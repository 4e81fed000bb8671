// Dequantizes a cache: for extend attention, for tests and for conversion between layouts. A warp inverts the packer's order of words, so
// it loads and stores 16 bytes at a time.
#pragma once
#include <algorithm>

#include "kvgen/host/args.cuh"
#include "kvgen/pack/quantize.cuh"
#include "kvgen/pack/words.cuh"

namespace kvgen {
namespace unpacking {

constexpr int kThreads = 256;

// CTAs of a head for the sink.
template <class Format>
constexpr int kSinkRuns = ceil_div(Format::ResidualRows::kSink, Format::kTokens);

template <class Places>
__device__ __forceinline__ float param(const uint8_t* block, int kind, int token, int channel) {
  return to_float(*reinterpret_cast<const typename Places::Codec::Param*>(block + Places::param_offset(kind, token, channel)));
}

// Scales and zeros of eight consecutive channels of a token, or of four of a half run, twice.
template <class Places>
struct Affine {
  using Quant = typename Places::Quant;
  static constexpr int kCount = Quant::kPerChannel || kStaticAlone<Quant> ? 8 : 1;
  float scale[kCount], zero[kCount];

  __device__ __forceinline__ Affine(const uint8_t* block, const float* scales, int token, int channel, bool half) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = channel + (half ? i % 4 : i);
      if constexpr (kStaticAlone<Quant>)
        scale[i] = scales[at];
      else
        scale[i] = param<Places>(block, 0, token, at);
      if constexpr (kTwoLevels<Quant>) scale[i] *= *scales;
      zero[i] = 0.f;
      if constexpr (Quant::kZero) zero[i] = param<Places>(block, 1, token, at);
    }
  }
  __device__ __forceinline__ float operator()(uint32_t code, int i) const {
    return __fmaf_rn(Quant::Codec::decode(code), scale[i % kCount], zero[i % kCount]);
  }
};

// Extracts the codes of eight channels of every lane row from a lane's words of a run.
template <class Places>
__device__ __forceinline__ void extract_codes(const uint32_t* words, uint32_t (&codes)[Places::kLaneRows][8]) {
  constexpr int kBits = Places::kBits;
#pragma unroll
  for (int w = 0; w < Places::kWordsPerRun; ++w)
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int f = 0; f < Places::kPerByte; ++f) {
        const auto to = Places::element(w, b, f);
        codes[to.lane_row][to.channel] = words[w] >> (8 * b + kBits * f) & ((1u << kBits) - 1);
      }
}

// Dequantizes eight channels of every lane row of a tile, 16 bytes each, from a lane's words of run x.
template <class Places, class Element>
__device__ __forceinline__ void dequantize(const uint8_t* block, const float* scales, const uint32_t* words, int token, int x,
                                           uint4 (&out)[Places::kLaneRows]) {
  using Quant = typename Places::Quant;
  if constexpr (!Quant::Codec::kQuantized) {
    uint32_t pairs[Places::kLaneRows][4];
#pragma unroll
    for (int w = 0; w < Places::kWordsPerRun; ++w) pairs[Places::pair(w).lane_row][Places::pair(w).channel] = words[w];
#pragma unroll
    for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row)
      out[lane_row] = make_uint4(pairs[lane_row][0], pairs[lane_row][1], pairs[lane_row][2], pairs[lane_row][3]);
  } else {
    const int row = token + static_cast<int>(threadIdx.x % 32 / 4), channel = Places::Runs::lane_channel(x, threadIdx.x % 4);
    uint32_t codes[Places::kLaneRows][8];
    extract_codes<Places>(words, codes);
    const bool half = Places::Runs::is_half(x);
    const Affine<Places> first(block, scales, row, channel, half);
#pragma unroll
    for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
      const bool same = kStaticAlone<Quant> ||
                        (Quant::kPerChannel ? lane_row * 8 < Places::kParamTokens : lane_row == 0);  // params as the first lane row's
      // Lane rows 2 and 3 of a tile that splits groups have one group: equal addresses let them share registers.
      const int other = Places::kSplitsGroups ? token + lane_row / 2 * 16 : row + lane_row * 8;
      const Affine<Places> affine = same ? first : Affine<Places>(block, scales, other, channel, half);
      alignas(16) Element values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = from_float<Element>(affine(codes[lane_row][i], i));
      out[lane_row] = *reinterpret_cast<const uint4*>(values);
    }
  }
}

// Unpacks the first `tokens` tokens of a block; `row(token)` is the destination of a token's channels. The warps distribute (tile, chunk)
// pairs.
template <class Format, Which kWhich, class Row>
__device__ __forceinline__ void unpack_operand(const uint8_t* block, const float* scales, int tokens, Row&& row) {
  using Places = kvgen::Places<Format, kWhich>;
  using Element = typename Format::Element;
  constexpr int kChunk = chunk_runs<Places>();
  constexpr int kChunks = Places::Runs::kCount / kChunk;
  constexpr int kLoad = store_words<Places, kChunk>();
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < Format::kTokens / Places::kTileTokens * kChunks; item += kThreads / 32) {
    const int token = item / kChunks * Places::kTileTokens, x = item % kChunks * kChunk;
    if (token >= tokens) return;
    alignas(16) uint32_t words[kChunk * Places::kWordsPerRun] = {};
#pragma unroll
    for (int w = 0; w < kChunk * Places::kWordsPerRun; w += kLoad) {
      if (w % Places::kWordsPerRun >= Places::run_words(x + w / Places::kWordsPerRun)) continue;
      copy_words<kLoad>(words + w, block + Places::word_offset(token, x + w / Places::kWordsPerRun, w % Places::kWordsPerRun, lane));
    }
    if constexpr (!Places::kKey) {
#pragma unroll
      for (uint32_t& word : words) word = ptx::transpose(word);  // undoes the packer's transpose
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      uint4 out[Places::kLaneRows];
      if constexpr (Places::kSharedWords) words[i] >>= Places::first_bit(x + i);
      dequantize<Places, Element>(block, scales, words + i * Places::kWordsPerRun, token, x + i, out);
#pragma unroll
      for (int lane_row = 0; lane_row < Places::kLaneRows; ++lane_row) {
        const int at = token + lane_row * 8 + lane / 4;
        if (at < tokens) store_run(Places::Runs::at(row(at), x + i, lane % 4), out[lane_row], Places::Runs::is_half(x + i));
      }
    }
  }
}

// Unpacks the boosted channels of the first `tokens` tokens of a block, in place of the values that their lower bits alone gave.
template <class Format, class Row>
__device__ __forceinline__ void unpack_boosted(const uint8_t* block, int tokens, Row&& row) {
  using Places = kvgen::Places<Format, Which::key>;
  using Boost = BoostPlaces<Format>;
  const int lane = threadIdx.x % 32;
  for (int item = threadIdx.x / 32; item < Format::kTokens / 32 * Boost::kSteps; item += kThreads / 32) {
    const int token = item / Boost::kSteps * 32, step = item % Boost::kSteps, first = token + lane / 4;
    const uint32_t word = *reinterpret_cast<const uint32_t*>(block + Boost::word_offset(token, step, lane));
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const int channel = block[Boost::index_offset(token, Boost::position(step, lane, byte))];
      const uint32_t low = block[Places::byte_offset(first, channel)], high = word >> 8 * byte;
      const float scale = param<Places>(block, 0, token, channel), zero = param<Places>(block, 1, token, channel);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = (low >> 2 * i & 3) | (high >> 2 * i & 3) << 2;
        if (const int at = first + 8 * i; at < tokens)
          row(at)[channel] = from_float<typename Format::Element>(__fmaf_rn(Places::Codec::decode(code), scale, zero));
      }
    }
  }
}

// One CTA per (head, run of kTokens positions, sequence): first the runs of the sink, then those of packed blocks and of the unquantized
// tokens behind them.
template <class Format>
__global__ void __launch_bounds__(kThreads, 4) unpack_kernel(const UnpackArgs args) {
  using Element = typename Format::Element;
  using ResidualRows = typename Format::ResidualRows;
  constexpr int kVectors = Format::kHeadDim / 8;
  const CacheArgs& cache = args.cache;
  const auto run = TokenRun<Format::kTokens, kSinkRuns<Format>>::of_cta(args);
  if (run.nth < 0) return;
  const int sequence = run.sequence, head = run.head, origin = args.start(sequence);
  const int block = run.nth - kSinkRuns<Format>;  // negative in the sink
  const int length = cache.lengths[sequence];
  const int start = block < 0 ? (block + kSinkRuns<Format>)*Format::kTokens : ResidualRows::kSink + block * Format::kTokens;
  const int end = min(min(length, args.most(sequence)), block < 0 ? ResidualRows::kSink : INT32_MAX);
  const int tokens = min(end - start, Format::kTokens);
  if (tokens <= 0) return;
  const bool packed = block >= 0 && block < ResidualRows::packed_blocks(length);
  if (packed && block < WindowPlaces<Format::kWindowPlaces>::first(ResidualRows::packed_blocks(length + ResidualRows::kRollback))) return;
  if (Format::kPaged && packed && cache.page_of(sequence, block) < 0) return;  // the sliding window has passed it
  const uint8_t* bytes = packed ? cache.block<Format>(sequence, head, block) : nullptr;
  const auto k_row = [&](int token) { return args.k.row<Element>(sequence, origin + start + token, head); };
  const auto v_row = [&](int token) { return args.v.row<Element>(sequence, origin + start + token, head); };
  if (packed) {
    const auto scales = StaticScales::of<Format>(args.scales, cache.kv_heads, head);
    unpack_operand<Format, Which::key>(bytes, scales.key, tokens, k_row);
    unpack_operand<Format, Which::value>(bytes, scales.value, tokens, v_row);
    if constexpr (Format::kBoosted > 0) {
      __syncthreads();
      unpack_boosted<Format>(bytes, tokens, k_row);
    }
    return;
  }
  const int64_t rows = cache.residual_offset<Format>(sequence, head);
  for (int i = threadIdx.x; i < tokens * kVectors; i += kThreads) {
    const int token = i / kVectors, channel = i % kVectors * 8;
    const int64_t from = rows + ResidualRows::row(start + token) * Format::kHeadDim + channel;
    *reinterpret_cast<uint4*>(k_row(token) + channel) =
        *reinterpret_cast<const uint4*>(static_cast<const Element*>(cache.k_residual) + from);
    *reinterpret_cast<uint4*>(v_row(token) + channel) =
        *reinterpret_cast<const uint4*>(static_cast<const Element*>(cache.v_residual) + from);
  }
}

}  // namespace unpacking

template <class Format>
cudaError_t launch_unpack(const UnpackArgs& args, cudaStream_t stream) {
  if (args.cache.batch == 0 || args.cache.kv_heads == 0 || args.tokens == 0) return cudaSuccess;
  const int runs = unpacking::kSinkRuns<Format> + ceil_div(std::max(args.tokens - Format::ResidualRows::kSink, 0), Format::kTokens);
  const dim3 grid = TokenRun<Format::kTokens, unpacking::kSinkRuns<Format>>::grid(args, runs);
  unpacking::unpack_kernel<Format><<<grid, unpacking::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvgen
