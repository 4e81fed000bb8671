# mypy: disable-error-code="untyped-decorator"
"""The residual: tokens that are not packed, among them this call's new ones in `decode`, in their own type. Tiles of 16 tokens (`rows.py`)
are dealt to the splits, and within a split to its warps from the last one. A warp loads its first tile before it fills its ring, because
these loads would otherwise queue behind the ring's copies."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import mix
from kvgen.lower.tilelang.mma.instructions import multiply, packer
from kvgen.lower.tilelang.mma.mask import sees
from kvgen.lower.tilelang.mma.rows import fills_block, find_tile, packed_end, row_of, tile_begin, tile_end
from kvgen.lower.tilelang.mma.score_modifier import modified, scaled
from kvgen.lower.tilelang.mma.softmax import raise_row_max
from kvgen.lower.tilelang.mma.state import CODE_UNIT, MASKED, q_rows, static


def slot_of(p: Any, at: Any, work: Any, token: Any) -> Any:
    """Where the residual has the row of a token."""
    return T.cast((at.batch * p.kv_heads + at.head) * p.rows.rows + row_of(p, work, token), "int64") * (p.dim // 8)


@T.macro
def load_rows(p: Any, at: Any, work: Any, r: Any, tensor: Any, fresh: Any, first: Any, rows: Any) -> None:
    """Rows g and g + 8 of the tile at `first`, 16 bytes per run of 32 channels. The last token stands in for those past the end."""
    for half in static(2):
        token = T.min(first + half * 8 + at.g, tile_end(p, work, r) - 1)
        r.row[half] = slot_of(p, at, work, token)
        if token >= work.old_residual:
            r.row[half] = fresh[0] + at.batch * fresh[1] + (token - work.old_residual) * fresh[2] + at.head * fresh[3]
    for chunk in T.unroll(p.chunks):
        for half in static(2):
            for i in T.vectorized(4):
                rows[chunk * 8 + half * 4 + i] = tensor[(r.row[half] + chunk * 4 + at.t) * 4 + i]


@T.macro
def clear_rows(p: Any, r: Any) -> None:
    """Begin the rows anew. Not every warp loads rows: those of one work tile would otherwise live until the next, in registers of the
    packed loop."""
    for i in T.unroll(p.chunks * 8):
        r.k_rows[i] = T.uint32(0)
        r.v_rows[i] = T.uint32(0)


@T.macro
def load_residual(p: Any, k: Any, at: Any, work: Any, r: Any, index: Any) -> None:
    """Start to load a tile of the warp."""
    find_tile(p, at, work, r, index)
    if tile_begin(p, at, r, index) < tile_end(p, work, r):
        load_rows(p, at, work, r, k.k_residual, k.fresh_k, tile_begin(p, at, r, index), r.k_rows)
        load_rows(p, at, work, r, k.v_residual, k.fresh_v, tile_begin(p, at, r, index), r.v_rows)


@T.macro
def keep_fresh(p: Any, k: Any, at: Any, work: Any, r: Any, first: Any) -> None:
    """Store the new rows of the tile in the residual, where no token that is still read has the same row."""
    for half in static(2):
        token = first + half * 8 + at.g
        if T.And(token >= work.old_residual, has_free_row(p, work, r, token)):
            for chunk in T.unroll(p.chunks):
                for i in T.vectorized(4):
                    k.k_residual[(slot_of(p, at, work, token) + chunk * 4 + at.t) * 4 + i] = r.k_rows[chunk * 8 + half * 4 + i]
                for i in T.vectorized(4):
                    k.v_residual[(slot_of(p, at, work, token) + chunk * 4 + at.t) * 4 + i] = r.v_rows[chunk * 8 + half * 4 + i]


def has_free_row(p: Any, work: Any, r: Any, token: Any) -> Any:
    """Whether a new token is stored by the warp that attends to it. `flush` stores the others, from the caller's tensors. With rollback
    each token has a row of its own; otherwise tokens behind a block may have the rows of its tokens."""
    if p.one_block:
        return token < T.min(work.residual, p.tokens)
    within = token < tile_end(p, work, r)
    return within if p.rows.rollback else T.And(within, T.Not(fills_block(p, work)))


@T.macro
def score_rows(p: Any, k: Any, at: Any, work: Any, r: Any, first: Any) -> None:
    """p = scores of the tile, masked. q rows that repeat others have no weight."""
    for i in T.unroll(p.q_tiles * 8):
        r.c[i] = 0.0
    for chunk in T.unroll(p.chunks):
        for y in T.unroll(2):
            for i in static(4):
                r.a[i] = r.k_rows[chunk * 8 + i % 2 * 4 + y * 2 + i // 2]
            for n in static(p.q_tiles):
                multiply(r.a, 0, r.raw, (n * p.chunks + chunk) * 4 + y * 2, r.c, n * 8, p.mma_type)
    for n, e in q_rows(p):
        for half in static(2):
            position = packed_end(p, work.blocks) + first + half * 8 + at.g
            seen = sees(p, position, r.limit[n * 2 + e])
            if p.rows.sink:  # a tile of the sink ends where packed tokens follow, which are seen elsewhere
                seen = T.And(seen, first + half * 8 + at.g < tile_end(p, work, r))
            counted = T.And(seen, at.t < 2) if p.halves else seen
            i = n * 8 + half * 2 + e
            r.p[i] = T.if_then_else(counted, modified(p, r.c[i] * scaled(p, k.scale)), T.float32(MASKED))


@T.macro
def weigh_rows(p: Any, r: Any) -> None:
    """Probabilities of the tile, as B operand in the rows' type."""
    for n, e in q_rows(p):
        r.top[n * 2 + e] = T.max(r.p[n * 8 + e], r.p[n * 8 + 2 + e])
    raise_row_max(p, r, T.float32(0.0))
    for n, e in q_rows(p):
        for half in static(2):
            i = n * 8 + half * 2 + e
            r.p[i] = T.call_extern("float32", "kvgen::ptx::exp2", r.p[i] - r.row_max[n * 2 + e])
            r.row_sum[n * 2 + e] = r.row_sum[n * 2 + e] + r.p[i]
    for n in static(p.q_tiles):
        for half in static(2):
            pair = T.call_extern("uint32", packer(p.mma_type), r.p[n * 8 + half * 2], r.p[n * 8 + half * 2 + 1])
            r.pb[n * 4 + half] = T.call_extern("uint32", "kvgen::ptx::transpose", pair)


