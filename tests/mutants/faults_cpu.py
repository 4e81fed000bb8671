"""Faults of the CPU's headers."""

from __future__ import annotations

from tests.mutants.fault import Fault

HEADERS = "templates/cpu/include/kvgen"
COMMON = "templates/common/include/kvgen"


def _in(header: str, *faults: tuple[str, ...], folder: str = HEADERS) -> tuple[Fault, ...]:
    """(name, case, what it breaks, find, replace[, nth]) of one header."""
    return tuple(
        Fault(name, f"{folder}/{header}.hpp", case, breaks, find, replace, int(rest[0]) if rest else 0)
        for name, case, breaks, find, replace, *rest in faults
    )


FAULTS: tuple[Fault, ...] = (
    *_in(
        "attend",
        (
            "merge-last-split", "splits", "the last of several splits is not merged",
            "for (int s = 0; s < tile.num_splits; ++s) {\n        const float* split",
            "for (int s = 0; s < tile.num_splits - 1; ++s) {\n        const float* split",
        ),
        (
            "split-begin", "splits", "the last split begins 32 tokens too late",
            "begin = int64_t{tile.first} * C::chunk,",
            "begin = int64_t{tile.first} * C::chunk + (tile.first > 0 && tile.split_idx == tile.num_splits - 1 ? C::kSubtile : 0),",
        ),
        (
            "split-end", "splits", "the split before the last ends one chunk of 32 tokens too early",
            "end = int64_t{tile.end} * C::chunk;",
            "end = int64_t{tile.end} * C::chunk - (tile.split_idx + 2 == tile.num_splits ? C::kSubtile : 0);",
        ),
        (
            "split-residual", "splits", "the residual is attended only where a head is not split",
            "if (tile.split_idx == tile.num_splits - 1) {", "if (tile.num_splits == 1) {",
        ),
        (
            "split-slot", "splits", "the partial result of a head's last split is stored over that of the split before",
            "save(state, r, partial(tile.slot, r));",
            "save(state, r, partial(tile.slot - (tile.split_idx > 0 && tile.split_idx == tile.num_splits - 1), r));",
        ),
        (
            "rows-output", "prompt", "without splits, rows from the second block of query rows on are written over the first's",
            "finish(head, r, state.acc[r]", "finish({head.b, head.kv_head, 0, head.rows}, r, state.acc[r]",
        ),
        (
            "lse-order", "splits-q4", "the LSE of several query tokens is stored token by token, not head by head",
            "[(head.b * C::q_heads + q_head) * call_.q_len + token]", "[(head.b * call_.q_len + token) * C::q_heads + q_head]",
        ),
        (
            "lse-base", "splits", "the LSE mixes a maximum in units of log2 with a sum in natural units",
            "(row_max + std::log2(row_sum)) * kLn2", "row_max * kLn2 + std::log2(row_sum)",
        ),
        (
            "causal-all", "splits-q4", "every query token sees all new tokens",
            "state.to[r] = before + token + 1;", "state.to[r] = before + call_.q_len;",
        ),
        (
            "causal-attend", "heads", "`attend` takes several query tokens as if they came after the last position",
            "step_.lengths[head.b] - (decoding() ? 0 : call_.q_len)", "step_.lengths[head.b] - (decoding() ? 0 : 1)",
        ),
        (
            "window-wide", "window", "the sliding window is one token too wide",
            "first_visible(before + token)", "first_visible(before + token - 1)",
        ),
        (
            "window-grain", "window", "the first partial sub-tile of a sliding window is skipped",
            "low = low / grain * grain;", "low = (low + grain - 1) / grain * grain;",
        ),
        (
            "residual-far", "wide-block", "the residual's tokens from the 129th on are read as the first ones again",
            "const int64_t at = position + tile * kLanes + i;",
            "const int64_t at = begin + (position - begin) % 128 + tile * kLanes + i;",
        ),
        (
            "new-token", "heads", "`decode` attends to the first new token's K in place of the others'",
            "row_of<Element>(call_.k_new, b, at - length, head.kv_head)", "row_of<Element>(call_.k_new, b, 0, head.kv_head)",
        ),
        (
            "length-far-sequence", "batch", "sequences from the ninth on take the length of the eighth",
            "step_.shape.plan.packed(step_.lengths[head.b]);", "step_.shape.plan.packed(step_.lengths[head.b < 8 ? head.b : 7]);",
        ),
        (
            "query-far-sequence", "batch", "sequences from the 129th on attend with the query of the 128th",
            "row_of<Element>(call_.q, head.b, token, q_head)", "row_of<Element>(call_.q, head.b < 128 ? head.b : 127, token, q_head)",
        ),
        (
            "group-head", "group5", "the fifth query head of a group reads the fourth's query",
            "head.kv_head * group + (head.first_row + r) % group;\n      const Element* q",
            "head.kv_head * group + ((head.first_row + r) % group > 3 ? 3 : (head.first_row + r) % group);\n      const Element* q",
        ),
        (
            "sink-tokens", "unquantized", "the sink tokens are not attended where a sequence has packed blocks",
            "if constexpr (sink > 0) over_residual", "if (packed == 0) over_residual",
        ),
        (
            "sink-position", "unquantized", "packed tokens are masked as if there were no sink before them",
            "PackedValues<C>{chunk}, sink + position,", "PackedValues<C>{chunk}, position,",
        ),
        (
            "learned-sink-head", "unquantized", "every query head has the learned sink of the first",
            "call_.sinks.template as<float>()[q_head]", "call_.sinks.template as<float>()[0]",
        ),
        (
            "learned-sink-scale", "unquantized", "what a row saw is not rescaled where its learned sink is larger than every score",
            "row_sum = row_sum * weight + std::exp2(logit - peak)", "row_sum = row_sum + std::exp2(logit - peak)",
        ),
        (
            "learned-sink-nothing", "unquantized", "the LSE of a query that sees nothing is not its learned sink",
            "if (peak != -kInfinity) {", "if (row_max != -kInfinity) {",
        ),
        (
            "learned-sink-base", "unquantized", "learned sinks are taken for logarithms to base 2",
            "as<float>()[q_head] * kLog2e, peak", "as<float>()[q_head], peak",
        ),
    ),
    *_in(
        "step",
        (
            "split-record", "splits", "records of splits overlap by one number, the sum of weights",
            "static constexpr int64_t record = C::kHeadDim + 2;", "static constexpr int64_t record = C::kHeadDim + 1;",
        ),
        (
            "plan-residual-length", "paged", "the lengths of a step are those of its packed tokens",
            "lengths[tile.sequence] = tile.length,", "lengths[tile.sequence] = tile.length / C::kTokens * C::kTokens,",
        ),
        (
            "plan-merge", "prompt", "the last head with splits is not merged where it follows another one",
            "if (tile.num_splits > 1) split_heads", "if (tile.num_splits > 1 && split_heads.empty()) split_heads",
        ),
        (
            "plan-slots", "prompt", "the second head with splits stores its partial results over the first's",
            "tile.num_splits > 1 ? slots++ : 0;", "tile.num_splits > 1 ? (slots = tile.split_idx + 1) - 1 : 0;",
        ),
        (
            "plan-workers", "batch", "the last work tile of a plan is left out",
            "tile.slot = tile.num_splits", "if (tile.sequence == 135) return;\n    tile.slot = tile.num_splits",
        ),
        (
            "plan-local", "unquantized", "a plan takes the newest tokens, which are never packed, for packed ones",
            "plan.unpacked = C::ResidualRows::kUnpacked;", "plan.unpacked = C::ResidualRows::kSink;",
        ),
    ),
    *_in(
        "append",
        (
            "flush-boundary", "int8", "a residual that is exactly full is not packed",
            "due_blocks(length_, after_)", "due_blocks(length_, after_ - 1)",
        ),
        (
            "append-far", "splits", "a prefill packs its blocks from the 25th on over the 24th",
            "cache_.block(batch_, head_, index)", "cache_.block(batch_, head_, i < 24 ? index : index - i + 23)",
        ),
        (
            "append-rest", "heads", "`decode` of several tokens forgets those behind a block that became full",
            "first : length_; position < after_;",
            "first : length_; position < (first > length_ && after_ - length_ < 16 ? first : after_);",
        ),
        (
            "append-old", "int8", "the first new token of a block that becomes full is read from the residual, where it is not yet",
            "first + t < length_ ? cache_.k_row", "first + t <= length_ ? cache_.k_row",
        ),
        (
            "append-rest-slot", "heads", "V of what is left behind a packed block goes one slot too far",
            "std::memcpy(cache_.v_row(batch_, head_, position), fresh",
            "std::memcpy(cache_.v_row(batch_, head_, position + (due_blocks() > 0 && position + 1 < after_)), fresh",
        ),
        (
            "rollback-rows", "unquantized", "a token that is packed in its own call is not kept, although a crop may unpack it",
            "after_ > Residual::kRollback ? after_ - Residual::kRollback : 0", "after_",
        ),
        (
            "sink-append", "unquantized", "a call that goes beyond the sink does not keep the tokens before its end",
            "position < after_ && position < Residual::kSink; ++position)", "after_ <= Residual::kSink && position < after_; ++position)",
        ),
        (
            "unpack-value-row", "paged", "unpacking puts V of every block's last sub-tile one sub-tile early",
            "row_of<Element>(v, batch, position + token + t, head)",
            "row_of<Element>(v, batch, position + (token + C::kSubtile < C::kTokens ? token : token - C::kSubtile) + t, head)",
        ),
    ),
    *_in(
        "format",
        (
            "residual-row", "unquantized", "rows of the residual are counted from the first token, not from the end of the sink",
            "kSink + (position - kSink) % kCapacity;", "kSink + position % kCapacity;",
        ),
        folder=COMMON,
    ),
    *_in(
        "cache",
        (
            "page-inner", "paged", "all blocks of a page lie over the first",
            "inner = index % C::kPageBlocks;", "inner = 0;",
        ),
        (
            "page-far-sequence", "paged", "sequences from the ninth on use the pages of the eighth",
            "outer = page(batch, index / C::kPageBlocks);", "outer = page(batch < 8 ? batch : 7, index / C::kPageBlocks);",
        ),
        (
            "locate-far", "paged", "packed tokens from the 3073rd on are read one block early",
            "chunk.block[i] = block(batch, head, at / C::kTokens);",
            "chunk.block[i] = block(batch, head, at / C::kTokens - (at >= 3072));",
        ),
        (
            "residual-head", "heads", "heads from the third on share the residual slots of the first two",
            "((batch * C::kv_heads + head) * Residual::kRows + row)", "((batch * C::kv_heads + head % 2) * Residual::kRows + row)",
        ),
        (
            "block-far-head", "heads", "the fourth KV head's blocks lie over the third's",
            "((outer * C::kv_heads + head) * per + inner)", "((outer * C::kv_heads + (head < 3 ? head : 2)) * per + inner)",
        ),
        (
            "stride-head", "heads", "strides between heads are taken for head_dim, as if rows were dense",
            "head * view.stride[2];", "head * view.size[3];",
        ),
        (
            "window-rollback", "window-rollback", "blocks that a sliding window passed before tokens were taken back are held to be there",
            "(length + Residual::kRollback, INT32_MAX)", "(length, INT32_MAX)",
        ),
    ),
    *_in(
        "codec/unquantized",
        (
            "bfloat-order", "plain", "the two bfloat16 of a word are swapped where attention reads them",
            "as<F32>(k == 0 ? word << 16 : word & 0xffff0000u)", "as<F32>(k != 0 ? word << 16 : word & 0xffff0000u)",
        ),
    ),
    *_in(
        "codec/integers",
        (
            "round-down", "int8", "codes near a tie round down",
            "round_even((x - a.zero) / a.scale)", "round_even((x - a.zero) / a.scale - 0.01f)",
        ),
        (
            "reciprocal", "int8", "codes come from a multiplication by the reciprocal of the scale",
            "round_even((x - a.zero) / a.scale)", "round_even((x - a.zero) * (1.0f / a.scale))",
        ),
        (
            "magnitude", "symmetric", "symmetric scales look at positive numbers alone",
            "high > -low ? high : std::fabs(low);", "high > 0 ? high : std::fabs(low);",
        ),
        (
            "integers-high", "integers", "the second code of every pair is taken for zero",
            "* ones", "* 1u",
        ),
    ),
    *_in(
        "operand",
        (
            "zero-middle", "int8", "the middle of 8-bit codes is off by one step",
            "a.scale * Code::middle + a.zero", "a.scale * (Code::middle - 1) + a.zero",
        ),
        (
            "params-order", "value-channel", "scales of groups lie in reverse order; packing and reading agree",
            "static_cast<int64_t>(group) * Op::kParams * param_extent",
            "static_cast<int64_t>((Op::kPerChannel ? C::kTokens : C::kHeadDim) / Op::kGroup - 1 - group) * Op::kParams * param_extent",
        ),
        (
            "narrow-group", "narrow", "in groups of 16 tokens the second half of a sub-tile takes the first half's scales",
            "affine_of_one(block, subtile, (token + row) / Op::kGroup, k)", "affine_of_one(block, subtile, token / Op::kGroup, k)",
        ),
        (
            "expand-group", "expanded", "V's groups of fewer than 16 channels take the scale of each tile's first",
            "affine_of_one(block, subtile, (row + i) / Op::kGroup, k)", "affine_of_one(block, subtile, row / Op::kGroup, k)",
        ),
    ),
    *_in(
        "quantize",
        (
            "range-last-token", "int8", "the last token of a group does not count for K's smallest and largest",
            "for (int t = 1; t < Info::kGroup; ++t)", "for (int t = 1; t < Info::kGroup - 1; ++t)",
        ),
        (
            "range-last-channels", "int8", "the last 16 channels of a token do not count for V's smallest and largest",
            "i < Info::kGroup; i += kLanes) range", "i + kLanes < Info::kGroup; i += kLanes) range",
        ),
    ),
    *_in(
        "chunk",
        (
            "group-end", "window", "a chunk that begins within a K group runs into the next with the first's scales",
            "token + group - chunk.in_block(token) % group", "token + group",
        ),
    ),
    *_in(
        "packed",
        (
            "key-zero-row", "splits", "K's zeros of the first query row serve all rows",
            "for (int m = 0; m < M; ++m) bias[m] = sum(zeros[m]);\n      weights.set(",
            "for (int m = 0; m < M; ++m) bias[m] = sum(zeros[0]);\n      weights.set(",
        ),
        (
            "key-last-group", "token", "the last channel group of K is left out",
            "for (int g = 0; g < groups; ++g) group_of(", "for (int g = 0; g < (groups > 1 ? groups - 1 : 1); ++g) group_of(",
        ),
        (
            "key-sum-row", "token", "the sums of the first query row multiply K's zeros for all rows",
            "q_sum[m * groups + g] * a.zero", "q_sum[g] * a.zero",
        ),
    ),
    *_in(
        "packed",
        (
            "value-last-group", "token", "the last channel group of V takes the scales of the first",
            "chunk.subtile[token / C::kSubtile], g, token % C::kSubtile",
            "chunk.subtile[token / C::kSubtile], g % (groups - 1), token % C::kSubtile",
        ),
        (
            "value-far-group", "value-channel", "V's token groups from the third of a block on take the scales of the first two",
            "group = chunk.in_block(begin) / C::Value::kGroup, end", "group = chunk.in_block(begin) / C::Value::kGroup % 2, end",
        ),
    ),
    *_in(
        "products",
        (
            "last-tile", "splits", "the last of an odd number of 16-token tiles is not multiplied",
            "if (begin < end) for_tiles<T / 2>", "if (begin + 1 < end) for_tiles<T / 2>",
        ),
        (
            "int2-second-half", "int2", "the second half of every word of 2-bit codes is read as the first",
            "packed.shift_right(step * (32 / Code::per_word));", "packed.shift_right(0);",
        ),
    ),
    *_in(
        "rows",
        (
            "merge-weight", "splits", "splits are weighed by powers of e, where their maxima are in units of log2 e",
            "std::exp2(max - row_max)", "std::exp(max - row_max)",
        ),
        (
            "merge-sum", "splits", "the merged sum of weights leaves out the splits' own weights",
            "row_sum += sum * weight;", "row_sum += sum;",
        ),
        (
            "rescale-sum", "splits", "the sum of weights is not rescaled when the maximum rises",
            "row_sum *= alpha;", "",
        ),
        (
            "rescale-last-channels", "splits", "the last 16 channels are not rescaled when the maximum rises",
            "for (int c = 0; c < dim; c += kLanes) store(acc + c, load<F32>(acc + c) * alpha);",
            "for (int c = 0; c + kLanes < dim; c += kLanes) store(acc + c, load<F32>(acc + c) * alpha);",
        ),
    ),
    *_in(
        "rows",
        (
            "mask-high", "splits-q4", "a query token sees the one after it",
            "(index < high)", "(index <= high)",
        ),
        (
            "mask-low", "window", "the first token of a sliding window is masked",
            "(index >= low)", "(index > low)",
        ),
        (
            "rescale-row", "splits", "what all rows have summed is rescaled to the maximum of the first",
            "partial(first + m).rescale(peak[m]);", "partial(first + m).rescale(peak[0]);",
        ),
    ),
    *_in(
        "products",
        (
            "integers-middle", "integers", "half the middle of the codes is subtracted from the stored ones",
            "static_cast<uint32_t>(Code::middle) *", "static_cast<uint32_t>(Code::middle / 2) *",
        ),
        (
            "integers-step", "integers", "the sums of all query rows are scaled with the step of the first",
            "* step_[m] + bias_[m]", "* step_[0] + bias_[m]",
        ),
        (
            "integers-bias", "integers", "K's and V's zeros are left out of sums of integers",
            "* step_[m] + bias_[m]", "* step_[m]",
        ),
        (
            "integers-largest", "integers", "the last 16 weights do not count for the largest, and may leave the range of 16 bits",
            "i < count; i += kLanes) largest", "i + kLanes < count; i += kLanes) largest",
        ),
        (
            "integers-sign", "integers", "negative weights do not count for the largest",
            "load<I32>(x + i) & 0x7fffffff", "load<I32>(x + i)",
        ),
        (
            "integers-coarse", "integers", "weights are rounded to 8 bits",
            "float most = 32639.0f;", "float most = 127.0f;",
        ),
        (
            "integers-last", "integers", "the last 16 weights are left as they were",
            "for (int i = 0; i < count; i += kLanes) {\n      const U32 rounded",
            "for (int i = 0; i + kLanes < count; i += kLanes) {\n      const U32 rounded",
        ),
        (
            "integers-order", "integers", "weights stand in the order of the codes, not in that of their pairs",
            "store_weights<Code::per_word>", "store_weights<kCodes>",
        ),
    ),
    *_in(
        "products",
        (
            "integers-second-half", "integers-token", "the second half of every word of 2-bit codes is read as the first",
            "packed.shift_right(step * (32 / per_word));", "packed.shift_right(0);",
        ),
        (
            "integers-half-weights", "integers-token", "the second half of every word of 2-bit codes meets the weights of the first",
            "(first + j) * 4", "j * 4",
        ),
    ),
    *_in(
        "simd",
        (
            "exp2-coefficient", "float32", "exp2 is good to four digits alone",
            "p * f + 2.4022651e-1f", "p * f + 2.4122651e-1f",
        ),
        (
            "tanh-series", "window", "the series of tanh is used where it is not good enough",
            "select(y < 0.0625f, small", "select(y < 1.0f, small",
        ),
    ),
    *_in(
        "lengths",
        (
            "crop-first-sequence", "unquantized", "a crop takes from every sequence what the first one asks for",
            "lengths[b] -= static_cast<int32_t>(fewer(b));", "lengths[b] -= static_cast<int32_t>(counts ? counts[0] : fewer(b));",
        ),
        (
            "crop-least", "unquantized", "crops without new tokens between them do not count together",
            "std::max<int64_t>(least[b], lengths[b] - call.rollback)", "std::max<int64_t>(0, lengths[b] - call.rollback)",
        ),
    ),
    *_in(
        "module",
        (
            "advance-far-sequence", "batch", "`decode` does not advance the lengths of sequences from the 129th on",
            "for (int64_t b = 0; b < batch; ++b) cache.length(b) += step.appended[b];",
            "for (int64_t b = 0; b < (batch < 128 ? batch : 128); ++b) cache.length(b) += step.appended[b];",
        ),
        (
            "advance-one", "heads", "`decode` of several tokens advances lengths by one",
            "cache.length(b) += step.appended[b];", "cache.length(b) += 1;",
        ),
        (
            "flush-last-sequence", "int8", "whether blocks are packed in `decode` follows from the last sequence alone",
            "most_blocks = blocks > most_blocks ? blocks : most_blocks;", "most_blocks = blocks;", "2",
        ),
        (
            "prefill-last-sequence", "int8", "a prefill packs no more blocks of any sequence than of the last",
            "most_blocks = blocks > most_blocks ? blocks : most_blocks;", "most_blocks = blocks;", "1",
        ),
        (
            "unpack-last-token", "int8", "the last token of the residual is not unpacked",
            "Residual::first(cache.length(b)); position < length;", "Residual::first(cache.length(b)); position + 1 < length;",
        ),
        (
            "unpack-sink", "unquantized", "the last sink token is not unpacked",
            "position < Residual::kSink && position < length; ++position) copy",
            "position + 1 < Residual::kSink && position < length; ++position) copy",
        ),
    ),
    *_in(
        "operand",
        (
            "boost-bias", "boost", "the middle of the upper codes is not given back",
            "bias[m] += x * Code::middle;", "",
        ),
        (
            "boost-channel", "boost", "upper codes weigh the query of the channel whose number is their place",
            "4 * folded[m * C::kHeadDim + channel[i]]", "4 * folded[m * C::kHeadDim + i]",
        ),
        (
            "boost-select", "boost", "channels with the smallest numbers are boosted",
            "order[a] > order[b];", "order[a] < order[b];",
        ),
        (
            "boost-group", "boost-range", "all groups of a block share one index of boosted channels",
            "block + C::kBoostIndex + group * channels", "block + C::kBoostIndex + group * 0",
        ),
        (
            "boost-range", "boost-range", "a channel's range is taken for its largest number",
            "key[c] = high[c] - low[c];", "key[c] = high[c] > 0 ? high[c] : 0;",
        ),
        (
            "boost-mean", "boost", "the last token of a group does not count for the choice of boosted channels",
            "for (int t = 0; t < C::Key::kGroup; ++t)", "for (int t = 0; t < C::Key::kGroup - 1; ++t)",
        ),
        (
            "boost-expand", "boost", "unpacking leaves the upper codes' middle out",
            "i % Code::per_word) + Code::middle;", "i % Code::per_word);",
        ),
    ),
    *_in(
        "matrix",
        (
            "matrix-clamp", "matrix", "codes go down to -128",
            "std::max(-kLevels, std::min", "std::max(-kLevels - 1.f, std::min",
        ),
        (
            "matrix-round", "matrix", "codes round ties away from zero",
            "__builtin_nearbyintf(", "__builtin_roundf(",
        ),
        (
            "matrix-zero", "matrix", "a channel of zeros is divided by its scale",
            "scale == 0.f ? 0.f : x / scale", "x / scale",
        ),
        (
            "matrix-reciprocal", "matrix", "codes come from a multiplication by the reciprocal of the scale",
            "scale == 0.f ? 0.f : x / scale", "scale == 0.f ? 0.f : x * (1.f / scale)",
        ),
        (
            "matrix-rank", "matrix", "scales leave out the last rows where the threads do not divide them",
            "row < a.tokens * (rank + 1) / count; ++row", "row < a.tokens * rank / count + a.tokens / count; ++row",
        ),
        (
            "matrix-last-row", "matrix", "the last row of a tile of rows is left out",
            "i < std::min<int64_t>(a.tokens, row + Config::rows);", "i < std::min<int64_t>(a.tokens, row + Config::rows - 1);",
        ),
        (
            "matrix-stride", "matrix-half", "rows of the matrix are taken to be dense",
            "a.x.template as<Element>() + row * a.x.stride[0];", "a.x.template as<Element>() + row * a.channels;",
        ),
    ),
    *_in(
        "quantize",
        (
            "boost-levels", "boost", "boosted channels have the scale of two bits",
            "high[c], Code::boosted_most);", "high[c]);",
        ),
        (
            "boost-low", "boost", "the lower bits of boosted channels are added to those that two bits gave",
            "(load<U32>(at) & ~(3u << shift))", "load<U32>(at)",
        ),
    ),
)  # fmt: skip
