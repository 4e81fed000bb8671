"""Faults of the CUDA kernels: attention, splits, the way to the output, append, plans."""

from __future__ import annotations

from tests.mutants.fault import Fault

HEADERS = "templates/cuda/include/kvgen"
COMMON = "templates/common/include/kvgen"


def _in(header: str, *faults: tuple[str, ...]) -> tuple[Fault, ...]:
    """(name, case, what it breaks, find, replace[, nth]) of one header: a CUDA header without its suffix, or a common one with it."""
    file = f"{COMMON}/{header}" if header.endswith(".hpp") else f"{HEADERS}/{header}.cuh"
    return tuple(
        Fault(name, file, case, breaks, find, replace, int(rest[0]) if rest else 0) for name, case, breaks, find, replace, *rest in faults
    )


FAULTS: tuple[Fault, ...] = (
    *_in(
        "epilogue/workspace",
        (
            "row-sums", "last", "sums of weights of warps and splits are added without bringing them to one maximum",
            "stats.row_sum += factor * other.row_sum;", "stats.row_sum += other.row_sum;",
        ),
        (
            "splits-rescale", "last", "what earlier batches of splits gave is not rescaled when a later one has a larger maximum",
            "for (int j = 0; j < kWide; ++j) value[j] *= rescale;", "for (int j = 0; j < kWide; ++j) value[j] *= 1.f;",
        ),
        (
            "splits-counter-batch", "paged", "sequences eight apart share a counter of arrived splits",
            "return counters + (head.sequence * args.cache.kv_heads",
            "return counters + (head.sequence % 8 * args.cache.kv_heads",
        ),
        (
            "runs-counter", "runs", "the runs of a head's rows share a counter of arrived splits",
            "* Traits::kRuns + head.run;", "* Traits::kRuns;",
        ),
        (
            "splits-stride", "queries", "partial results of the second q tile lie over the next split's",
            "return sums + (static_cast<int64_t>(slot) * Traits::kQRows + row) * Traits::kHeadDim;",
            "return sums + (static_cast<int64_t>(slot) * Traits::kTileQRows + row) * Traits::kHeadDim;",
        ),
    ),
    *_in(
        "epilogue/split_reduction",
        (
            "splits-last", "last", "of more than eight splits the last weighs nothing",
            "stats[i] = base + i < count ? RowStats", "stats[i] = base + i < count - (count > 8) ? RowStats",
        ),
        (
            "splits-counter", "last", "the counter of arrived splits is not reset: the second call differs",
            "if (last) *counter = 0;", "",
        ),
        (
            "two-level-totals", "two-level", "the second of two levels takes the sums of each group's first split for the group's",
            "each_sum(head, width > 1 ? 1 : 0, groups, slot,", "each_sum(head, 0, groups, slot,",
        ),
        (
            "two-level-last-group", "two-level", "a last group of fewer splits is left out",
            "return {ceil_div(slots.count, width), width};", "return {slots.count / width, width};",
        ),
        (
            "two-level-members", "two-level", "the last group of splits waits for as many as the others have",
            "members = min(width, slots.count - group * width);", "members = width;",
        ),
    ),
    *_in(
        "epilogue/output",
        (
            "runs-output", "runs", "every run of rows writes the output of the first",
            "const int head_row = Traits::head_row(head.run, row);", "const int head_row = row;",
        ),
        (
            "query-guard", "queries", "a call with fewer query tokens than the kernel holds writes one token too many",
            "if (query >= args.q_len) return;", "if (query > args.q_len) return;",
        ),
        (
            "lse-stride", "queries", "the LSE of a call with fewer query tokens than the kernel holds lies as if there were all",
            "+ q_head) * args.q_len + query;", "+ q_head) * Traits::kMaxQLen + query;",
        ),
        (
            "lse-empty", "last", "the LSE of a query that sees nothing is finite",
            "args.lse[at] = stats.row_sum == 0.f ? -INFINITY :", "args.lse[at] = stats.row_sum == 0.f ? -1e30f :",
        ),
    ),
    *_in(
        "epilogue/merge_warps",
        (
            "value-group-zero", "value-groups", "later channel groups of V take the zeros of the first",
            "state.affine[u * Traits::kValueGroups / Traits::kRowTiles][c];", "state.affine[0][c];",
        ),
    ),
    *_in(
        "epilogue/cluster_reduction",
        (
            "cluster-last", "cluster", "the last CTA of a cluster is not added up",
            "sum.template add<kCluster>(", "sum.template add<kCluster - 1>(",
        ),
        (
            "cluster-totals", "cluster", "the last CTA of a cluster is not sent the sums that it waits for: it hangs",
            "if (channel < kCluster) send(", "if (channel < kCluster - 1) send(",
        ),
    ),
    *_in(
        "epilogue/append",
        (
            "runs-flush", "runs", "every run of rows packs the residual, while others still read it",
            "if (Traits::kRuns == 1 || args.runs == 1) return true;", "return true;",
        ),
        (
            "flush-rest", "queries", "of the new tokens behind a packed block only the first is kept",
            ": Format::kTokens, residual.count());", ": Format::kTokens, min(residual.count(), Format::kTokens + 1));",
        ),
        (
            "flush-block", "paged", "a residual that became full is packed one block too early in its page",
            "ResidualRows::packed_blocks(residual.length));",
            "ResidualRows::packed_blocks(residual.length) / 2 * 2);",
        ),
        (
            "advance-far-sequence", "batch", "`decode` does not advance the lengths of sequences from the 129th on",
            "for (int i = lane; i < args.cache.batch; i += 32) {", "for (int i = lane; i < min(args.cache.batch, 128); i += 32) {",
        ),
        (
            "advance-counter", "last", "the counter of CTAs that read the lengths is not reset: the second `decode` advances none",
            "if (lane == 0) *work.lengths_read = 0;", "",
        ),
        (
            "advance-readers", "last", "lengths advance when the CTAs of one sequence have read them",
            "static_cast<int>(gridDim.x * gridDim.y * gridDim.z) - 1", "static_cast<int>(gridDim.x * gridDim.y) - 1",
        ),
        (
            "advance-overflow", "last", "the length of a sequence that has no room advances beyond it",
            "if (length <= args.limit - args.q_len) args.cache", "args.cache",
        ),
        (
            "overflow-flag", "last", "the host is not told that a sequence has no room",
            "if (threadIdx.x == 0) *args.overflow = 1;", "",
        ),
    ),
    *_in(
        "schedule/plan_kernel",
        (
            "plan-heads", "planned", "tiles of the later heads of a sequence lie one place early in the row of work",
            "sequence.at + head * row.positions(sequence.load)", "sequence.at + head * (row.positions(sequence.load) - 1)",
        ),
        (
            "plan-warps", "planned-batch", "heads of the first 32 sequences do not count for where those that follow begin",
            "__reduce_add_sync(~0u, lane < warp ? other : 0)", "0",
        ),
        (
            "plan-chunk", "planned-many", "work tiles of sequences from the 1,025th on lie over those of the first",
            "totals.loads + sums.before[0] + number", "sums.before[0] + number",
        ),
        (
            "plan-own", "planned", "heads get ranges of their own although there are fewer workers than such ranges",
            "ranges <= shape.workers ? lane", "ranges <= 2 * shape.workers ? lane",
        ),
        (
            "plan-empty", "planned", "empty sequences that are to be skipped take part in the step",
            "step_of(length, shape.fresh, args.limit, args.skip_empty)", "step_of(length, shape.fresh, args.limit, false)",
        ),
        (
            "plan-overflow", "planned", "the host is not told that a sequence of a plan has no room",
            "if (writes && step == SequenceStep::overflows && args.overflow) *args.overflow = 1;", "",
        ),
        (
            "prefill-advance", "batch", "neither a prefill nor a step advances the lengths of sequences from the 129th on",
            "b < args.batch; b += blockDim.x", "b < min(args.batch, 128); b += blockDim.x", "1",
        ),
        (
            "advance-empty", "planned", "the end of a step adds its tokens to empty sequences",
            "args.counts[b] : length > 0 || !args.skip_empty ? args.count : 0;", "args.counts[b] : args.count;",
        ),
        (
            "advance-room", "planned", "the end of a step adds tokens to a sequence that has no room",
            "if (more < 0 || more > args.limit - length)", "if (more < 0 || more > args.limit)",
        ),
    ),
    *_in(
        "schedule/plan.hpp",
        (
            "plan-range", "planned", "the last work tile of a worker is not in its range",
            "workers[worker(r)].end = index(r) + 1;", "workers[worker(r)].end = index(r);",
        ),
        (
            "plan-lanes", "planned", "of the splits of a head every second run of as many as it has threads is not written",
            "r <= last; r += step)", "r <= last; r += 2 * step)",
        ),
        (
            "plan-idle", "planned", "a worker that has no range keeps the range of an earlier step",
            "row.ranges : r + 1); ++w) workers[w] = WorkRange{};", "row.ranges : r + 1); ++w) {}",
        ),
        (
            "plan-no-tiles", "planned", "a head without packed tokens has no work tile",
            "return {tiles > 1 ? tiles : 1,", "return {tiles,",
        ),
        (
            "plan-end", "planned", "a work tile that another worker goes on with ends one KV tile early",
            "(to < n ? to : n);", "(to < n ? to - 1 : n);",
        ),
        (
            "plan-slots", "planned", "partial results and work tiles of neighbouring heads lie over each other",
            "return number + range; }", "return range; }",
        ),
        (
            "plan-room", "planned", "a plan has work for sequences without room for the step's tokens",
            "return length > limit - fresh ?", "return length > limit ?",
        ),
        (
            "plan-window", "window", "a plan leaves out the tile in which the window of the first query begins",
            "? token / tile_tokens :", "? token / tile_tokens + 1 :",
        ),
    ),
    *_in(
        "schedule/plan.hpp",
        (
            "divisor-shift", "planned", "divisions by known numbers shift by one bit too few",
            "(int64_t{1} << shift_) < value) ++shift_;", "(int64_t{2} << shift_) < value) ++shift_;",
        ),
        (
            "divisor-multiplier", "planned-heads",
            "multiples of a known number that is no power of two give a quotient that is one too small",
            "<< 32) / value + 1);", "<< 32) / value);",
        ),
    ),
    *_in(
        "schedule/work_queue",
        (
            "queue-second", "planned", "the second work tile of a CTA is not loaded",
            "    request(1);\n", "",
        ),
        (
            "queue-slot", "planned", "the third work tile of a CTA is looked for where the first lay",
            "operator[](int index) const { return memory_[index % kLatest]; }",
            "operator[](int index) const { return memory_[index % (kLatest - 1)]; }",
        ),
        (
            "queue-range", "planned", "the first work tile is the one of the range that was read before griddepcontrol.wait",
            "if (range_.begin != guess) store_first(first_field(range_.begin));", "",
        ),
        (
            "queue-head", "planned", "the query of another head of the same sequence is kept, which a stale plan named",
            "return seen.sequence != first.sequence || seen.head != first.head;", "return seen.sequence != first.sequence;",
        ),
    ),
    *_in(
        "mainloop/attend_planned",
        (
            "empties-count", "planned", "the outputs of empty sequences are not written",
            "i < plan.memory[0]; i += gridDim.x) write_empty", "i < 0; i += gridDim.x) write_empty",
        ),
        (
            "empties-further", "planned", "with more empty sequences than CTAs the outputs of the further ones are not written",
            "i += gridDim.x) write_empty", "i += plan.memory[0]) write_empty",
        ),
        (
            "planned-runs-slots", "runs", "the runs of a head's rows store their partial results in the same place",
            "return {tile.slot - tile.split_idx + run * args.slots,", "return {tile.slot - tile.split_idx + run % 1,",
        ),
        (
            "planned-stale", "planned", "before griddepcontrol.wait a query is read that does not exist",
            "if (exists(args, head_of<Traits>(args, queue.first()))) loader", "loader",
        ),
        (
            "planned-first-tile", "planned", "the warps' order does not go on over work tiles, where their copies do",
            "attend_packed<Traits>(shared, pipeline, first_tile<Traits>(work, done, warp),",
            "attend_packed<Traits>(shared, pipeline, first_tile<Traits>(work, 0, warp),",
        ),
        (
            "planned-store", "planned", "the result of a work tile is stored as that of the next",
            "queue[index - 1], Traits::kQTiles - 1);", "queue[index], Traits::kQTiles - 1);",
        ),
        (
            "planned-request", "planned", "of a CTA's work tiles those from the third on are not loaded",
            "queue.request(index + 1);", "",
        ),
        (
            "planned-arrival", "planned", "a CTA with one work tile arrives twice at its head",
            "shared.flags[i] = i < count && end(i)", "shared.flags[i] = end(i)",
        ),
        (
            "planned-reduction", "planned", "the splits of a CTA's last head are reduced only if those of its first are",
            "i = threadIdx.x / Traits::kReduceThreads; shared.flags[i])", "i = threadIdx.x / Traits::kReduceThreads; shared.flags[0])",
        ),
        (
            "planned-flush", "planned", "a residual that became full is not packed where several CTAs have the head",
            "(tile.num_splits > 1 && !shared.flags[i > 0])", "tile.num_splits > 1",
        ),
        (
            "planned-flush-head", "planned", "the residual of a CTA's first head is packed for all of its heads",
            "const WorkTile tile = queue.in_plan(i);", "const WorkTile tile = queue.in_plan(0);",
        ),
        (
            "planned-flush-full", "planned", "a residual that is exactly full is not packed by the CTAs of a plan",
            "flushes |= kAppend && residual.fills_block();", "flushes |= kAppend && residual.count() > ResidualRows::kBlock;",
        ),
        (
            "planned-residual", "planned", "every split of a head attends to the residual of the first",
            "const SplitPlace place{work.split_idx, work.num_splits};", "const SplitPlace place{0, work.num_splits};",
        ),
        (
            "planned-empty", "planned-batch", "of the empty sequences of a plan only two get their zeros",
            "i < plan.memory[0]; i += gridDim.x)", "i < min(plan.memory[0], 2); i += gridDim.x)",
        ),
        (
            "planned-decode", "queries", "`decode` with a plan hides packed tokens from its queries, as if the new ones were among them",
            "const SeqlenInfo seqlen{head.head, work.length + residual.fresh,", "const SeqlenInfo seqlen{head.head, work.length,",
        ),
    ),
    *_in(
        "mainloop/attend_static",
        (
            "static-runs-slots", "runs", "the static kernel's runs of rows store their partial results in the same place",
            "(Traits::kRuns == 1 ? 0 : head.run * args.slots)", "0",
        ),
        (
            "flush-boundary", "last", "a residual that is exactly full is not packed",
            "completed && full.fills_block())", "completed && full.count() > ResidualRows::kBlock)",
        ),
        (
            "static-decode", "queries", "`decode` hides packed tokens from its queries, as if the new ones were among them",
            "const SeqlenInfo seqlen{head.head, length + residual.fresh,", "const SeqlenInfo seqlen{head.head, length,",
        ),
        (
            "static-room", "last", "a step goes beyond a sequence's room",
            "length > args.limit - args.q_len) return skip_step", "length > args.limit) return skip_step",
        ),
        (
            "static-stride", "cluster", "CTAs of a cluster take the KV tiles of their neighbours too",
            "int stride() const { return Traits::kWarps * place.ctas; }",
            "int stride() const { return Traits::kWarps * place.ctas / Traits::kClusterSize; }",
        ),
        (
            "static-window", "window", "the tile in which the window of the first query begins is left out",
            "tiles.begin(token / Traits::kTileTokens + scheduler", "tiles.begin(token / Traits::kTileTokens + (token > 0) + scheduler",
        ),
        (
            "window-unpacked", "narrow-window", "a window that begins in the residual has a KV tile, of a block that is not packed",
            "seen ? end : 0, length, block);", "end, length, block);",
        ),
    ),
    *_in(
        "mainloop/residual",
        (
            "half-run-values", "half-run", "V of the residual's half run is added to the channels before it",
            "const int row_tile = Traits::ValueRuns::tile(x);", "const int row_tile = 2 * x - half;",
        ),
        (
            "residual-causal", "queries", "in the residual a query sees the new tokens after it",
            "const int position = min(seqlen.position<Traits>(q_row<Traits>(tile, lane, i)), seqlen.length - 1);",
            "const int position = seqlen.length - 1;",
        ),
        (
            "residual-append", "last", "the first new token is not put into the residual",
            "if (row >= valid || token < residual.old) continue;", "if (row >= valid || token <= residual.old) continue;",
        ),
        (
            "residual-row", "last", "the residual's last token is read from among the new ones",
            "return token < old ? residual", "return token < old - 1 ? residual",
        ),
        (
            "residual-head", "last", "the second KV head attends to the first's residual",
            "residual_offset<Format>(head.sequence, head.head);", "residual_offset<Format>(head.sequence, head.head / 2 * 2);",
        ),
        (
            "residual-window", "window", "the sliding window does not hide tokens of the residual",
            "visible = visible && token >= Traits::Mask::first_token(position);", ";",
        ),
        (
            "residual-cap", "cap", "scores of the residual are not capped",
            "modify_scores<Traits>(seqlen, seqlen.packed_end + rows.first, tile, lane, x);", "",
        ),
    ),
    *_in(
        "mainloop/residual_loop",
        (
            "residual-second-round", "residual", "of a residual of more tiles than warps, some tiles are skipped",
            "tile.fetch(residual, residual_tile<Traits>(residual, place, round, warp), lane);",
            "tile.fetch(residual, residual_tile<Traits>(residual, place, round + 1, warp), lane);",
        ),
    ),
    *_in(
        "mainloop/mask",
        (
            "runs-position", "runs", "the rows of later runs take the positions of the first run's",
            "return length - q_len + Traits::head_row(run, row) / Traits::kGroup;", "return length - q_len + row / Traits::kGroup;",
        ),
        (
            "mask-token", "queries", "a query does not see itself where it is packed",
            "if (kCausal && token > position)", "if (kCausal && token >= position)",
        ),
        (
            "mask-clear", "queries", "packed tokens that some queries must not see are not masked",
            "int tokens = kCausal ? max(seqlen.length - seqlen.q_len + 1, 0) : seqlen.packed_end;",
            "int tokens = kCausal ? seqlen.length : seqlen.packed_end;",
        ),
        (
            "mask-missing", "gathered", "of a block that stands in for a missing one, the first token counts",
            "if (Traits::kGathered && token >= seqlen.packed_end)", "if (Traits::kGathered && token > seqlen.packed_end)",
        ),
        (
            "window-packed", "window", "the first packed token of a window is masked",
            "if (kWindowed && token < Mask::first_token(position))", "if (kWindowed && token <= Mask::first_token(position))",
        ),
        (
            "window-clear", "window", "a tile in which the window begins is not masked",
            "return ceil_div(Mask::first_token(seqlen.length - 1), Traits::kTileTokens);",
            "return Mask::first_token(seqlen.length - 1) / Traits::kTileTokens;",
        ),
    ),
    *_in(
        "mainloop/sliding_window",
        (
            "window-edge", "window", "a query sees one token before its window",
            "position < kTokens ? 0 : position - kTokens + 1;", "position < kTokens ? 0 : position - kTokens;",
        ),
    ),
    *_in(
        "mainloop/softcap",
        (
            "cap-limit", "cap", "capped scores are natural, where those in units of log2 are meant",
            "kLimit = Modifier::kCap * 1.4426950408889634f;", "kLimit = Modifier::kCap;",
        ),
        (
            "cap-exponent", "cap", "scores are capped as if the cap were twice as large",
            "kExponent = 2.f / Modifier::kCap,", "kExponent = 1.f / Modifier::kCap,",
        ),
    ),
    *_in(
        "mainloop/score_modifier",
        (
            "cap-offset", "cap", "K's zeros are added to capped scores again",
            "x.factor[m_tile][i] = 1.f, x.offset[m_tile][i] = 0.f;", "x.factor[m_tile][i] = 1.f;",
        ),
    ),
    *_in(
        "mainloop/softmax",
        (
            "rescale", "last", "what was summed up is not rescaled when the maximum moves",
            "state.rescale(factor);", "",
        ),
        (
            "rescale-zeros", "value-groups", "zeros of V's later channel groups are not rescaled when the maximum moves",
            "for (int q = 0; q < Traits::kValueGroups; ++q) affine[q][c] *= factor[c];", "affine[0][c] *= factor[c];",
        ),
        (
            "constant-values", "int2", "a constant group of V of 2 bits, whose scale is 0, lets weights grow without bound",
            "1.f / (1 << 23) / (1 << 23);", "0.f;",
        ),
        (
            "zeros-rows", "queries", "V's zeros of a row are summed with the rounded weights of the next",
            "i % 2 == 0 ? rounded.x : rounded.y;", "i % 2 == 1 ? rounded.x : rounded.y;",
        ),
        (
            "maximum-half", "queries", "the maximum that the running maximum moves to leaves out a lane's second row",
            "for (int half = 0; half < 2; ++half) {\n          float score",
            "for (int half = 0; half < 1; ++half) {\n          float score",
        ),
    ),
    *_in(
        "mainloop/group_sums",
        (
            "group-rescale", "value-channel", "sums of codes in V per channel are not rescaled when the maximum moves",
            "codes[u][c] *= factor[c], codes[u][2 + c] *= factor[c];", "codes[u][c] *= factor[c];",
        ),
        (
            "group-complement", "channel-groups", "V's complemented codes are taken for all of a group's codes",
            "ptx::mma(weights, kOnes, kOnes, kOnes, 0u,", "ptx::mma(weights, kOnes, kOnes, kOnes, kOnes,",
        ),
        (
            "half-run-fold", "half-run-boost", "with a half run every second row tile of a 2-bit V counts four or sixteen times",
            "Codec::row_factor((u + row / 2) % 2, row % 2)", "Codec::row_factor(row / 2, row % 2)",
        ),
        (
            "half-run-unmix", "half-run-boost", "with a half run the rows of a 2-bit V's bytes are not separated",
            "constexpr int kMixed = Codec::kMix == Mix::pair ? 2 : kPair;", "constexpr int kMixed = kPair;",
        ),
        (
            "group-params", "channel-groups", "every group of tokens in a KV tile takes the scales of V's first",
            "fold(params + token / Params::kTokens * Params::kSetBytes,", "fold(params,",
        ),
    ),
    *_in(
        "mainloop/traits",
        (
            "int2-mixed-groups", "channel-groups", "2-bit codes of K of two groups of tokens are not separated",
            "kSubtileKeyGroups == 1 || Key::Codec::kMix != Mix::pair;", "true;",
        ),
        (
            "repeated-tile", "split-groups", "KV tiles that repeat sets of params all take those of their block's first tile",
            "return (within * kTileTokens + nth * kTokens) / Quant::kGroup * kSetBytes;",
            "return nth * kTokens / Quant::kGroup * kSetBytes;",
        ),
    ),
    *_in(
        "mainloop/token_params",
        (
            "constant-scale", "value-groups", "zeros of a constant group of V are divided by its scale of 0",
            "if (scale[half] == 0.f) scale[half] = kScaleOfConstants;", "",
        ),
        (
            "zeros-complement", "last", "codes of V that are not complemented are taken for complemented ones",
            "half == 0 ? kTop : 0.f);", "kTop);",
        ),
        (
            "symmetric-zero", "symmetric", "the second row of every two takes the first's scale for the middle of its codes",
            "zero[m_tile][q][1] = -v.y * Quant::Codec::kOffset;", "zero[m_tile][q][1] = -v.x * Quant::Codec::kOffset;",
        ),
    ),
    *_in(
        "mainloop/keys",
        (
            "key-half", "channel-groups", "the second 16 tokens of a sub-tile take the K scales of the first",
            "query[rows % Traits::kSubtileKeyGroups][tile];", "query[0][tile];",
        ),
        (
            "key-last-group", "token", "products of later channel groups of K go to earlier ones",
            "products[tile][step / kStepsPerGroup][rows];", "products[tile][step / (kStepsPerGroup * 2)][rows];",
        ),
    ),
    *_in(
        "mainloop/values",
        (
            "value-group-weights", "value-groups", "V's channel groups from the second on are weighed with the first's scales",
            "weights[tile][s][rows / kTilesPerGroup][k_step];", "weights[tile][s][0][k_step];",
        ),
    ),
    *_in(
        "mainloop/traits",
        (
            "half-run-mixed", "half-run-groups", "sums of one group of V's channels are taken from those of another, whose weights differ",
            "!ValueRuns::kSplit || Value::Codec::kMix != Mix::pair;", "true;",
        ),
    ),
    *_in(
        "mainloop/integer_keys",
        (
            "integer-bytes", "integers", "products with the lower bytes of the query are left out",
            "static_cast<int>(a.x * 256 + b.x)", "static_cast<int>(a.x * 256)",
        ),
        (
            "integer-remainder", "integers", "a remainder of half a unit is rounded up to a byte that means the opposite",
            "most = both(lower ? exponent - (4 << 10) + 0x27f : 0x7bff);", "most = both(0x7bff);",
        ),
    ),
    *_in(
        "mainloop/packed_loop",
        (
            "integer-unit", "integers", "all groups of tokens in a softmax step take the unit of the first",
            "query.unit[s * Traits::kStepKeyGroups / kStepSubtiles][tile]", "query.unit[0][tile]",
        ),
        (
            "key-half-zero", "channel-groups", "K's zeros of the first and the second 16 tokens of a sub-tile are swapped",
            "m_tile) ? second : first;", "m_tile) ? first : second;",
        ),
        (
            "key-group-sum", "token", "K's zeros of later channel groups multiply the query's sum over the first",
            "shared.query_sums[q * Traits::kQTiles * 8 + row] *", "shared.query_sums[row] *",
        ),
    ),
    *_in(
        "codec/integers",
        (
            "int2-unmix", "int2", "the top field of 2-bit codes keeps one of the lower ones",
            "if constexpr (kMix == Mix::pair) high[2 + c] -= low[c] + low[2 + c] + high[c];",
            "if constexpr (kMix == Mix::pair) high[2 + c] -= low[c] + high[c];",
        ),
    ),
    *_in(
        "mainloop/boost",
        (
            "boost-scale", "boost", "the upper bits of boosted channels weigh as much as the lower ones",
            "__float2half2_rn(4.f)", "__float2half2_rn(1.f)",
        ),
        (
            "boost-error", "boost", "columns for the rounding error of q take boosted channels whole",
            "lane < 16 ? 0u : 0xbc00bc00u", "0u",
        ),
        (
            "boost-round", "boost", "boosted channels from the 33rd on take the query of those 32 before",
            "channels(step / 2, from), b = channels(step / 2, from + 1)", "channels(0, from), b = channels(0, from + 1)",
        ),
        (
            "boost-index", "boost", "every second boosted channel takes the query of the one before",
            "b = channels(step / 2, from + 1)", "b = channels(step / 2, from)",
        ),
    ),
    *_in(
        "pipeline/pipeline",
        (
            "boost-group", "boost", "all groups of tokens have the first one's boost index",
            "key_offset / Traits::KeyChannelParams::kBytes * Traits::Format::kBoosted;", "0;",
        ),
    ),
    *_in(
        "mainloop/query",
        (
            "runs-query", "runs", "every run of rows attends with the rows of the first",
            "head_row = Traits::head_row(head.run, at)", "head_row = at",
        ),
        (
            "query-far-sequence", "batch", "sequences from the 129th on attend with the query of the 128th",
            "args.q.row<const Element>(head.sequence, query,", "args.q.row<const Element>(min(head.sequence, 127), query,",
        ),
        (
            "half-run-boost-rows", "half-run-boost", "boosted channels of the half run take the query of a row twice as far behind",
            "return at + offset - row * 32;", "return at + offset;",
        ),
        (
            "half-run-boost-first", "half-run-boost", "the half run's first channel, if boosted, takes the query of another row",
            "offset < Traits::KeyRuns::kFull * 512)", "offset <= Traits::KeyRuns::kFull * 512)",
        ),
    ),
    *_in(
        "pipeline/ring",
        (
            "ring-wait", "last", "a stage is read one commit group before it has arrived",
            "case 0: ptx::copy_wait<kOthers>(); break;", "case 0: ptx::copy_wait<kOthers + 1>(); break;",
        ),
        (
            "bulk-parity", "bulk", "from the second round of the ring on, no warp waits for bulk copies",
            "void next_round() { parity ^= 1; }", "void next_round() {}",
        ),
        (
            "bulk-bytes", "bulk-tile", "the barrier of a bulk copy expects fewer bytes than come",
            "ptx::barrier_expect(barrier, kBytes + key + value + index);", "ptx::barrier_expect(barrier, kBytes);",
        ),
        (
            "repeated-value", "split-groups", "V's params of a KV tile that repeats them are those of the block's first tile",
            "tile.value_params, stage, value_place<Traits>(tile));", "tile.value_params, stage, 0);",
        ),
    ),
    *_in(
        "pipeline/ring",
        (
            "repeated-set", "split-groups", "16 tokens that begin a group in the middle of a sub-tile take the params of the group before",
            "return Params::repeated(within, stage / kStages * kSets + nth);", "return Params::repeated(within, stage / kStages * kSets);",
        ),
    ),
    *_in(
        "pipeline/pipeline",
        (
            "key-group", "key-groups", "the second group of K's scales in a block is taken from the first",
            "key_offset = Traits::KeyChannelParams::offset(within);", "key_offset = Traits::KeyChannelParams::offset(within / 2);",
        ),
        (
            "value-channel-group", "channel-groups", "V's channel params of a block's second KV tile are those of the first",
            "Traits::ValueChannelParams::offset(within),", "Traits::ValueChannelParams::offset(within / 2),",
        ),
        (
            "page-prefetch", "paged", "KV tiles take the prefetched page of the one before them",
            "entries[(round + Traits::kTilesInFlight) % kTiles * kEntries",
            "entries[(round + Traits::kTilesInFlight - 1) % kTiles * kEntries",
        ),
        (
            "page-block", "paged", "every KV tile is read from its page's first block",
            "block %= Traits::Format::kPageBlocks;", "block = 0;",
        ),
        (
            "page-far-sequence", "paged", "sequences from the ninth on read the pages of the eighth",
            "pages = args.cache.block_table + static_cast<int64_t>(head.sequence) * args.cache.table_stride;",
            "pages = args.cache.block_table + static_cast<int64_t>(min(head.sequence, 7)) * args.cache.table_stride;",
        ),
        (
            "gathered-missing", "gathered", "missing blocks of a last tile are read from where no page is",
            "const int block = min(tile * Traits::kTileBlocks + which, Traits::Format::ResidualRows::packed_blocks(length) - 1);",
            "const int block = tile * Traits::kTileBlocks + which;",
        ),
        (
            "gathered-window", "gathered-window", "blocks of a first tile that the window has passed are read, whose pages may be missing",
            "return Traits::Mask::kWindow > 0 ? max(block, first_block) : block;", "return block;",
        ),
        (
            "tiles-far", "last", "packed tokens from the 19,201st on are read 32 tokens early",
            "const int within = tile % Traits::kTilesPerBlock, key_offset",
            "if (tile >= 600) base -= Traits::kTileBytes;\n    const int within = tile % Traits::kTilesPerBlock, key_offset",
        ),
    ),
    *_in(
        "epilogue/store",
        (
            "learned-sink-split", "unquantized", "every split of a head adds the learned sink to its denominator",
            "int tile_row, int channel, int stride, const auto& sum) {",
            """int tile_row, int channel, int stride, auto sum) {
    if constexpr (Sinks::kActive)
      if (slots.count > 1) {
        const float factor = Sinks::join(sink, sum.stats);
        for (float& value : sum.value) value *= factor;
      }""",
        ),
    ),
    *_in(
        "epilogue/learned_sinks",
        (
            "learned-sink-head", "unquantized", "every query head has the learned sink of the first",
            "return args.sinks[head.head * Traits::kGroup + Traits::head_row(head.run, row) % Traits::kGroup]", "return args.sinks[0]",
        ),
        (
            "learned-sink-base", "unquantized", "learned sinks are taken for logarithms to base 2",
            "% Traits::kGroup] * 1.4426950408889634f", "% Traits::kGroup]",
        ),
        (
            "learned-sink-scale", "unquantized", "what a row saw is not rescaled where its learned sink is larger than every score",
            "const float factor = ptx::exp2(fminf(stats.row_max - row_max, 0.f));", "const float factor = 1.f;",
        ),
    ),
    *_in(
        "mainloop/residual",
        (
            "sink-last", "unquantized", "the last token of the sink is not attended",
            "min(ResidualRows::kSink - ResidualRows::first(length), count())",
            "min(ResidualRows::kSink - 1 - ResidualRows::first(length), count())",
        ),
        (
            "local-flush", "unquantized", "a step packs the newest tokens, too, which are to stay as they are",
            "count() >= ResidualRows::kBlock + ResidualRows::kLocal;", "count() >= ResidualRows::kBlock;",
        ),
    ),
    *_in(
        "mainloop/residual_loop",
        (
            "rollback-rows", "unquantized", "a step that packs a block does not keep its own tokens, although a crop may unpack them",
            "(Traits::Format::ResidualRows::kRollback > 0 || !residual.fills_block())", "!residual.fills_block()",
        ),
    ),
)  # fmt: skip
