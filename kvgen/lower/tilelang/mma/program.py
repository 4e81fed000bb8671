# mypy: disable-error-code="untyped-decorator"
"""Attention of form "mma": query, ring, residual, packed KV tiles, reduction over warps and splits."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.group_sums import add_group, begin_group
from kvgen.lower.tilelang.mma.kernel import kernel
from kvgen.lower.tilelang.mma.mask import set_limits
from kvgen.lower.tilelang.mma.query import normalize_query, scale_scores, set_ones, store_query, sum_query
from kvgen.lower.tilelang.mma.reduction import reduce_all_splits, reduce_all_warps
from kvgen.lower.tilelang.mma.residual import attend_residual, load_residual
from kvgen.lower.tilelang.mma.ring import issue_copy, prefetch_page, value_params
from kvgen.lower.tilelang.mma.scores import begin_kv_tile, load_row_params, score_codes
from kvgen.lower.tilelang.mma.softmax import begin_state, refresh_bias, weigh
from kvgen.lower.tilelang.mma.state import static
from kvgen.lower.tilelang.mma.step import flush
from kvgen.lower.tilelang.mma.values import add_values, set_middle
from kvgen.lower.tilelang.traits import Traits


@T.macro
def attend_packed(p: Any, k: Any, at: Any, work: Any, r: Any, memory: Any) -> None:
    """The warp's KV tiles: it waits for a sub-tile, uses it, and starts the copy of the one that takes its place."""
    for index in T.serial(T.max(0, T.ceildiv(work.count - at.warp, p.warps))):
        for sub in T.unroll(p.tile_subtiles):
            stage = index % p.tiles_in_flight * p.tile_subtiles + sub if p.stages >= p.tile_subtiles else sub % p.stages
            subtile = at.warp * p.ring_words + stage * p.subtile_words
            tile = work.first + at.warp + index * p.warps
            T.ptx_wait_group(p.stages - 1)
            T.sync_warp()
            if sub == 0:
                if p.channel_scaled:
                    begin_kv_tile(p, at, r, memory, index)
                if p.value.per_channel:
                    begin_group(p, r)
                refresh_bias(p, r)
            score_codes(p, at, r, memory, subtile)
            load_row_params(p, "value", at, r, memory, subtile)
            weigh(p, at, r, (tile * p.tile_subtiles + sub) * 32 + p.rows.sink)
            add_values(p, at, r, memory, subtile)
            if p.value.per_channel and sub == p.tile_subtiles - 1:
                add_group(p, at, r, memory, value_params(p, at, index))
            T.sync_warp()
            issue_copy(p, k, at, work, r, memory, index + (sub + p.stages) // p.tile_subtiles, (sub + p.stages) % p.tile_subtiles, stage)


@T.macro
def attend(p: Any, k: Any, at: Any, work: Any, r: Any, _: Any, memory: Any) -> None:
    """Attend to a work tile, whose query is being loaded."""
    load_residual(p, k, at, work, r, 0)
    prefetch_page(p, k, at, work, r, 0)
    for stage in static(p.stages):
        issue_copy(p, k, at, work, r, memory, stage // p.tile_subtiles, stage % p.tile_subtiles, stage)
    begin_state(p, r)
    set_limits(p, k, at, work, r)
    if p.key.quantized:
        normalize_query(p, k, at, r)
    else:
        scale_scores(p, k, r)
    set_ones(r)
    if p.key.quantized:
        sum_query(p, r)
    if p.value.quantized:
        set_middle(p, r)
    if p.channel_scaled:
        store_query(p, at, r, memory)
    attend_residual(p, k, at, work, r)
    attend_packed(p, k, at, work, r, memory)


@T.macro
def finish(p: Any, k: Any, at: Any, work: Any, r: Any, _: Any, memory: Any) -> None:
    """Reduce over warps and splits, store, and pack the residual."""
    reduce_all_warps(p, k, at, r, memory)
    reduce_all_splits(p, k, at, r, memory)
    flush(p, k, at, work, r, memory)


def program(p: Traits, planned: bool) -> Any:
    """The program as a TileLang function."""
    return kernel(p, planned, p.shared_bytes // 4, lambda _: None, attend, finish)
