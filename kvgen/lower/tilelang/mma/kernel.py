# mypy: disable-error-code="untyped-decorator, valid-type"
"""The kernel function of both forms and both schedulers: its arguments, its grid, its shared memory."""

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.scheduler import schedule_planned, schedule_static
from kvgen.lower.tilelang.mma.state import Args
from kvgen.lower.tilelang.traits import Traits


def array(dtype: str) -> Any:
    """A flat tensor parameter of any length."""
    return T.Tensor((T.dynamic("extent", "int64"),), dtype)


def kernel(p: Traits, planned: bool, words: int, allocate: Any, attend_tile: Any, finish: Any) -> Any:
    """The program as a TileLang function. One module serves all batches and lengths: every extent is a run-time number.

    The grid is cells by splits, or workers. `attend_tile` and `finish` attend to one work tile and store the result, both called with
    (p, k, at, work, r, tiles, memory). `words` is the size of `memory`, `tiles` is what `allocate(p)` gave.
    """

    @T.prim_func
    def attend(
        q: array("uint32"), packed: array("uint32"), k_residual: array("uint32"), v_residual: array("uint32"),
        lengths: array("int32"), table: array("int32"), out: array("uint32"), lse: array("float32"),
        partial: array("float32"), stats: array("float32"),
        arrivals: array("int32"), flushed: array("int32"), readers: array("int32"), plan: array("int32"), overflow: array("int32"),
        sinks: array("float32"),
        q_batch: T.int64, q_token: T.int64, q_head: T.int64, out_batch: T.int64, out_token: T.int64, out_head: T.int64,
        fresh_k: T.int64, fresh_v: T.int64, fresh_k_batch: T.int64, fresh_k_token: T.int64, fresh_k_head: T.int64,
        fresh_v_batch: T.int64, fresh_v_token: T.int64, fresh_v_head: T.int64,
        packed_outer: T.int64, packed_head: T.int64, table_stride: T.int64,
        fresh: T.int32, q_len: T.int32, with_lse: T.int32, scale: T.float32, ctas: T.int32, runs: T.int32, splits: T.int32,
        limit: T.int32, advance: T.int32, tiles_at: T.int32, empty_at: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(ctas, splits, threads=p.threads) as (cta, split):
            if p.min_ctas > 1:
                T.annotate_min_blocks_per_sm(p.min_ctas)
            memory = T.alloc_shared((words,), "uint32")
            tiles = allocate(p)
            k = Args(
                planned, q, packed, k_residual, v_residual, lengths, table, out, lse, partial, stats,
                arrivals, flushed, readers, plan, overflow, sinks,
                (q_batch, q_token, q_head), (out_batch, out_token, out_head),
                (fresh_k, fresh_k_batch, fresh_k_token, fresh_k_head), (fresh_v, fresh_v_batch, fresh_v_token, fresh_v_head),
                (packed_outer, packed_head), table_stride, fresh, q_len, with_lse, scale, ctas, runs, limit, advance, tiles_at, empty_at,
            )  # fmt: skip
            if planned:
                schedule_planned(p, k, cta, tiles, memory, attend_tile, finish)
            else:
                schedule_static(p, k, cta, split, splits, tiles, memory, attend_tile, finish)

    return attend
