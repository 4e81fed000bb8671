# mypy: disable-error-code="untyped-decorator"
"""Shared by all steps of the algorithm: the kernel's arguments, a thread's place, its registers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.traits import Traits

LOG2E = math.log2(math.e)
MIN_SCORE = -(2.0**100)
"""Stands for minus infinity: finite, so that differences of it are numbers."""
MASKED = -(2.0**101)
ALL = 0xFFFFFFFF
"""Lanes of a warp."""
CODE_UNIT = 2.0**24
"""Codes enter matrix instructions as fp16 denormals, code * 2^-24."""
SCALE_FLOOR = -14.0
"""First value of the exponent of V's scales in row_max; larger scales raise it."""


@dataclass(frozen=True)
class Args:
    """Arguments of the kernel: tensors as flat arrays of words; strides count 16 bytes. Of new tokens, offsets from the residual.
    `planned` says which of the two programs this is; `plan` is the plan of a step (kvgen/schedule/plan.hpp), `ctas` the grid's extent."""

    planned: bool

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
    plan: Any
    overflow: Any
    sinks: Any
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
    ctas: Any
    runs: Any
    limit: Any
    advance: Any
    tiles_at: Any
    empty_at: Any


@dataclass(frozen=True)
class Place:
    """Where a thread is: sequence, KV head, first q row of its CTA; split `split` of `splits`, whose partial results begin in slot
    `first_slot`; lane g * 4 + t of a warp. A cell is a sequence, a KV head, and as many of its q rows as a CTA holds."""

    batch: Any
    head: Any
    q_row: Any
    cell: Any
    split: Any
    splits: Any
    first_slot: Any
    thread: Any
    warp: Any
    lane: Any
    g: Any
    t: Any


@dataclass(frozen=True)
class Work:
    """A work tile: packed KV tiles [first, first + count) of the sequence and its part of the residual. The sequence has `blocks`
    packed blocks, and a residual of `old_residual` tokens before this call and of `residual` with the new ones."""

    blocks: Any
    old_residual: Any
    residual: Any
    first: Any
    count: Any


@dataclass(frozen=True)
class Registers:
    """A thread's registers. n counts q tiles (8 q rows), e the lane's two q rows 2t, 2t + 1 of each (with `halves` those of t % 2).
    `completed` is 1 where this CTA has completed the cell: no other CTA still reads what the cell reads."""

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
    group_sums: Any
    v: Any
    row_max: Any
    bias: Any
    limit: Any
    row_sum: Any
    zo: Any
    top: Any
    factor: Any
    flag: Any
    completed: Any
    source: Any
    row: Any
    page: Any
    tile: Any
    k_rows: Any
    v_rows: Any
    ones: Any
    middle: Any


@T.macro
def registers(p: Any) -> Any:
    """Allocate them."""
    n = p.q_tiles
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
    group_sums = T.alloc_local((n * p.steps * 4,), "float32") if p.value.per_channel else None
    v = T.alloc_local((2,), "float32")
    row_max = T.alloc_local((n * 2,), "float32")
    bias = T.alloc_local((n * 2,), "float32")
    limit = T.alloc_local((n * 2,), "int32")
    row_sum = T.alloc_local((n * 2,), "float32")
    zo = T.alloc_local((groups * n * 4,), "float32")
    top = T.alloc_local((n * 2 + 1,), "float32")
    factor = T.alloc_local((n * 2,), "float32")
    flag = T.alloc_local((1,), "int32")
    completed = T.alloc_local((1,), "int32")
    source = T.alloc_local((1,), "int64")
    row = T.alloc_local((2,), "int64")
    page = T.alloc_local((1,), "int32")
    tile = T.alloc_local((2,), "int32") if p.rows.sink else None
    k_rows = T.alloc_local((p.chunks * 8,), "uint32")
    v_rows = T.alloc_local((p.chunks * 8,), "uint32")
    ones = T.alloc_local((4,), "uint32")
    middle = T.alloc_local((4,), "uint32") if p.value.quantized else None
    return Registers(
        raw, q, qx, qs, ql, score_scale, q_sum, key_zero, words, a, c, x, params, row_factor, prob, pb, o, group_sums, v, row_max, bias,
        limit, row_sum, zo, top, factor, flag, completed, source, row, page, tile, k_rows, v_rows, ones,
        middle,
    )  # fmt: skip


def static(count: int) -> tuple[int, ...]:
    """Indices of a loop that is unrolled while the program is built, so that they are plain numbers in it."""
    return tuple(range(count))


def q_rows(p: Traits) -> tuple[tuple[int, int], ...]:
    """A lane's q rows: (q tile, which of its two q rows there)."""
    return tuple((n, e) for n in range(p.q_tiles) for e in range(2))
