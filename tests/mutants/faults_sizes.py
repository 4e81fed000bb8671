"""Faults that show only at sizes beyond those of small caches, and faults of inputs that hold a NaN."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.faults_cpu import COMMON, _in
from tests.mutants.faults_cuda import _in as _in_cuda

CPU: tuple[Fault, ...] = (
    *_in(
        "append",
        (
            "size-prefill-40", "int8", "K of blocks from the 41st of a prefill is packed from the first's tokens",
            ": fresh(k_, first + t);", ": fresh(k_, i < 40 ? first + t : length_ + t);",
        ),
        (
            "size-prefill-64", "paged", "blocks from the 65th of a prefill are packed over the one before them",
            "cache_.block(batch_, head_, index)", "cache_.block(batch_, head_, i < 64 ? index : index - 1)",
        ),
        (
            "size-prefill-128", "token", "V of blocks from the 129th of a prefill is that of 128 blocks earlier",
            ": fresh(v_, first + t);", ": fresh(v_, i < 128 ? first + t : first + t - 128 * C::kTokens);",
        ),
        (
            "size-prefill-20000", "wide-block", "K of a prompt's tokens from the 20,001st on is that of 16,384 tokens earlier",
            ": fresh(k_, first + t);", ": fresh(k_, first + t < 20000 ? first + t : first + t - 16384);",
        ),
        (
            "size-append-130", "int8", "new tokens of sequences from the 131st on are those of the 130th",
            "row_of<Element>(view, batch_, position - length_, head_)",
            "row_of<Element>(view, batch_ < 130 ? batch_ : 129, position - length_, head_)",
        ),
        (
            "size-rollback-block", "rollback-far", "of tokens that a crop may unpack, as many are kept as go beyond whole blocks",
            "after_ - Residual::kRollback : 0", "after_ - Residual::kRollback % C::kTokens : 0",
        ),
        (
            "size-rollback-rest", "unquantized", "where two or more tokens follow a packed block, a crop finds none of the block's",
            "after_ > Residual::kRollback ? after_ - Residual::kRollback : 0",
            "after_ > Residual::kUnpacked + C::kTokens && (after_ - Residual::kUnpacked) % C::kTokens > 1 ? after_ : 0",
        ),
    ),
    *_in(
        "attend",
        (
            "size-sequences-20", "int8", "sequences from the 21st on attend with the query of the 20th",
            "row_of<Element>(call_.q, head.b, token, q_head)", "row_of<Element>(call_.q, head.b < 20 ? head.b : 19, token, q_head)",
        ),
        (
            "size-sequences-24", "paged", "sequences take the length of one of the first 24",
            "step_.shape.plan.packed(step_.lengths[head.b]);", "step_.shape.plan.packed(step_.lengths[head.b % 24]);",
        ),
        (
            "size-sequences-1024", "narrow", "new V of sequences from the 1,025th on is that of 1,024 sequences earlier",
            "row_of<Element>(call_.v_new, b, at - length, head.kv_head)",
            "row_of<Element>(call_.v_new, b % 1024, at - length, head.kv_head)",
        ),
        (
            "size-output-1100", "int8", "outputs of sequences from the 1,101st on are written to the 1,100th",
            "row_of<Element>(call_.out, head.b, token, q_head);",
            "row_of<Element>(call_.out, head.b < 1100 ? head.b : 1099, token, q_head);",
        ),
        (
            "size-tokens-65536", "value-channel", "packed tokens from the 65,537th on are not attended",
            "step_.shape.plan.packed(step_.lengths[head.b]);",
            "std::min<int64_t>(step_.shape.plan.packed(step_.lengths[head.b]), 65536);",
        ),
        (
            "size-unequal", "int8", "a sequence counts as at most 10,000 tokens shorter than the longest",
            "step_.shape.plan.packed(step_.lengths[head.b]);",
            "step_.shape.plan.packed(std::max<int>(step_.lengths[head.b], call_.max_len - 10000));",
        ),
        (
            "size-window-begin", "window-far", "the first token that a query sees is a number of 16 bits",
            "CacheView<C>::first_visible(before + token);", "CacheView<C>::first_visible(before + token) & 0xffff;",
        ),
        (
            "size-empty-query", "int8", "of an empty sequence, queries from the second on leave their output as it was",
            "const float inverse = row_sum == 0", "if (row_sum == 0 && token > 0) return;\n    const float inverse = row_sum == 0",
        ),
        (
            "size-empty-1024", "int8", "of a plan's empty sequences, those from the 1,025th on are not written",
            "void zero(int64_t b) const {", "void zero(int64_t b) const {\n    if (b >= 1024) return;",
        ),
        (
            "size-nan-query", "int8", "a NaN in q counts as zero",
            "store(state.q[r] + c, load_floats<Element>(q + c) * factor);",
            "{\n const F32 x = load_floats<Element>(q + c) * factor;\n store(state.q[r] + c, select(x == x, x, F32{}));\n }",
        ),
        (
            "size-nan-output", "int8", "a NaN in the output becomes zero",
            "store_floats<Element>(out + c, load<F32>(acc + c) * inverse);",
            "{\n      const F32 x = load<F32>(acc + c) * inverse;\n      store_floats<Element>(out + c, select(x == x, x, F32{}));\n    }",
        ),
    ),
    *_in(
        "rows",
        (
            "size-nan-weight", "token", "a weight that is NaN counts as none",
            "const F32 p = exp2(load<F32>(score + i) - shift);",
            "const F32 weight = exp2(load<F32>(score + i) - shift), p = select(weight == weight, weight, F32{});",
        ),
        (
            "size-nan-spreads", "int8", "a NaN in the first row's sum reaches the other rows of its group",
            "row_sum[first + m] += sum(total);", "row_sum[first + m] += sum(total) + 0 * row_sum[first];",
        ),
    ),
    *_in(
        "cache",
        (
            "size-page-16", "paged", "page numbers are stored in 16 bits",
            "return cache.block_table.template as<int32_t>()[batch * cache.block_table.stride[0] + index];",
            "return cache.block_table.template as<int32_t>()[batch * cache.block_table.stride[0] + index] & 0xffff;",
        ),
        (
            "size-page-signed", "paged", "page numbers are stored in 16 bits with a sign, and the check reads others",
            "outer = page(batch, index / C::kPageBlocks);", "outer = static_cast<int16_t>(page(batch, index / C::kPageBlocks));",
        ),
        (
            "size-offset-int", "int8", "offsets of blocks in bytes are int32",
            "((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes;",
            "static_cast<int32_t>(((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes);",
        ),
        (
            "size-offset-unsigned", "heads", "offsets of blocks in bytes are uint32",
            "((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes;",
            "static_cast<uint32_t>(((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes);",
        ),
        (
            "size-offset-paged", "paged", "offsets of pages in bytes are uint32",
            "((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes;",
            "static_cast<uint32_t>(((outer * C::kv_heads + head) * per + inner) * C::kBlockBytes);",
        ),
        (
            "size-residual-64", "int8", "sequences 64 apart share residual rows",
            "((batch * C::kv_heads + head) * Residual::kRows + row)", "((batch % 64 * C::kv_heads + head) * Residual::kRows + row)",
        ),
        (
            "size-window-16", "window-far", "a window of more than 32,767 tokens is one of 32,767",
            "position >= C::window ? position - C::window + 1 : 0;",
            "position >= C::window ? position - (C::window < 32767 ? C::window : 32767) + 1 : 0;",
        ),
    ),
    *_in(
        "step",
        (
            "size-length-16", "group5", "the length of a step is a number of 16 bits",
            "lengths[tile.sequence] = tile.length,", "lengths[tile.sequence] = tile.length & 0xffff,",
        ),
    ),
    *_in(
        "module",
        (
            "size-unpack-64", "int8", "blocks from the 65th on are not unpacked",
            "if (index < full && cache.holds(b, index))", "if (index < full && index < 64 && cache.holds(b, index))",
        ),
        (
            "size-unpack-1100", "int8", "sequences from the 1,101st on are not unpacked",
            "length = cache.length(b), full = Residual::packed_blocks(cache.length(b));",
            "length = b < 1100 ? cache.length(b) : 0, full = Residual::packed_blocks(length);",
        ),
        (
            "size-advance-1100", "int8", "`decode` does not advance the lengths of sequences from the 1,101st on",
            "for (int64_t b = 0; b < batch; ++b) cache.length(b) += step.appended[b];",
            "for (int64_t b = 0; b < (batch < 1100 ? batch : 1100); ++b) cache.length(b) += step.appended[b];",
        ),
        (
            "size-prefill-lengths", "int8", "a prefill does not advance the lengths of sequences from the 131st on",
            "call.advance && b < call.cache.batch; ++b)", "call.advance && b < (call.cache.batch < 130 ? call.cache.batch : 130); ++b)",
        ),
    ),
    *_in(
        "lengths",
        (
            "size-crop-1024", "unquantized", "a crop leaves the lengths of sequences from the 1,025th on as they are",
            "lengths[b] -= static_cast<int32_t>(fewer(b));", "if (b < 1024) lengths[b] -= static_cast<int32_t>(fewer(b));",
        ),
    ),
)  # fmt: skip

CUDA: tuple[Fault, ...] = (
    *_in_cuda(
        "pack/pack",
        (
            "size-prefill-40", "sizes", "K of blocks from the 41st of a prefill is packed from the second's tokens",
            "fresh(args.k, block * kTokens);", "fresh(args.k, (nth < 40 ? block : block - nth + 1) * kTokens);",
        ),
        (
            "size-prefill-64", "sizes", "blocks from the 65th of a prefill are packed over the one before them",
            "cache.block<Format>(sequence, head, block), smem);",
            "cache.block<kPaged, kPlaces>(sequence, head, nth < 64 ? block : block - 1, Format::kBlockBytes), smem);",
        ),
        (
            "size-prefill-128", "sizes", "V of blocks from the 129th of a prefill is that of the block before them",
            "fresh(args.v, block * kTokens);", "fresh(args.v, (nth < 128 ? block : block - 1) * kTokens);",
        ),
    ),
    *_in_cuda(
        "pack/append_rows",
        (
            "size-rollback-block", "sizes-rollback", "of tokens that a crop may unpack, as many are kept as go beyond whole blocks",
            "max(lengths.after - ResidualRows::kRollback, 0)", "max(lengths.after - ResidualRows::kRollback % ResidualRows::kBlock, 0)",
        ),
    ),
    *_in_cuda(
        "pack/unpack",
        (
            "size-unpack-64", "sizes", "blocks from the 65th on are not unpacked",
            "if (tokens <= 0) return;", "if (tokens <= 0 || block >= 64) return;",
        ),
        (
            "size-unpack-1100", "sizes-batch", "sequences from the 1,101st on are not unpacked",
            "if (tokens <= 0) return;", "if (tokens <= 0 || sequence >= 1100) return;",
        ),
    ),
    *_in_cuda(
        "host/args",
        (
            "size-residual-64", "sizes-batch", "sequences 64 apart share residual rows",
            "(static_cast<int64_t>(batch) * kv_heads + head)", "(static_cast<int64_t>(batch % 64) * kv_heads + head)",
        ),
        (
            "size-append-130", "sizes-batch", "rows of tensors of sequences from the 131st on are those of the 130th",
            "batch * batch_stride", "(batch < 130 ? batch : 129) * batch_stride",
        ),
        (
            "size-page-16", "sizes-paged", "packing and unpacking take page numbers for 16 bits",
            "return block_table[static_cast<int64_t>(batch) * table_stride + block / page_blocks];",
            "return block_table[static_cast<int64_t>(batch) * table_stride + block / page_blocks] & 0xffff;",
        ),
        (
            "size-offset-unsigned", "sizes-far", "packing and unpacking take offsets of sequences in bytes for uint32",
            "packed + outer * outer_stride_bytes", "packed + static_cast<uint32_t>(outer * outer_stride_bytes)",
        ),
    ),
    *_in_cuda(
        "pipeline/pipeline",
        (
            "size-tile-page-16", "sizes-paged", "attention takes page numbers for 16 bits",
            "base += page * args.cache.outer_stride_bytes,", "base += (page & 0xffff) * args.cache.outer_stride_bytes,",
        ),
        (
            "size-tile-offset", "sizes-far", "attention takes offsets of sequences in bytes for int32",
            "start += head.sequence * args.cache.outer_stride_bytes;",
            "start += static_cast<int>(head.sequence * args.cache.outer_stride_bytes);",
        ),
    ),
    *_in_cuda(
        "mainloop/attend_static",
        (
            "size-tokens-65536", "sizes", "packed tokens from the 65,537th on are not attended by the static scheduler",
            "const int end = Traits::packed_tiles(length);",
            "const int end = min(Traits::packed_tiles(length), 65536 / Traits::kTileTokens);",
        ),
    ),
    *_in_cuda(
        "mainloop/sliding_window",
        (
            "size-window-16", "sizes-window", "a window of more than 32,767 tokens is one of 32,767",
            "position < kTokens ? 0 : position - kTokens + 1;",
            "position < kTokens ? 0 : position - (kTokens < 32767 ? kTokens : 32767) + 1;",
        ),
    ),
    *_in_cuda(
        "mainloop/query",
        (
            "size-query-1100", "sizes-batch", "sequences from the 1,101st on attend with the query of the 1,100th",
            "args.q.row<const Element>(head.sequence, query,", "args.q.row<const Element>(min(head.sequence, 1099), query,",
        ),
    ),
    *_in_cuda(
        "epilogue/output",
        (
            "size-empty-1024", "sizes-batch", "of a plan's empty sequences, those from the 1,025th on are not written",
            "constexpr int kWide = 16 / sizeof(Element), kVectors = Traits::kHeadDim / kWide;",
            "constexpr int kWide = 16 / sizeof(Element), kVectors = Traits::kHeadDim / kWide;\n  if (sequence >= 1024) return;",
        ),
        (
            "size-nan-output", "sizes-far", "a NaN in the output becomes zero",
            "static_cast<Element>(value[i] * inverse);",
            "static_cast<Element>(value[i] * inverse == value[i] * inverse ? value[i] * inverse : 0.f);",
        ),
    ),
    *(
        Fault(
            "size-plan-length", f"{COMMON}/schedule/plan.hpp", "planned", "the length in a work tile is a number of 16 bits",
            "tile.head = head, tile.length = length;", "tile.head = head, tile.length = length & 0xffff;",
        ),
        Fault(
            "size-plan-tile", f"{COMMON}/schedule/plan.hpp", "planned", "the first KV tile of a work tile is a number of 10 bits",
            "tile.first = skipped + (from > 0 ? from : 0),", "tile.first = (skipped + (from > 0 ? from : 0)) & 1023,",
        ),
    ),
)  # fmt: skip
