# mypy: disable-error-code="untyped-decorator"
"""Tokens that are not packed: the residual and, in `decode`, this call's new ones, in their own type. Tiles of 16 go round the
splits, and there round the warps from the last; a warp's first tile is asked for before its ring, so as not to queue behind it."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import mix
from kvgen.lower.tilelang.mma.instructions import multiply
from kvgen.lower.tilelang.mma.mask import sees
from kvgen.lower.tilelang.mma.score_modifier import modify, scaled, score_base
from kvgen.lower.tilelang.mma.softmax import move_reference
from kvgen.lower.tilelang.mma.state import CODE_UNIT, MASKED, columns, static


def first_of(p: Any, k: Any, at: Any, turn: Any) -> Any:
    """First token of the warp's tile."""
    return ((turn * p.warps + (p.warps - 1 - at.warp)) * k.splits + (k.splits - 1 - at.split)) * 16


def slot_of(p: Any, at: Any, token: Any) -> Any:
    """Where the residual has the row of a token."""
    return T.cast((at.batch * p.kv_heads + at.head) * p.tokens + token, "int64") * (p.dim // 8)


@T.macro
def load_rows(p: Any, at: Any, work: Any, r: Any, tensor: Any, fresh: Any, first: Any, rows: Any) -> None:
    """Rows g and g + 8 of the tile at `first`, 16 bytes per run of 32 channels. The last token stands in for those past the end."""
    for half in static(2):
        token = T.min(first + half * 8 + at.g, work.tail - 1)
        r.row[half] = slot_of(p, at, token)
        if token >= work.rest:
            r.row[half] = fresh[0] + at.batch * fresh[1] + (token - work.rest) * fresh[2] + at.head * fresh[3]
    for chunk in T.unroll(p.chunks):
        for half in static(2):
            for i in T.vectorized(4):
                rows[chunk * 8 + half * 4 + i] = tensor[(r.row[half] + chunk * 4 + at.t) * 4 + i]


@T.macro
def load_tail(p: Any, k: Any, at: Any, work: Any, r: Any, turn: Any) -> None:
    """Start to load a tile of the warp."""
    if first_of(p, k, at, turn) < work.tail:
        load_rows(p, at, work, r, k.k_residual, k.fresh_k, first_of(p, k, at, turn), r.k_tail)
        load_rows(p, at, work, r, k.v_residual, k.fresh_v, first_of(p, k, at, turn), r.v_tail)


@T.macro
def keep_fresh(p: Any, k: Any, at: Any, work: Any, r: Any, first: Any) -> None:
    """New rows of the tile go into the residual, as far as it has room."""
    for half in static(2):
        token = first + half * 8 + at.g
        if token >= work.rest and token < T.min(work.tail, p.tokens):
            for chunk in T.unroll(p.chunks):
                for i in T.vectorized(4):
                    k.k_residual[(slot_of(p, at, token) + chunk * 4 + at.t) * 4 + i] = r.k_tail[chunk * 8 + half * 4 + i]
                for i in T.vectorized(4):
                    k.v_residual[(slot_of(p, at, token) + chunk * 4 + at.t) * 4 + i] = r.v_tail[chunk * 8 + half * 4 + i]


@T.macro
def score_rows(p: Any, k: Any, at: Any, work: Any, r: Any, first: Any) -> None:
    """p = scores of the tile, masked. Columns that repeat others count nothing."""
    for i in T.unroll(p.column_tiles * 8):
        r.c[i] = 0.0
    for chunk in T.unroll(p.chunks):
        for y in T.unroll(2):
            for i in static(4):
                r.a[i] = r.k_tail[chunk * 8 + i % 2 * 4 + y * 2 + i // 2]
            for n in static(p.column_tiles):
                multiply(r.a, 0, r.raw, (n * p.chunks + chunk) * 4 + y * 2, r.c, n * 8, p.mma_type)
    for n, e in columns(p):
        for half in static(2):
            position = work.full * p.tokens + first + half * 8 + at.g
            seen = sees(p, position, r.limit[n * 2 + e])
            counted = T.And(seen, at.t < 2) if p.halves else seen
            i = n * 8 + half * 2 + e
            r.p[i] = T.if_then_else(counted, row_score(p, k, r, i), T.float32(MASKED))


def row_score(p: Any, k: Any, r: Any, i: int) -> Any:
    """Logarithm (base 2) of a row's weight."""
    product = r.c[i] * scaled(p, k.scale)
    return modify(p, product, T.float32(score_base(p))) if p.softcap > 0 else product


@T.macro
def weigh_rows(p: Any, r: Any) -> None:
    """Probabilities of the tile, as B operand in the rows' type."""
    pack = "kvgen::pack_bf16" if p.bf16 else "kvgen::ptx::pack_half2"
    for n, e in columns(p):
        r.top[n * 2 + e] = T.max(r.p[n * 8 + e], r.p[n * 8 + 2 + e])
    move_reference(p, r, T.float32(0.0))
    for n, e in columns(p):
        for half in static(2):
            i = n * 8 + half * 2 + e
            r.p[i] = T.call_extern("float32", "kvgen::ptx::exp2", r.p[i] - r.reference[n * 2 + e])
            r.l[n * 2 + e] = r.l[n * 2 + e] + r.p[i]
    for n in static(p.column_tiles):
        for half in static(2):
            pair = T.call_extern("uint32", pack, r.p[n * 8 + half * 2], r.p[n * 8 + half * 2 + 1])
            r.pb[n * 4 + half] = T.call_extern("uint32", "kvgen::ptx::transpose", pair)


@T.macro
def add_rows(p: Any, r: Any) -> None:
    """o += V's rows, transposed in registers, times probabilities."""
    for chunk in T.unroll(p.chunks):
        for y in T.unroll(2):
            for i in static(4):
                r.a[i] = T.call_extern("uint32", "kvgen::ptx::transpose", r.v_tail[chunk * 8 + i // 2 * 4 + y * 2 + i % 2])
            for n in static(p.column_tiles):
                multiply(r.a, 0, r.pb, n * 4, r.o, (n * p.steps + chunk * 2 + y) * 4, p.mma_type)


@T.macro
def to_code_units(p: Any, r: Any) -> None:
    """Sums as the packed loop keeps them."""
    for i in T.unroll(p.column_tiles * p.steps // p.height("value")):
        mix(p.value.bits, r.o, i * p.height("value") * 4)
    for i in T.unroll(p.column_tiles * p.steps * 4):
        r.o[i] = r.o[i] * T.float32(1.0 / CODE_UNIT)


@T.macro
def attend_tail(p: Any, k: Any, at: Any, work: Any, r: Any) -> None:
    """The warp's tiles of the tail, the first of which is loaded."""
    for turn in T.serial(p.tail_turns):
        first = first_of(p, k, at, turn)
        if first < work.tail:
            if work.tail > work.rest:
                keep_fresh(p, k, at, work, r, first)
            score_rows(p, k, at, work, r, first)
            weigh_rows(p, r)
            add_rows(p, r)
            if p.tail_turns > 1:
                load_tail(p, k, at, work, r, turn + 1)
    if first_of(p, k, at, 0) < work.tail:
        to_code_units(p, r)
