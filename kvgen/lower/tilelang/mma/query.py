# mypy: disable-error-code="untyped-decorator"
"""The query as B operand. Packed GQA: q row c is query token c // group of head c % group. Rows are normalized by powers of two."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import row_factor
from kvgen.lower.tilelang.mma.instructions import multiply
from kvgen.lower.tilelang.mma.score_modifier import scaled
from kvgen.lower.tilelang.mma.state import ALL, CODE_UNIT, static

ONES = 0x3C003C00


@T.macro
def load_query(p: Any, k: Any, at: Any, r: Any) -> None:
    """16-byte loads of 8 neighbouring channels are the B fragments of two k-steps; q rows beyond the query are zero."""
    for n in static(p.q_tiles):
        q_row = at.q_row + n * 8 + (at.g % 4 if p.halves else at.g)
        head = at.head * p.group + q_row % p.group
        r.row[0] = at.batch * k.q_strides[0] + (q_row // p.group) * k.q_strides[1] + head * k.q_strides[2]
        for x in T.unroll(p.chunks):
            for i in T.vectorized(4):
                r.raw[(n * p.chunks + x) * 4 + i] = T.if_then_else(
                    q_row < p.group * k.q_len, k.q[(r.row[0] + x * 4 + at.t) * 4 + i], T.uint32(0)
                )


@T.macro
def normalize_query(p: Any, k: Any, at: Any, r: Any) -> None:
    """q / 2^e in fp16 with its largest element in [1, 2); 2^e goes into the scale of scores."""
    low = "kvgen::bf16_low" if p.bf16 else "kvgen::half_low"
    high = "kvgen::bf16_high" if p.bf16 else "kvgen::half_high"
    for n in static(p.q_tiles):
        r.top[0] = 0.0
        for i in T.unroll(p.chunks * 4):
            r.top[0] = T.max(r.top[0], T.abs(T.call_extern("float32", low, r.raw[n * p.chunks * 4 + i])))
            r.top[0] = T.max(r.top[0], T.abs(T.call_extern("float32", high, r.raw[n * p.chunks * 4 + i])))
        r.top[0] = T.max(r.top[0], T.shfl_xor(r.top[0], 1))
        r.top[0] = T.max(r.top[0], T.shfl_xor(r.top[0], 2))
        r.flag[0] = T.min(T.cast(T.reinterpret(r.top[0], "uint32") >> T.uint32(23), "int32"), 253)
        r.factor[0] = T.reinterpret(T.cast(254 - r.flag[0], "uint32") << T.uint32(23), "float32")
        r.factor[1] = T.reinterpret(T.cast(r.flag[0], "uint32") << T.uint32(23), "float32")
        for i in T.unroll(p.chunks * 4):
            r.q[n * p.chunks * 4 + i] = T.call_extern(
                "uint32", "kvgen::ptx::pack_half2",
                T.call_extern("float32", low, r.raw[n * p.chunks * 4 + i]) * r.factor[0],
                T.call_extern("float32", high, r.raw[n * p.chunks * 4 + i]) * r.factor[0],
            )  # fmt: skip
        for e in static(2):
            power = T.call_extern("float32", "__shfl_sync", T.uint32(ALL), r.factor[1], (at.t * 2 + e) * 4)
            r.score_scale[n * 2 + e] = scaled(p, k.scale) * power * T.float32(CODE_UNIT if p.channel_scaled else 1.0)
    if p.halves:
        for row in static(2):
            for e in static(2):
                own = T.if_then_else(at.t < 2, T.float32(row_factor(p.key.bits, 0, row)), T.float32(row_factor(p.key.bits, 1, row)))
                r.row_factor[row * 2 + e] = own * (r.score_scale[e] if p.channel_scaled else T.float32(CODE_UNIT))


@T.macro
def scale_scores(p: Any, k: Any, r: Any) -> None:
    """A K of 16 bits is multiplied by the query as it was loaded."""
    for i in static(p.q_tiles * 2):
        r.score_scale[i] = scaled(p, k.scale)


@T.macro
def store_query(p: Any, at: Any, r: Any, memory: Any) -> None:
    """Store the fragments to shared memory, where all warps load them for every KV tile: they are the same for all."""
    if at.warp == 0:
        for i in T.unroll(p.q_tiles * p.chunks):
            for j in T.vectorized(4):
                memory[p.query_at + (i * 32 + at.lane) * 4 + j] = r.q[i * 4 + j]
    T.sync_threads()


@T.macro
def set_ones(r: Any) -> None:
    """The A operand that sums columns: rows 0 to 7 are ones."""
    for i in static(2):
        r.ones[i * 2] = T.uint32(ONES)
        r.ones[i * 2 + 1] = T.uint32(0)


@T.macro
def sum_query(p: Any, r: Any) -> None:
    """Sum of the query over the channels of each of K's groups: what a zero per token multiplies."""
    for i in T.unroll(p.groups("key") * p.q_tiles * 4):
        r.q_sum[i] = 0.0
    for n in static(p.q_tiles):
        for step in static(p.steps):
            multiply(r.ones, 0, r.q, n * p.chunks * 4 + step * 2, r.q_sum, (step // p.group_steps("key") * p.q_tiles + n) * 4)
