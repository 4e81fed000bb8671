# mypy: disable-error-code="untyped-decorator"
"""Tokens that are not packed: the residual and, in `decode`, this call's new ones. 16 at a time per warp, from global memory,
in their own type, while the ring fills."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import mix
from kvgen.lower.tilelang.mma.instructions import multiply
from kvgen.lower.tilelang.mma.softmax import move_reference
from kvgen.lower.tilelang.mma.state import CODE_UNIT, MASKED, columns, static


def slot_of(p: Any, at: Any, token: Any) -> Any:
    """Where the residual has the row of a token."""
    return T.cast((at.batch * p.kv_heads + at.head) * p.tokens + token, "int64") * (p.dim // 8)


@T.macro
def find_rows(p: Any, at: Any, work: Any, r: Any, fresh: Any, first: Any) -> None:
    """Where the lane's rows g and g + 8 of the tile at `first` are."""
    for half in static(2):
        token = first + half * 8 + at.g
        r.row[half] = slot_of(p, at, token)
        if token >= work.rest:
            r.row[half] = fresh[0] + at.batch * fresh[1] + (token - work.rest) * fresh[2] + at.head * fresh[3]


@T.macro
def load_rows(p: Any, at: Any, work: Any, r: Any, tensor: Any, first: Any, chunk: Any) -> None:
    """32 channels of both rows; rows past the end are zero. New rows go on into the residual."""
    for half in static(2):
        token = first + half * 8 + at.g
        for i in T.vectorized(4):
            r.kv[half * 4 + i] = T.if_then_else(token < work.tail, tensor[(r.row[half] + chunk * 4 + at.t) * 4 + i], T.uint32(0))
        if token >= work.rest and token < T.min(work.tail, p.tokens):
            for i in T.vectorized(4):
                tensor[(slot_of(p, at, token) + chunk * 4 + at.t) * 4 + i] = r.kv[half * 4 + i]


@T.macro
def score_rows(p: Any, k: Any, at: Any, work: Any, r: Any, first: Any) -> None:
    """p = scores of the tile, masked."""
    for i in T.unroll(p.column_tiles * 8):
        r.c[i] = 0.0
    find_rows(p, at, work, r, k.fresh_k, first)
    for chunk in static(p.chunks):
        load_rows(p, at, work, r, k.k_residual, first, chunk)
        for y in static(2):
            for i in static(4):
                r.a[i] = r.kv[i % 2 * 4 + y * 2 + i // 2]
            for n in static(p.column_tiles):
                multiply(r.a, 0, r.raw, (n * p.chunks + chunk) * 4 + y * 2, r.c, n * 8, p.mma_type)
    for n, e in columns(p):
        for half in static(2):
            position = work.full * p.tokens + first + half * 8 + at.g
            i = n * 8 + half * 2 + e
            r.p[i] = T.if_then_else(position < r.limit[n * 2 + e], r.c[i] * k.scale, T.float32(MASKED))


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
def add_rows(p: Any, k: Any, at: Any, work: Any, r: Any, first: Any) -> None:
    """o += V's rows, transposed in registers, times probabilities."""
    find_rows(p, at, work, r, k.fresh_v, first)
    for chunk in static(p.chunks):
        load_rows(p, at, work, r, k.v_residual, first, chunk)
        for y in static(2):
            for i in static(4):
                r.a[i] = T.call_extern("uint32", "kvgen::ptx::transpose", r.kv[i // 2 * 4 + y * 2 + i % 2])
            for n in static(p.column_tiles):
                multiply(r.a, 0, r.pb, n * 4, r.o, (n * p.steps + chunk * 2 + y) * 4, p.mma_type)


@T.macro
def to_code_units(p: Any, r: Any) -> None:
    """Sums as the packed loop keeps them."""
    height = 2 if p.value.bits == 2 else 1
    for tile in static(p.column_tiles * p.steps // height):
        mix(p.value.bits, r.o, tile * height * 4)
    for i in T.unroll(p.column_tiles * p.steps * 4):
        r.o[i] = r.o[i] * T.float32(1.0 / CODE_UNIT)


@T.macro
def attend_tail(p: Any, k: Any, at: Any, work: Any, r: Any) -> None:
    """The warp's tiles of the tail."""
    for turn in T.serial(T.max(0, T.ceildiv(T.ceildiv(work.tail, 16) - at.warp, p.warps))):
        first = (at.warp + turn * p.warps) * 16
        score_rows(p, k, at, work, r, first)
        weigh_rows(p, r)
        add_rows(p, k, at, work, r, first)
    to_code_units(p, r)
