# mypy: disable-error-code="untyped-decorator"
"""What `decode` does after attention: it packs a full residual. The static program also advances lengths, once all CTAs have read the
old ones."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.ring import find_block
from kvgen.lower.tilelang.mma.rows import fills_block, packed_end


def arrive(counters: Any, at: Any) -> Any:
    """Add one to a counter; how many came before, as a word."""
    return T.call_extern("uint32", "kvgen::ptx::arrive", T.access_ptr(counters[at], "rw"))


@T.macro
def count_reader(k: Any, at: Any, r: Any) -> None:
    """Count this CTA among those that have read the length: a barrier lies between that and here. `advance_length` looks at the count
    later, so no thread waits for the atomic now."""
    if not k.planned:
        if k.advance != 0 and at.thread == 0:
            r.flag[0] = T.call_extern("int32", "atomicAdd", T.access_ptr(k.readers[at.batch], "rw"), 1)


@T.macro
def advance_length(p: Any, k: Any, at: Any, r: Any) -> None:
    """The last CTA of a sequence to read the old length writes the new one."""
    if k.advance != 0 and at.thread == 0:
        if r.flag[0] == p.kv_heads * k.runs * at.splits - 1:
            k.readers[at.batch] = 0
            k.lengths[at.batch] = k.lengths[at.batch] + k.fresh


@T.macro
def complete_head(p: Any, k: Any, at: Any, r: Any, memory: Any) -> None:
    """Of the CTAs that completed the cells of a KV head, keep `completed` in the last."""
    if not p.one_run:
        T.sync_threads()
        if at.thread == 0:
            memory[0] = arrive(k.flushed, at.batch * p.kv_heads + at.head)
        T.sync_threads()
        r.completed[0] = T.cast(T.cast(memory[0], "int32") == k.runs - 1, "int32")
        if r.completed[0] != 0 and at.thread == 0:
            k.flushed[at.batch * p.kv_heads + at.head] = 0


@T.macro
def flush(p: Any, k: Any, at: Any, work: Any, r: Any, memory: Any) -> None:
    """The CTA that completes a head packs its residual, if this call has filled it; what is left over moves to its
    rows. The packing is that of `pack`."""
    if k.fresh > 0 and fills_block(p, work) and r.completed[0] != 0:
        complete_head(p, k, at, r, memory)
        if r.completed[0] != 0:
            T.sync_threads()
            if p.page_blocks:
                r.page[0] = k.table[at.batch * k.table_stride + work.blocks // p.page_blocks]
            find_block(p, k, at, r, work.blocks)
            slots = T.cast((at.batch * p.kv_heads + at.head) * p.rows.rows, "int64") * (p.dim // 2)
            length = () if p.one_block else (packed_end(p, work.blocks) + work.old_residual,)
            T.call_extern(
                "int32", "flush_block", T.access_ptr(k.k_residual[slots], "rw"), T.access_ptr(k.v_residual[slots], "rw"),
                T.access_ptr(k.packed[r.source[0] * 4], "r"),
                k.fresh_k[0] + at.batch * k.fresh_k[1] + at.head * k.fresh_k[3] - slots // 4, k.fresh_k[2],
                k.fresh_v[0] + at.batch * k.fresh_v[1] + at.head * k.fresh_v[3] - slots // 4, k.fresh_v[2],
                work.old_residual, work.residual, T.access_ptr(memory[0], "rw"), *length,
            )  # fmt: skip
