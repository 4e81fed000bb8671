# mypy: disable-error-code="untyped-decorator"
"""The whole kernel: query, ring, residual, packed KV tiles, reduction over warps and splits."""

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.mask import first_tile, set_limits
from kvgen.lower.tilelang.mma.query import load_query, normalize_query, store_query, sum_query
from kvgen.lower.tilelang.mma.reduction import reduce_all_splits, reduce_all_warps
from kvgen.lower.tilelang.mma.residual import attend_residual, load_residual
from kvgen.lower.tilelang.mma.ring import issue_copy, prefetch_page
from kvgen.lower.tilelang.mma.scores import begin_kv_tile, load_row_params, score_codes
from kvgen.lower.tilelang.mma.softmax import begin_state, refresh_bias, weigh
from kvgen.lower.tilelang.mma.state import Args, Place, Work, registers, static
from kvgen.lower.tilelang.mma.step import advance_length, flush
from kvgen.lower.tilelang.mma.values import add_values
from kvgen.lower.tilelang.plan import Plan


@T.macro
def tile_range(p: Any, k: Any, at: Any) -> Any:
    """The split's range of KV tiles and the residual: splits share the visible packed KV tiles evenly. The numbers are stored in
    registers, because TileLang inlines an expression of run-time numbers wherever it is used, divisions included."""
    work = T.alloc_local((5,), "int32")
    length = k.lengths[at.batch]
    work[0] = length // p.tokens
    work[1] = length % p.tokens
    work[2] = work[1] + k.fresh
    if p.window is None:
        work[4] = T.truncdiv(work[0] * p.units + k.splits - 1, k.splits)
        work[3] = at.split * work[4]
    else:
        work[3] = first_tile(p, k, work[0], work[2])
        work[4] = T.truncdiv(work[0] * p.units - work[3] + k.splits - 1, k.splits)
        work[3] = work[3] + at.split * work[4]
    work[4] = T.max(0, T.min(work[4], work[0] * p.units - work[3]))
    return Work(work[0], work[1], work[2], work[3], work[4])


@T.macro
def attend_packed(p: Any, k: Any, at: Any, work: Any, r: Any, memory: Any) -> None:
    """The warp's KV tiles: it waits for a sub-tile, uses it, and starts the copy of the one that takes its place."""
    for index in T.serial(T.max(0, T.ceildiv(work.count - at.warp, p.warps))):
        for sub in T.unroll(p.unit):
            stage = index % p.rounds * p.unit + sub if p.stages >= p.unit else sub % p.stages
            subtile = at.warp * p.ring_words + stage * p.subtile_words
            tile = work.first + at.warp + index * p.warps
            T.ptx_wait_group(p.stages - 1)
            T.sync_warp()
            if sub == 0:
                if p.channel_scaled:
                    begin_kv_tile(p, at, r, memory, index)
                refresh_bias(p, r)
            score_codes(p, at, r, memory, subtile)
            load_row_params(p, "value", at, r, memory, subtile)
            weigh(p, at, r, (tile * p.unit + sub) * 32)
            add_values(p, at, r, memory, subtile)
            T.sync_warp()
            issue_copy(p, k, at, work, r, memory, index + (sub + p.stages) // p.unit, (sub + p.stages) % p.unit, stage)


@T.macro
def attention(p: Any, k: Any, at: Any, memory: Any) -> None:
    """One CTA: a split of a KV head of a sequence."""
    r = registers(p)
    load_query(p, k, at, r)
    work = tile_range(p, k, at)
    load_residual(p, k, at, work, r, 0)
    prefetch_page(p, k, at, work, r, 0)
    for stage in static(p.stages):
        issue_copy(p, k, at, work, r, memory, stage // p.unit, stage % p.unit, stage)
    begin_state(p, r)
    set_limits(p, k, at, work, r)
    normalize_query(p, k, at, r)
    sum_query(p, r)
    if p.channel_scaled:
        store_query(p, at, r, memory)
    attend_residual(p, k, at, work, r)
    attend_packed(p, k, at, work, r, memory)
    reduce_all_warps(p, k, at, r, memory)
    reduce_all_splits(p, k, at, r, memory)
    advance_length(p, k, at, r)
    flush(p, k, at, work, r, memory)


@T.macro
def locate(p: Any, cell: Any, split: Any, runs: Any) -> Any:
    """The place of a thread; a cell is a sequence, a KV head, and as many of its q rows as a CTA holds."""
    place = T.alloc_local((3,), "int32")
    place[0] = cell // p.kv_heads if p.one_run else T.truncdiv(cell, p.kv_heads * runs)
    place[1] = cell % p.kv_heads if p.one_run else T.truncdiv(T.truncmod(cell, p.kv_heads * runs), runs)
    place[2] = 0 if p.one_run else T.truncmod(cell, runs) * (8 * p.column_tiles)
    thread = T.get_thread_binding(0)
    return Place(place[0], place[1], place[2], cell, split, thread, thread // 32, thread % 32, thread % 32 // 4, thread % 4)


def array(dtype: str) -> Any:
    """A flat tensor parameter of any length."""
    return T.Tensor((T.dynamic("extent", "int64"),), dtype)


def program(p: Plan) -> Any:
    """The program as a TileLang function. One module serves all batches and lengths: every extent is a run-time number."""

    @T.prim_func
    def attend(
        q: array("uint32"), packed: array("uint32"), k_residual: array("uint32"), v_residual: array("uint32"),
        lengths: array("int32"), table: array("int32"), out: array("uint32"), lse: array("float32"),
        partial: array("float32"), stats: array("float32"),
        arrivals: array("int32"), flushed: array("int32"), readers: array("int32"),
        q_batch: T.int64, q_token: T.int64, q_head: T.int64, out_batch: T.int64, out_token: T.int64, out_head: T.int64,
        fresh_k: T.int64, fresh_v: T.int64, fresh_k_batch: T.int64, fresh_k_token: T.int64, fresh_k_head: T.int64,
        fresh_v_batch: T.int64, fresh_v_token: T.int64, fresh_v_head: T.int64,
        packed_outer: T.int64, packed_head: T.int64, table_stride: T.int64,
        fresh: T.int32, q_len: T.int32, with_lse: T.int32, scale: T.float32, cells: T.int32, runs: T.int32, splits: T.int32,
    ):  # fmt: skip
        with T.Kernel(cells, splits, threads=p.threads) as (cell, split):
            if p.min_ctas > 1:
                T.annotate_min_blocks_per_sm(p.min_ctas)
            memory = T.alloc_shared((p.shared_bytes // 4,), "uint32")
            k = Args(
                q, packed, k_residual, v_residual, lengths, table, out, lse, partial, stats, arrivals, flushed, readers,
                (q_batch, q_token, q_head), (out_batch, out_token, out_head),
                (fresh_k, fresh_k_batch, fresh_k_token, fresh_k_head), (fresh_v, fresh_v_batch, fresh_v_token, fresh_v_head),
                (packed_outer, packed_head), table_stride, fresh, q_len, with_lse, scale, runs, splits,
            )  # fmt: skip
            attention(p, k, locate(p, cell, split, runs), memory)

    return attend