@T.macro
def add_rows(p: Any, r: Any) -> None:
    """o += V's rows, transposed in registers, times probabilities."""
    for chunk in T.unroll(p.chunks):
        for y in T.unroll(2):
            for i in static(4):
                r.a[i] = T.call_extern("uint32", "kvgen::ptx::transpose", r.v_rows[chunk * 8 + i // 2 * 4 + y * 2 + i % 2])
            for n in static(p.q_tiles):
                multiply(r.a, 0, r.pb, n * 4, r.o, (n * p.steps + chunk * 2 + y) * 4, p.mma_type)


@T.macro
def to_code_units(p: Any, r: Any) -> None:
    """Sums as the packed loop keeps them."""
    for i in T.unroll(p.q_tiles * p.steps // p.height("value")):
        mix(p.value.bits, r.o, i * p.height("value") * 4)
    for i in T.unroll(p.q_tiles * p.steps * 4):
        r.o[i] = r.o[i] * T.float32(1.0 / CODE_UNIT)


@T.macro
def attend_residual(p: Any, k: Any, at: Any, work: Any, r: Any) -> None:
    """The warp's tiles of the residual, the first of which is loaded."""
    for index in T.serial(p.residual_rounds):
        first = tile_begin(p, at, r, index)
        if first < tile_end(p, work, r):
            if work.residual > work.old_residual:
                keep_fresh(p, k, at, work, r, first)
            score_rows(p, k, at, work, r, first)
            weigh_rows(p, r)
            add_rows(p, r)
            if p.residual_rounds > 1:
                load_residual(p, k, at, work, r, index + 1)
    if p.scaled_by_token("value"):
        find_tile(p, at, work, r, 0)
        if tile_begin(p, at, r, 0) < tile_end(p, work, r):
            to_code_units(p, r)
