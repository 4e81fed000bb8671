"""Faults of the CUDA kernel: attention, splits, the way to the output, append."""

from __future__ import annotations

from tests.mutants.fault import Fault

HEADERS = "templates/cuda/include/kvgen"


def _in(header: str, *faults: tuple[str, ...]) -> tuple[Fault, ...]:
    """(name, case, what it breaks, find, replace[, nth]) of one header."""
    return tuple(
        Fault(name, f"{HEADERS}/{header}.cuh", case, breaks, find, replace, int(rest[0]) if rest else 0)
        for name, case, breaks, find, replace, *rest in faults
    )


FAULTS: tuple[Fault, ...] = (
    *_in(
        "merge",
        (
            "warps-sum", "last", "warps' sums of weights are added without bringing them to one maximum",
            "merged.total.sum += factor * part.sum;", "merged.total.sum += part.sum;",
        ),
        (
            "splits-last", "last", "of more than eight splits the last weighs nothing",
            "const float factor = base + i < count ? ptx::exp2(totals[i].reference - reference) : 0.f;",
            "const float factor = base + i < count - (count > 8) ? ptx::exp2(totals[i].reference - reference) : 0.f;",
        ),
        (
            "splits-rescale", "last", "what earlier batches of splits gave is not rescaled when a later one has a larger maximum",
            "for (int j = 0; j < kWide; ++j) value[j] *= kept;", "for (int j = 0; j < kWide; ++j) value[j] *= 1.f;",
        ),
        (
            "splits-counter", "last", "the counter of arrived splits is not reset: the second call differs",
            "if (last) *counter = 0;", "",
        ),
        (
            "splits-counter-batch", "paged", "sequences eight apart share a counter of arrived splits",
            "return work.counters + head.batch * args.cache.kv_heads + head.head;",
            "return work.counters + head.batch % 8 * args.cache.kv_heads + head.head;",
        ),
        (
            "splits-stride", "queries", "partial results of the second column tile lie over the next split's",
            "return sums + (static_cast<int64_t>(slot) * Traits::kQRows + column) * Traits::kHeadDim;",
            "return sums + (static_cast<int64_t>(slot) * Traits::kTileQRows + column) * Traits::kHeadDim;",
        ),
        (
            "two-level-totals", "two-level", "the second of two levels takes the sums of each group's first split for the group's",
            "each_sum(width > 1 ? 1 : 0, groups, slot,", "each_sum(0, groups, slot,",
        ),
        (
            "two-level-last-group", "two-level", "a last group of fewer splits is left out",
            "return {ceil_div(slots.count, width), width};", "return {slots.count / width, width};",
        ),
        (
            "two-level-members", "two-level", "the last group of splits waits for as many as the others have",
            "members = min(width, slots.count - group * width);", "members = width;",
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
            "value-group-zero", "value-groups", "later channel groups of V take the zeros of the first",
            "state.affine[u * Traits::kValueGroups / Traits::kRowTiles][c];", "state.affine[0][c];",
        ),
        (
            "cluster-last", "cluster", "the last CTA of a cluster is not added up",
            "for (int i = 0; i < kCluster; ++i) {\n        const float factor",
            "for (int i = 0; i < kCluster - 1; ++i) {\n        const float factor",
        ),
        (
            "cluster-totals", "cluster", "the last CTA of a cluster is not sent the sums that it waits for: it hangs",
            "if (channel < kCluster) send(", "if (channel < kCluster - 1) send(",
        ),
        (
            "lse-empty", "last", "the LSE of a query that sees nothing is finite",
            "total.sum == 0.f ? -INFINITY :", "total.sum == 0.f ? -1e30f :",
        ),
    ),
    *_in(
        "finish",
        (
            "flush-rest", "queries", "of the new tokens behind a packed block only the first is kept",
            "tail.store(Format::kTokens, tail.count(), 0);", "tail.store(Format::kTokens, min(tail.count(), Format::kTokens + 1), 0);",
        ),
        (
            "advance-far-sequence", "batch", "`decode` does not advance the lengths of sequences from the 129th on",
            "for (int i = lane; i < args.cache.batch; i += 32) args.cache.lengths[i]",
            "for (int i = lane; i < min(args.cache.batch, 128); i += 32) args.cache.lengths[i]",
        ),
        (
            "advance-counter", "last", "the counter of CTAs that read the lengths is not reset: the second `decode` advances none",
            "if (lane == 0) *work.lengths_read = 0;", "",
        ),
        (
            "advance-idle", "parts", "CTAs without work are not counted among those that read the lengths",
            "if constexpr (!kAppend) return;\n  __syncthreads();", "return;\n  __syncthreads();",
        ),
        (
            "flush-block", "paged", "a residual that became full is packed one block too early in its page",
            "length / Format::kTokens, Format::kBlockBytes);\n  __syncthreads();",
            "length / Format::kTokens - length / Format::kTokens % 2, Format::kBlockBytes);\n  __syncthreads();",
        ),
    ),
    *_in(
        "part",
        (
            "parts-batch", "parts-batch", "where sequences are cut by length, parts of every 32nd are not counted for those that follow",
            "before += __shfl_sync(~0u, upto, 31);", "before += __shfl_sync(~0u, upto, 30);",
        ),
        (
            "parts-many", "parts", "sequences are cut in more parts than there are CTAs",
            "if (__reduce_add_sync(~0u, needed[i]) <= slots) best", "if (__reduce_add_sync(~0u, needed[i]) <= slots + slots / 8) best",
        ),
        (
            "lengths-table", "batch", "the 129th sequence takes its length from the next warp's table",
            "return batch < kRounds * 32 ? copied[batch]", "return batch <= kRounds * 32 ? copied[batch]",
        ),
        (
            "lengths-copied", "batch", "lengths of the last 32 sequences that fit a warp's table are not copied",
            "for (int at = lane; at < kRounds * 32; at += 32)\n      if (at < cache.batch) ptx::copy_async",
            "for (int at = lane; at < (kRounds - 1) * 32; at += 32)\n      if (at < cache.batch) ptx::copy_async",
        ),
        (
            "stale-lengths", "shares", "what was worked out on lengths of before the launch's turn is used although they changed",
            "return __any_sync(~0u, others);", "return !knows_all();",
        ),
        (
            "lengths-clamp", "shares-batch", "lengths beyond the 128th are read before the launch's turn, and kept",
            "bool others = !knows_all();", "bool others = false;",
        ),
    ),
    *_in(
        "share",
        (
            "share-empty", "shares", "a head without packed tokens has no place in the row of work",
            "last = first + max(units, 1) - 1;", "last = first + units - 1;",
        ),
        (
            "share-places", "shares", "partial results of neighbouring heads lie over each other",
            "first_slot + number,", "first_slot,",
        ),
        (
            "share-batch", "shares-batch", "heads of the first 32 sequences count once for those that follow",
            "before += __shfl_sync(~0u, upto, 31) * kv_heads,", "before += __shfl_sync(~0u, upto, 31),",
        ),
        (
            "share-end", "shares", "a piece that another CTA goes on with ends one unit early",
            "min(to() - first, units),", "to() - first < units ? to() - first - 1 : units,",
        ),
    ),
    *_in(
        "attend_shares",
        (
            "share-flush", "shares", "a residual that became full is not packed where several CTAs have the head",
            "(piece.count == 1 || shared.flags[i > 0])", "piece.count == 1",
        ),
        (
            "share-arrival", "shares", "a CTA with one piece arrives twice at its head",
            "shared.flags[i] = i < count && end(i)", "shared.flags[i] = end(i)",
        ),
        (
            "share-sight", "shares", "the second and later pieces of a CTA begin at the first's first unit",
            "attend_packed<Traits>(shared, walk, piece.first_unit<Traits>(warp), piece.end,",
            "attend_packed<Traits>(shared, walk, progress.first.template first_unit<Traits>(warp), piece.end,",
        ),
    ),
    *_in(
        "attend_part",
        (
            "flush-boundary", "last", "a residual that is exactly full is not packed",
            "completed && whole.count() >= kTokens)", "completed && whole.count() > kTokens)",
        ),
        (
            "stale-first-stage", "parts", "the first stage that was fetched on the guess of equal lengths is used where they are not",
            "walk.early = 0;", "walk.early = walk.early;",
        ),
        (
            "sight-decode", "queries", "`decode` hides packed tokens from its queries, as if the new ones were among them",
            "const Sight<Traits> sight{length + tail.fresh,", "const Sight<Traits> sight{length,",
        ),
    ),
    *_in(
        "tail",
        (
            "tail-causal", "queries", "in the residual a query sees the new tokens after it",
            "const int last = min(count - 1, count - q_len + column / Traits::kGroup);", "const int last = count - 1;",
        ),
        (
            "tail-append", "last", "the first new token is not put into the residual",
            "if (row >= valid || token < tail.old) continue;", "if (row >= valid || token <= tail.old) continue;",
        ),
        (
            "tail-row", "last", "the residual's last token is read from among the new ones",
            "return token < old ? residual", "return token < old - 1 ? residual",
        ),
        (
            "tail-head", "last", "the second KV head attends to the first's residual",
            "at = (static_cast<int64_t>(batch) * args.cache.kv_heads + head) * Format::kTokens",
            "at = (static_cast<int64_t>(batch) * args.cache.kv_heads + head / 2 * 2) * Format::kTokens",
        ),
    ),
    *_in(
        "tail_tiles",
        (
            "tail-second-turn", "tail", "of a residual of more tiles than warps, some tiles are skipped",
            "tile.fetch(tail, residual_tile<Traits>(place, turn, warp), lane);",
            "tile.fetch(tail, residual_tile<Traits>(place, turn + 1, warp), lane);",
        ),
    ),
    *_in(
        "span",
        (
            "sight-token", "queries", "a query does not see itself where it is packed",
            "token > length - q_len + column / Traits::kGroup)", "token >= length - q_len + column / Traits::kGroup)",
        ),
        (
            "sight-clear", "queries", "packed tokens that some queries must not see are not masked",
            "int tokens = Traits::kMaxQLen > 1 ? max(length - q_len + 1, 0) : kept;", "int tokens = Traits::kMaxQLen > 1 ? length : kept;",
        ),
        (
            "sight-kept", "gathered", "of a block that stands in for a missing one, the first token counts",
            "if (Traits::kGathered && token >= kept)", "if (Traits::kGathered && token > kept)",
        ),
    ),
    *_in(
        "softmax",
        (
            "rescale", "last", "what was summed up is not rescaled when the maximum moves",
            "state.rescale(factor);", "",
        ),
        (
            "rescale-zeros", "value-groups", "zeros of V's later channel groups are not rescaled when the maximum moves",
            "for (int q = 0; q < Traits::kValueGroups; ++q) affine[q][c] *= factor[c];", "affine[0][c] *= factor[c];",
        ),
        (
            "constant-values", "value-groups", "a constant group of V, whose scale is 0, lets weights grow without bound",
            "1.f / (1 << 23) / (1 << 23);", "0.f;",
        ),
        (
            "maximum-half", "queries", "the maximum that the reference moves to leaves out a lane's second row",
            "for (int half = 0; half < 2; ++half) {\n          float scale",
            "for (int half = 0; half < 1; ++half) {\n          float scale",
        ),
    ),
    *_in(
        "subtile",
        (
            "symmetric-zero", "symmetric", "the second row of every two takes the first's scale for the middle of its codes",
            "zero[part][q][1] = -v.y * Quant::kOffset;", "zero[part][q][1] = -v.x * Quant::kOffset;",
        ),
        (
            "key-last-group", "token", "products of later channel groups of K go to earlier ones",
            "products[tile][step / kStepsPerGroup][rows];", "products[tile][step / (kStepsPerGroup * 2)][rows];",
        ),
        (
            "value-group-weights", "value-groups", "V's channel groups from the second on are weighed with the first's scales",
            "weights[tile][s][rows / kTilesPerGroup][part];", "weights[tile][s][0][part];",
        ),
    ),
    *_in(
        "span",
        (
            "key-group-sum", "token", "K's zeros of later channel groups multiply the query's sum over the first",
            "shared.query_sums[q * Traits::kQTiles * 8 + column] *", "shared.query_sums[column] *",
        ),
    ),
    *_in(
        "fragments",
        (
            "int2-unmix", "int2", "the top field of 2-bit codes keeps one of the lower ones",
            "if constexpr (kBits == 2) high[2 + c] -= low[c] + low[2 + c] + high[c];",
            "if constexpr (kBits == 2) high[2 + c] -= low[c] + high[c];",
        ),
    ),
    *_in(
        "query",
        (
            "query-far-sequence", "batch", "sequences from the 129th on attend with the query of the 128th",
            "args.q.row<const Element>(head.batch, query,", "args.q.row<const Element>(min(head.batch, 127), query,",
        ),
    ),
    *_in(
        "ring",
        (
            "ring-wait", "last", "a stage is read one commit group before it has arrived",
            "case 0: ptx::copy_wait<kOthers>(); break;", "case 0: ptx::copy_wait<kOthers + 1>(); break;",
        ),
        (
            "bulk-parity", "bulk", "from the second round of the ring on, nobody waits for bulk copies",
            "void next_round() { parity ^= 1; }", "void next_round() {}",
        ),
        (
            "bulk-bytes", "bulk-unit", "the barrier of a bulk copy expects fewer bytes than come",
            "ptx::barrier_expect(barrier, count * kBytes + params);", "ptx::barrier_expect(barrier, count * kBytes);",
        ),
    ),
    *_in(
        "walk",
        (
            "key-group", "key-groups", "the second group of K's scales in a block is taken from the first",
            "within * Traits::kTileTokens / Traits::Key::kGroup : 0;", "within * Traits::kTileTokens / (2 * Traits::Key::kGroup) : 0;",
        ),
        (
            "page-queue", "paged", "units take the page of the one before them from the queue",
            "words[(turn + Traits::kTilesInFlight) % kUnits * kEntries", "words[(turn + Traits::kTilesInFlight - 1) % kUnits * kEntries",
        ),
        (
            "page-block", "paged", "every unit is read from its page's first block",
            "block %= Traits::kPageBlocks;", "block = 0;",
        ),
        (
            "page-far-sequence", "paged", "sequences from the ninth on read the pages of the eighth",
            "pages = args.cache.block_table + static_cast<int64_t>(batch) * args.cache.table_stride;",
            "pages = args.cache.block_table + static_cast<int64_t>(min(batch, 7)) * args.cache.table_stride;",
        ),
        (
            "gathered-missing", "gathered", "missing blocks of a last unit are read from where no page is",
            "return min(unit * Traits::kTileBlocks + which, length / Traits::Format::kTokens - 1);",
            "return unit * Traits::kTileBlocks + which;",
        ),
        (
            "units-far", "last", "packed tokens from the 19,201st on are read 32 tokens early",
            "const int within = unit % Traits::kTilesPerBlock,\n              group",
            "if (unit >= 600) base -= Traits::kTileBytes;\n    const int within = unit % Traits::kTilesPerBlock,\n              group",
        ),
    ),
)  # fmt: skip
