"""Faults of CUDA's packing, prefill and unpacking."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.faults_cuda import _in

FAULTS: tuple[Fault, ...] = (
    *_in(
        "pack/pack",
        (
            "prefill-rest", "last", "what is left of a prefill that completed a begun block is lost",
            "if (nth == 0) keep(full * kTokens,", "if (nth == 0 && !begun) keep(full * kTokens,",
        ),
        (
            "prefill-grid", "last", "a prefill over a residual has one CTA too few for its last block",
            "const dim3 grid(args.cache.kv_heads * ceil_div(args.tokens, Format::kTokens), args.cache.batch);",
            "const dim3 grid(args.cache.kv_heads * (args.tokens / Format::kTokens + (args.tokens < Format::kTokens)), args.cache.batch);",
        ),
        (
            "prefill-far", "last", "a prefill packs its blocks from the 25th on over the 24th",
            "cache.block<Format>(sequence, head, block), smem);",
            "cache.block<Format>(sequence, head, min(block, 23)), smem);",
        ),
        (
            "prefill-begun", "last", "a begun block is completed from the first new token, wherever the residual ended",
            "const TokenRows<Element> v = begun ?", "const TokenRows<Element> v = false ?",
        ),
    ),
    *_in(
        "pack/scalers",
        (
            "range-last-run", "last", "the last 16 tokens of a group do not count for K's smallest and largest",
            "for (int run = 1; run < kRunsPerGroup; ++run)", "for (int run = 1; run < kRunsPerGroup - 1; ++run)",
        ),
        (
            "range-rows", "last", "of every 16 tokens the last rows do not count for K's smallest and largest",
            "for (int step = 0; step < 16 / kRows; ++step)", "for (int step = 0; step < 16 / kRows - 1; ++step)",
        ),
        (
            "half-run-range-rows", "half-run", "where a load has three rows, the last of 16 tokens does not count for K's extremes",
            "power_of_two_within(32 / kRowLanes)", "(32 / kRowLanes)",
        ),
    ),
    *_in(
        "pack/quantize",
        (
            "ties", "last", "codes that are close to a tie are not divided again",
            "close |= encode<Codec>(values, scalers(lane_row), codes) ? 1 << lane_row : 0;",
            "encode<Codec>(values, scalers(lane_row), codes);",
        ),
        (
            "half-run-scalers", "half-run", "the channels of K's half run take the scalers of channels twice as far behind",
            "of_row + Runs::lane_channel(x + i, threadIdx.x % 4)", "of_row + Runs::channel(x + i) + threadIdx.x % 4 * 8 % 16",
        ),
        (
            "pack-half", "channel-groups", "the second group of a 2-bit K's 32 tokens is packed with the thresholds of the first",
            "group + (begin + lane_row / 2 * 16) / Places::Quant::kGroup * Format::kHeadDim;", "group;",
        ),
        (
            "pack-split", "split-groups", "32 tokens of a 2-bit K that begin within a group are packed as if they began with it",
            "begin = Places::kSplitsGroups ? token % Places::Quant::kGroup : 0;", "begin = 0;",
        ),
        (
            "pack-values", "channel-groups", "V's scalers are made before all warps have found the extremes that they depend on",
            "channel_ranges<Format, kWhich, kThreads>(row, smem);\n    __syncthreads();",
            "channel_ranges<Format, kWhich, kThreads>(row, smem);\n    if constexpr (kWhich == Which::key) __syncthreads();",
        ),
    ),
    *_in(
        "pack/boost",
        (
            "boost-sum", "boost", "the second half of a group does not count for the choice of boosted channels",
            "token < Format::Key::kGroup; token +=", "token < Format::Key::kGroup / 2; token +=",
        ),
        (
            "boost-slices", "boost", "a quarter of a group's tokens does not count for the choice of boosted channels",
            "slice < Stats::kSlices; ++slice) key +=", "slice < Stats::kSlices - 1; ++slice) key +=",
        ),
        (
            "boost-levels", "boost", "boosted channels have the scale of two bits",
            "? Codec::kMaxBoosted : Codec::kMaxCode;", "? Codec::kMaxCode : Codec::kMaxCode;",
        ),
        (
            "boost-low", "boost", "the lower bits of boosted channels are those that two bits gave",
            "block[Places::code_bit(row, channel) / 8] = static_cast<uint8_t>(low);", "",
        ),
        (
            "boost-order", "boost", "the boost index of a group's last channel is not counted from its first",
            "for (int other = 0; other < channel; ++other) position", "for (int other = 1; other < channel; ++other) position",
        ),
    ),
    *_in(
        "pack/words",
        (
            "half-run-share", "half-run-groups", "the second of two half runs that share words of V erases the first",
            "mine << 4 | *reinterpret_cast<const uint32_t*>(stored);", "mine << 4;",
        ),
    ),
    *_in(
        "pack/scalers",
        (
            "range-lanes", "last", "half of the channels do not count for V's smallest and largest",
            "range.include_lane(2);", "",
        ),
        (
            "scaler-row", "token", "rows take the scaler that the next lane made",
            "const int row = lane / 4 * 4;\n  if constexpr (Quant::Codec::template",
            "const int row = (lane / 4 * 4 + 4) % 32;\n  if constexpr (Quant::Codec::template",
        ),
    ),
    *_in(
        "pack/words",
        (
            "tie-up", "int2", "a 2-bit code at the tie of 3/2 goes down",
            "return kNth == 2 ? distance >= bound : distance > bound;", "return distance > bound;",
        ),
    ),
    *_in(
        "codec/integers",
        (
            "magnitude", "symmetric", "symmetric scales look at positive numbers alone",
            "fmaxf(-low, high);", "fmaxf(0.f, high);",
        ),
        (
            "code-clamp", "last", "codes are found with the scale as it was before it was rounded",
            "s.scale = __half2float(params[0]);", "s.scale = scale;",
        ),
    ),
    *_in(
        "pack/unpack",
        (
            "unpack-last", "last", "the last token of the residual is not unpacked",
            "for (int i = threadIdx.x; i < tokens * kVectors; i += kThreads) {\n    const int token = i / kVectors, channel",
            "for (int i = threadIdx.x; i < (tokens - 1) * kVectors; i += kThreads) {\n    const int token = i / kVectors, channel",
        ),
        (
            "unpack-rows", "last", "unpacking gives V's rows from the ninth of every 16 on the scales of the first eight",
            "lane_row * 8 < Places::kParamTokens : lane_row == 0;", "lane_row * 8 < Places::kParamTokens : lane_row <= 1;",
        ),
        (
            "half-run-unpack", "half-run-groups", "unpacking gives every second half run of a 2-bit V the codes of the one before",
            "words[i] >>= Places::first_bit(x + i);", ";",
        ),
        (
            "unpack-half", "channel-groups", "unpacking gives the second group of a 2-bit K's 32 tokens the scales of the first",
            "lane_row * 8 < Places::kParamTokens : lane_row == 0;", "true : lane_row == 0;",
        ),
        (
            "unpack-split", "split-groups", "of a 2-bit K's 32 tokens that begin within a group all take its scales",
            "lane_row * 8 < Places::kParamTokens : lane_row == 0;", "lane_row * 8 < Quant::kGroup : lane_row == 0;",
        ),
    ),
    *_in(
        "host/args",
        (
            "block-far-sequence", "paged", "packing puts the blocks of sequences from the ninth on into pages of the eighth",
            "return block_table[static_cast<int64_t>(batch) * table_stride + block / page_blocks];",
            "return block_table[static_cast<int64_t>(batch < 8 ? batch : 7) * table_stride + block / page_blocks];",
        ),
    ),
    *_in(
        "format/places",
        (
            "code-order", "last", "channels of K's words are swapped; what packs and unpacks agrees, what attends does not",
            "4 * (word / kWords) + 2 * (byte % 2) + byte / 2};", "4 * (word / kWords) + 2 * (byte / 2) + byte % 2};",
        ),
        (
            "unpack-token-groups", "half-run-token", "unpacking a 2-bit K per token in groups of 48 channels takes other tokens' scales",
            "kSplitsGroups = Quant::kPerChannel && kParamTokens", "kSplitsGroups = kParamTokens",
        ),
    ),
    *_in(
        "pack/append_rows",
        (
            "prefill-sink", "unquantized", "a prefill that goes beyond the sink does not keep the tokens before its end",
            "max(min(lengths.after, ResidualRows::kSink) - lengths.before, 0)",
            "max((lengths.after > ResidualRows::kSink ? 0 : lengths.after) - lengths.before, 0)",
        ),
        (
            "prefill-rollback", "unquantized", "a prefill does not keep tokens that it packs, although a crop may unpack them",
            "max(lengths.after - ResidualRows::kRollback, 0)", "lengths.after",
        ),
    ),
    *_in(
        "pack/unpack",
        (
            "unpack-sink", "unquantized", "the last token of the sink is not unpacked",
            "block < 0 ? ResidualRows::kSink : INT32_MAX", "block < 0 ? ResidualRows::kSink - 1 : INT32_MAX",
        ),
    ),
)  # fmt: skip
