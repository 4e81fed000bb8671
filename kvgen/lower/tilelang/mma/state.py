# mypy: disable-error-code="untyped-decorator"
"""What the pieces share: the kernel's arguments, a thread's place, its registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.plan import Plan

MIN_SCORE = -(2.0**100)
"""Stands for minus infinity: finite, so that differences of it are numbers."""
MASKED = -(2.0**101)
ALL = 0xFFFFFFFF
"""Lanes of a warp."""
CODE_UNIT = 2.0**24
"""Codes enter matrix instructions as fp16 denormals, code * 2^-24."""
SCALE_FLOOR = -14.0
"""Starting point of the reference exponent of V's scales; raised as larger ones come by."""


@dataclass(frozen=True)
class Args:
    """Arguments of the kernel: tensors as flat arrays of words; strides count 16 bytes. Of new tokens, offsets from the residual."""

    q: Any
    packed: Any
    k_residual: Any
    v_residual: Any
    lengths: Any
    table: Any
    out: Any
    lse: Any
    partial: Any
    stats: Any
    arrivals: Any
    flushed: Any
    readers: Any
    q_strides: tuple[Any, Any, Any]
    out_strides: tuple[Any, Any, Any]
    fresh_k: tuple[Any, Any, Any, Any]
    fresh_v: tuple[Any, Any, Any, Any]
    packed_strides: tuple[Any, Any]
    table_stride: Any
    fresh: Any
    q_len: Any
    with_lse: Any
    scale: Any
    runs: Any
    splits: Any


@dataclass(frozen=True)
class Place:
    """Where a thread is: sequence, KV head, first column of its CTA, split; lane g * 4 + t of a warp."""

    batch: Any
    head: Any
    column: Any
    cell: Any
    split: Any
    thread: Any
    warp: Any
    lane: Any
    g: Any
    t: Any


@dataclass(frozen=True)
class Work:
    """What a CTA has to do: units [first, first + count) of the sequence, and the rest, tokens that are not packed."""

    full: Any
    rest: Any
    tail: Any
    first: Any
    count: Any


@dataclass(frozen=True)
class Registers:
    """A thread's registers. e counts its two columns 2t, 2t + 1 of each column tile (with `halves` those of t % 2), n the tiles."""

    raw: Any
    q: Any
    qx: Any
    qs: Any
    ql: Any
    score_scale: Any
    q_sum: Any
    key_zero: Any
    words: Any
    a: Any
    c: Any
    x: Any
    params: Any
    row_factor: Any
    p: Any
    pb: Any
    o: Any
    v: Any
    reference: Any
    bias: Any
    limit: Any
    l: Any  # noqa: E741
    zo: Any
    top: Any
    factor: Any
    flag: Any
    source: Any
    row: Any
    page: Any
    k_tail: Any
    v_tail: Any
    ones: Any


@T.macro
def registers(p: Any) -> Any:
    """Allocate them."""
    n = p.column_tiles
    groups = p.groups("value")
    raw = T.alloc_local((n * p.chunks * 4,), "uint32")
    q = T.alloc_local((n * p.chunks * 4,), "uint32")
    qx = T.alloc_local((n * 4,), "uint32")
    ql = T.alloc_local((n * p.chunks * 4,), "uint32")
    qs = T.alloc_local((n * p.chunks * 4,), "uint32")
    score_scale = T.alloc_local((n * 2,), "float32")
    q_sum = T.alloc_local((p.groups("key") * n * 4,), "float32")
    key_zero = T.alloc_local((n * 4,), "float32")
    words = T.alloc_local((4,), "uint32")
    a = T.alloc_local((8,), "uint32")
    c = T.alloc_local((p.product_groups * n * 8,), "float32")
    x = T.alloc_local((n * 8,), "float32")
    params = T.alloc_local((max(p.groups("key"), groups) * 4,), "uint32")
    row_factor = T.alloc_local((4,), "float32")
    prob = T.alloc_local((n * 8,), "float32")
    pb = T.alloc_local((groups * n * 4,), "uint32")
    o = T.alloc_local((n * p.steps * 4,), "float32")
    v = T.alloc_local((2,), "float32")
    reference = T.alloc_local((n * 2,), "float32")
    bias = T.alloc_local((n * 2,), "float32")
    limit = T.alloc_local((n * 2,), "int32")
    denominator = T.alloc_local((n * 2,), "float32")
    zo = T.alloc_local((groups * n * 4,), "float32")
    top = T.alloc_local((n * 2 + 1,), "float32")
    factor = T.alloc_local((n * 2,), "float32")
    flag = T.alloc_local((1,), "int32")
    source = T.alloc_local((1,), "int64")
    row = T.alloc_local((2,), "int64")
    page = T.alloc_local((1,), "int32")
    k_tail = T.alloc_local((p.chunks * 8,), "uint32")
    v_tail = T.alloc_local((p.chunks * 8,), "uint32")
    ones = T.alloc_local((4,), "uint32")
    return Registers(
        raw, q, qx, qs, ql, score_scale, q_sum, key_zero, words, a, c, x, params, row_factor, prob, pb, o, v, reference, bias, limit,
        denominator, zo, top, factor, flag, source, row, page, k_tail, v_tail, ones,
    )  # fmt: skip


def static(count: int) -> tuple[int, ...]:
    """Indices of a loop that is unrolled while the program is built, so that they are plain numbers in it."""
    return tuple(range(count))


def columns(p: Plan) -> tuple[tuple[int, int], ...]:
    """(column tile, which of a lane's two columns)."""
    return tuple((n, e) for n in range(p.column_tiles) for e in range(2))
