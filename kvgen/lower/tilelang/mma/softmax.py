# mypy: disable-error-code="untyped-decorator"
"""Online softmax with lazy rescaling: probabilities are 2^(score - row_max), and row_max is m + v, where m follows the largest score
of a q row and v the exponent of V's largest scale, which keeps probability * scale in fp16's range. Both move only when a
probability would pass 2^8, or a scale 2^4 times the largest before."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.mask import visible
from kvgen.lower.tilelang.mma.scores import less_row_max, row_centre, row_scale, score, unbiased
from kvgen.lower.tilelang.mma.state import MIN_SCORE, SCALE_FLOOR, q_rows, static

HEADROOM = 8.0
SCALE_HEADROOM = 16.0


def log2(value: Any) -> Any:
    """Good to some bits, which is enough for row_max: a common factor of all probabilities cancels."""
    return T.call_extern("float32", "__log2f", value)


@T.macro
def begin_state(p: Any, r: Any) -> None:
    """No token seen."""
    r.v[0] = SCALE_HEADROOM * 2.0**SCALE_FLOOR
    for i in T.unroll(p.q_tiles * 2):
        r.row_sum[i] = 0.0
        r.row_max[i] = MIN_SCORE
        r.bias[i] = -MIN_SCORE
    for i in T.unroll(p.groups("value") * p.q_tiles * 4):
        r.zo[i] = 0.0
    for i in T.unroll(p.q_tiles * p.steps * 4):
        r.o[i] = 0.0


@T.macro
def raise_row_max(p: Any, r: Any, scale: Any) -> None:
    """Raise m to the maxima in `top` and v to log2 of `scale`, warp-wide, and rescale what was summed."""
    for i in static(p.q_tiles * 2):
        for distance in p.row_distances:
            r.top[i] = T.max(r.top[i], T.shfl_xor(r.top[i], distance))
        r.top[i] = T.max(r.top[i], r.row_max[i] - log2(r.v[0] * T.float32(1.0 / SCALE_HEADROOM)))
    r.factor[0] = T.max(scale, T.float32(2.0**SCALE_FLOOR))
    for distance in p.row_distances:
        r.factor[0] = T.max(r.factor[0], T.shfl_xor(r.factor[0], distance))
    r.v[0] = T.max(r.v[0], r.factor[0] * T.float32(SCALE_HEADROOM))
    for i in static(p.q_tiles * 2):
        r.top[i] = r.top[i] + log2(r.v[0] * T.float32(1.0 / SCALE_HEADROOM))
        r.factor[i] = T.call_extern("float32", "kvgen::ptx::exp2", r.row_max[i] - r.top[i])
        r.row_max[i] = r.top[i]
        r.row_sum[i] = r.row_sum[i] * r.factor[i]
    for group in static(p.groups("value")):
        for n in static(p.q_tiles):
            for i in T.unroll(4):
                at = (group * p.q_tiles + n) * 4 + i
                r.zo[at] = r.zo[at] * r.factor[n * 2 + i % 2]
    for n in static(p.q_tiles):
        for i in T.unroll(p.steps * 4):
            r.o[n * p.steps * 4 + i] = r.o[n * p.steps * 4 + i] * r.factor[n * 2 + i % 2]
        if p.value.per_channel:
            for i in T.unroll(p.steps * 4):
                r.group_sums[n * p.steps * 4 + i] = r.group_sums[n * p.steps * 4 + i] * r.factor[n * 2 + i % 2]


@T.macro
def refresh_bias(p: Any, r: Any) -> None:
    """What is added to every scaled score: -row_max, and what makes `score` the score itself."""
    for n, e in q_rows(p):
        r.bias[n * 2 + e] = less_row_max(p, r, n, e)


@T.macro
def weigh(p: Any, at: Any, r: Any, token: Any) -> None:
    """Probabilities of a sub-tile that begins at position `token`, in p; sums of them and of probability * middle."""
    r.top[p.q_tiles * 2] = largest_scale(p, r)
    exponents(p, at, r, token)
    r.flag[0] = T.any_sync(T.cast(passes(p, r), "int32"))
    if r.flag[0] != 0:
        for n, e in q_rows(p):
            r.top[n * 2 + e] = MIN_SCORE
            for row in static(p.own_rows):
                value = score(p, r, n, row, e, unbiased(p, r, n, e))
                r.top[n * 2 + e] = T.max(r.top[n * 2 + e], visible(p, at, r, token, n, row, e, value))
        raise_row_max(p, r, r.top[p.q_tiles * 2])
        refresh_bias(p, r)
        exponents(p, at, r, token)
    for i in T.unroll(p.q_tiles * p.own_rows * 2):
        r.p[i] = T.call_extern("float32", "kvgen::ptx::exp2", r.p[i])
    for n, e in q_rows(p):
        for row in static(p.own_rows):
            r.row_sum[n * 2 + e] = r.row_sum[n * 2 + e] + r.p[n * 8 + row * 2 + e]
            if p.value.zero and p.scaled_by_token("value"):
                for group in static(p.groups("value")):
                    i = (group * p.q_tiles + n) * 4 + 2 + e
                    r.zo[i] = r.zo[i] + r.p[n * 8 + row * 2 + e] * row_centre(p, r, group, row)


@T.macro
def exponents(p: Any, at: Any, r: Any, token: Any) -> None:
    """p = score - row_max."""
    for n, e in q_rows(p):
        for row in static(p.own_rows):
            r.p[n * 8 + row * 2 + e] = visible(p, at, r, token, n, row, e, score(p, r, n, row, e, r.bias[n * 2 + e]))


def largest_scale(p: Any, r: Any) -> Any:
    """Largest scale of V among the lane's rows."""
    scales = [row_scale(p, "value", r, group, row) for group in range(p.groups("value")) for row in range(p.own_rows)]
    top = scales[0]
    for scale in scales[1:]:
        top = T.max(top, scale)
    return top


def passes(p: Any, r: Any) -> Any:
    """Whether the lane has a score or a scale that row_max must be raised for."""
    top = r.p[0]
    for n, e in q_rows(p):
        for row in range(p.own_rows):
            top = T.max(top, r.p[n * 8 + row * 2 + e])
    return T.Or(top > T.float32(HEADROOM), r.top[p.q_tiles * 2] > r.v[0])
