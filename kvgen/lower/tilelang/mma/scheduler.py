# mypy: disable-error-code="untyped-decorator"
"""Schedulers: which work tiles a CTA has. With the static one it has one split of a cell, with a plan the work tiles of a worker.
Where a thread is and what its work tile holds is stored in registers, because TileLang inlines an expression of run-time numbers
wherever it is used, divisions included."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.mask import first_tile, mask_of
from kvgen.lower.tilelang.mma.query import load_query
from kvgen.lower.tilelang.mma.reduction import begin_partials, write_output
from kvgen.lower.tilelang.mma.residual import clear_rows
from kvgen.lower.tilelang.mma.rows import packed_blocks, packed_end, unquantized
from kvgen.lower.tilelang.mma.state import Place, Work, registers
from kvgen.lower.tilelang.mma.step import advance_length

PLAN_HEADER = 8
"""int32 of a plan before the workers' ranges (PlanShape::kHeader)."""
WORK_TILE = 8
"""int32 of a work tile: sequence, head, first, end, split_idx, num_splits, slot, length."""


def place_at(thread: Any, batch: Any, head: Any, q_row: Any, cell: Any, split: Any, splits: Any, first_slot: Any) -> Place:
    """The place of thread `thread` of a CTA."""
    lane = thread % 32
    return Place(batch, head, q_row, cell, split, splits, first_slot, thread, thread // 32, lane, lane // 4, lane % 4)


@T.macro
def static_place(p: Any, k: Any, cell: Any, split: Any, splits: Any) -> Any:
    """The place of a thread of the grid of cells and splits."""
    place = T.alloc_local((3,), "int32")
    place[0] = cell // p.kv_heads if p.one_run else T.truncdiv(cell, p.kv_heads * k.runs)
    place[1] = cell % p.kv_heads if p.one_run else T.truncdiv(T.truncmod(cell, p.kv_heads * k.runs), k.runs)
    place[2] = 0 if p.one_run else T.truncmod(cell, k.runs) * (8 * p.q_tiles)
    return place_at(T.get_thread_binding(0), place[0], place[1], place[2], cell, split, splits, cell * splits)


@T.macro
def static_work(p: Any, k: Any, at: Any) -> Any:
    """The split's work tile: splits share the visible packed KV tiles evenly."""
    work = T.alloc_local((5,), "int32")
    length = k.lengths[at.batch]
    work[0] = packed_blocks(p, length)
    work[1] = unquantized(p, length, work[0])
    work[2] = work[1] + k.fresh
    if mask_of(p).windowed:
        work[3] = first_tile(p, k, work[0], work[2])
        work[4] = T.truncdiv(work[0] * p.block_tiles - work[3] + at.splits - 1, at.splits)
        work[3] = work[3] + at.split * work[4]
    else:
        work[4] = T.truncdiv(work[0] * p.block_tiles + at.splits - 1, at.splits)
        work[3] = at.split * work[4]
    work[4] = T.max(0, T.min(work[4], work[0] * p.block_tiles - work[3]))
    return Work(work[0], work[1], work[2], work[3], work[4])


@T.macro
def schedule_static(p: Any, k: Any, cell: Any, split: Any, splits: Any, t: Any, memory: Any, attend: Any, finish: Any) -> None:
    """One split of a cell. Of a sequence that has no room for the step's tokens nothing is written."""
    r = registers(p)
    at = static_place(p, k, cell, split, splits)
    load_query(p, k, at, r)
    work = static_work(p, k, at)
    if packed_end(p, work.blocks) + work.old_residual > k.limit - k.fresh:
        if at.thread == 0:
            k.overflow[0] = 1
    else:
        attend(p, k, at, work, r, t, memory)
        finish(p, k, at, work, r, t, memory)
        advance_length(p, k, at, r)


@T.macro
def work_tile_place(p: Any, k: Any, tile: Any) -> Any:
    """The place of a thread while it has a work tile, whose head is a KV head and a run of its q rows. The thread's number is pinned, so
    that what is derived from it does not live through the loop over work tiles."""
    place = T.alloc_local((5,), "int32")
    place[0] = tile[1] if p.one_run else T.truncdiv(tile[1], k.runs)
    place[1] = 0 if p.one_run else T.truncmod(tile[1], k.runs) * (8 * p.q_tiles)
    place[2] = tile[0] * (p.kv_heads if p.one_run else p.kv_heads * k.runs) + tile[1]
    place[3] = tile[6] - tile[4]
    place[4] = T.call_extern("int32", "kvgen::ptx::pinned", T.get_thread_binding(0))
    return place_at(place[4], tile[0], place[0], place[1], place[2], tile[4], tile[5], place[3])


@T.macro
def planned_work(p: Any, k: Any, tile: Any) -> Any:
    """A work tile of the plan. The length comes from it too: `lengths` may have advanced since the plan was made."""
    work = T.alloc_local((4,), "int32")
    work[0] = packed_blocks(p, tile[7])
    work[1] = unquantized(p, tile[7], work[0])
    work[2] = work[1] + k.fresh
    work[3] = tile[3] - tile[2]
    return Work(work[0], work[1], work[2], tile[2], work[3])


@T.macro
def load_work_tile(k: Any, index: Any, tile: Any) -> None:
    """Load a work tile from the plan."""
    for half in T.unroll(2):
        for i in T.vectorized(4):
            tile[half * 4 + i] = k.plan[(k.tiles_at + index) * WORK_TILE + half * 4 + i]


@T.macro
def schedule_planned(p: Any, k: Any, worker: Any, t: Any, memory: Any, attend: Any, finish: Any) -> None:
    """The work tiles of a worker, one after another. The rings lie where the last work tile was reduced, hence the barrier. A work tile
    is loaded again before its result is stored: its numbers would otherwise take registers of the packed loop, and some would spill."""
    r = registers(p)
    tile = T.alloc_local((WORK_TILE,), "int32")
    bounds = T.alloc_local((2,), "int32")
    write_empty_sequences(p, k, worker, r)
    for i in T.vectorized(2):
        bounds[i] = k.plan[PLAN_HEADER + worker * 2 + i]
    for index in T.serial(bounds[0], bounds[1]):
        load_work_tile(k, index, tile)
        at = work_tile_place(p, k, tile)
        load_query(p, k, at, r)
        clear_rows(p, r)
        attend(p, k, at, planned_work(p, k, tile), r, t, memory)
        load_work_tile(k, T.call_extern("int32", "kvgen::ptx::pinned", index), tile)
        finish(p, k, work_tile_place(p, k, tile), planned_work(p, k, tile), r, t, memory)
        T.sync_threads()


@T.macro
def write_empty_sequences(p: Any, k: Any, worker: Any, r: Any) -> None:
    """The output of sequences that have no tokens: zeros, and an LSE of minus infinity or the learned sink. Workers take them in turn."""
    r.top[1] = 0.0
    r.factor[0] = 0.0
    r.factor[1] = 0.0
    for i in T.serial(T.truncdiv(k.plan[0] + k.ctas - 1 - worker, k.ctas)):
        for head in T.serial(p.kv_heads):
            at = place_at(T.get_thread_binding(0), k.plan[k.empty_at + worker + i * k.ctas], head, 0, 0, 0, 1, 0)
            for index in T.serial(T.ceildiv(p.group * k.q_len * p.dim // 2, p.threads)):
                item = index * p.threads + at.thread
                if item < p.group * k.q_len * p.dim // 2:
                    if p.sinks:
                        begin_partials(r)
                    write_output(p, k, at, r, item // (p.dim // 2), item % (p.dim // 2) * 2)
