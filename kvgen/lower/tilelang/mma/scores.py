# mypy: disable-error-code="untyped-decorator"
"""Scores of a sub-tile: K's rows are tokens, the query is the B operand. Affine parts stay out of the loop over channels."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import expand, row_factor, separate
from kvgen.lower.tilelang.mma.instructions import multiply
from kvgen.lower.tilelang.mma.score_modifier import modifier_of
from kvgen.lower.tilelang.mma.state import CODE_UNIT, q_rows, static


@T.macro
def begin_kv_tile(p: Any, at: Any, r: Any, memory: Any, index: Any) -> None:
    """K per channel: the query times the scales, and the sum of query times zero, once for all tokens of the KV tile."""
    for i in T.unroll(p.q_tiles * 4):
        r.key_zero[i] = 0.0
    size = 2 * p.key.params
    slot = at.warp * p.ring_words + p.stages * p.subtile_words + index % p.tiles_in_flight * p.channel_words
    for x in T.unroll(p.chunks):
        for n in static(p.q_tiles):
            for i in T.vectorized(4):
                r.qx[n * 4 + i] = memory[p.query_at + ((n * p.chunks + x) * 32 + at.lane) * 4 + i]
        for y in T.unroll(2):
            for i in T.vectorized(size):
                r.words[i] = memory[slot + ((x * 2 + y) * 4 + at.t) * size + i]
            for n in static(p.q_tiles):
                scale_query(p, at, r, n, x, y)
    for n, e in q_rows(p):
        if p.doubled and not p.key.zero:
            r.key_zero[n * 4 + e] = r.key_zero[n * 4 + e] + T.shfl_xor(r.key_zero[n * 4 + e], 2)
        factor = (1.0 if p.key.zero else -p.offset(p.key)) / CODE_UNIT
        r.key_zero[n * 4 + e] = r.key_zero[n * 4 + e] * (r.score_scale[n * 2 + e] * T.float32(factor))


@T.macro
def scale_query(p: Any, at: Any, r: Any, n: Any, x: Any, y: Any) -> None:
    """One k-step of `begin_kv_tile`; `words` hold its zeros and scales."""
    b = (n * p.chunks + x) * 4 + y * 2
    for half in static(2):
        scale = r.words[half * p.key.params + p.key.params - 1]
        plain = r.qx[n * 4 + y * 2 + half]
        r.qs[b + half] = T.call_extern("uint32", "kvgen::multiply_half2", plain, scale)
        if p.low:
            r.ql[b + half] = T.call_extern("uint32", "kvgen::lost_half2", plain, scale, r.qs[b + half])
        if p.doubled:
            rest = T.call_extern("uint32", "kvgen::lost_half2", plain, scale, r.qs[b + half])
            r.qs[b + half] = T.if_then_else(at.g < 4, r.qs[b + half], rest)
    if p.key.zero:
        multiply(r.words, 0, r.qx, n * 4 + y * 2, r.key_zero, n * 4)
    else:
        multiply(r.ones, 0, r.qs, b, r.key_zero, n * 4)
        if p.low:
            multiply(r.ones, 0, r.ql, b, r.key_zero, n * 4)


@T.macro
def load_codes(p: Any, which: Any, at: Any, r: Any, memory: Any, subtile: Any, vector: Any) -> None:
    """A lane's next 16 bytes of codes."""
    for i in T.vectorized(p.vector(which)):
        r.words[i] = memory[subtile + p.codes(which) + (vector * 32 + at.lane) * p.vector(which) + i]


@T.macro
def load_row_params(p: Any, which: Any, at: Any, r: Any, memory: Any, subtile: Any) -> None:
    """Scales (and zeros) of the lane's rows in every group, where there are scales per token."""
    if p.scaled_by_token(which):
        size = p.own_params(which)
        own = at.t // 2 * size if p.halves else 0
        for group in static(p.groups(which)):
            for i in T.vectorized(size):
                r.params[group * size + i] = memory[subtile + p.params(which) + (group * 8 + at.g) * p.row_params(which) + own + i]


def row_scale(p: Any, which: Any, r: Any, group: Any, row: int, tile: Any = 0) -> Any:
    """Scale of the lane's row g + 8 * `row` of those that it weighs, from 16-row tile `tile` on, as float."""
    at = group * p.own_params(which)
    if not p.scaled_by_token(which):
        return T.float32(1.0)
    if p.layout.operand(which).zero:
        return T.call_extern("float32", "kvgen::half_low", r.params[at + tile * 2 + row])
    return T.call_extern("float32", "kvgen::half_high" if row % 2 else "kvgen::half_low", r.params[at + tile + row // 2])


def row_zero(p: Any, which: Any, r: Any, group: Any, row: int, tile: Any = 0) -> Any:
    """Its zero."""
    return T.call_extern("float32", "kvgen::half_high", r.params[group * p.own_params(which) + tile * 2 + row])


def row_centre(p: Any, r: Any, group: int, row: int) -> Any:
    """What V's middle code stands for in it."""
    return row_zero(p, "value", r, group, row) + row_scale(p, "value", r, group, row) * T.float32(p.centre(p.value))


@T.macro
def score_codes(p: Any, at: Any, r: Any, memory: Any, subtile: Any) -> None:
    """c = codes (or a K of 16 bits) times query; K per token folds each group of channels into x, scaled."""
    for i in T.unroll(p.product_groups * p.q_tiles * 8):
        r.c[i] = 0.0
    for i in T.unroll(p.q_tiles * 8):
        r.x[i] = 0.0
    if p.token_scaled:
        load_row_params(p, "key", at, r, memory, subtile)
    for vector in T.unroll(p.vectors("key")):
        load_codes(p, "key", at, r, memory, subtile, vector)
        for i in T.unroll(p.fragments("key")):
            tile, step = p.fragment("key", vector * p.fragments("key") + i)
            expand(p.key.bits, r, i * p.fragment_words("key"), False)
            multiply_keys(p, r, tile, step)
            if (step + 1) % p.group_steps("key") == 0:
                for n in static(p.q_tiles):
                    separate(p.key.bits, r.c, product_at(p, n, tile, step // p.group_steps("key")))
                    if p.token_scaled and not p.halves:
                        fold_group(p, r, n, tile, step // p.group_steps("key"))
    if p.halves:
        for group in static(p.product_groups):
            own_products(p, at, r, group)


def product_at(p: Any, n: int, tile: Any, group: Any) -> Any:
    """Where the products of a 16-row tile are in c."""
    return ((group if p.halves else 0) * p.q_tiles + n) * 8 + tile * 4


@T.macro
def own_products(p: Any, at: Any, r: Any, group: Any) -> None:
    """x[:4] = the products of the lane's own rows: lanes t < 2 take the first tile, the others the second, and what rounding
    took from the query comes from the lane that has the other q rows."""
    first = product_at(p, 0, 0, group)
    for row in static(2):
        for e in static(2):
            i = row * 2 + e
            r.v[1] = T.if_then_else(at.t < 2, r.c[first + i], r.c[first + 4 + i])
            if p.doubled:
                r.v[1] = r.v[1] + T.shfl_xor(T.if_then_else(at.t < 2, r.c[first + 4 + i], r.c[first + i]), 2)
            if not p.token_scaled:
                r.x[i] = r.v[1]
            else:
                q_sum = r.q_sum[group * 4 + e]
                zero = row_zero(p, "key", r, group, row) if p.key.zero else -row_scale(p, "key", r, group, row) * T.float32(p.offset(p.key))
                r.x[i] = r.x[i] + row_scale(p, "key", r, group, row) * (r.v[1] * r.row_factor[i]) + zero * q_sum


def query_operand(p: Any, r: Any) -> Any:
    """The query that K's operands are multiplied by."""
    if p.channel_scaled:
        return r.qs
    return r.q if p.key.quantized else r.raw


@T.macro
def multiply_keys(p: Any, r: Any, tile: Any, step: Any) -> None:
    """c += the A operand in `a` times the query, and times what rounding took from it."""
    for n in static(p.q_tiles):
        b = n * p.chunks * 4 + step * 2
        for part in static(2 if p.key.bits == 2 else 1):
            c = product_at(p, n, tile + part, step // p.group_steps("key"))
            multiply(r.a, part * 4, query_operand(p, r), b, r.c, c, p.operand_type("key"))
            if p.low:
                multiply(r.a, part * 4, r.ql, b, r.c, c)


@T.macro
def fold_group(p: Any, r: Any, n: Any, tile: Any, group: Any) -> None:
    """x += scale * c + zero * sum of the query, rows of one operand; c starts anew."""
    for row in static(4 if p.key.bits == 2 else 2):
        scale = row_scale(p, "key", r, group, row, tile)
        for e in static(2):
            i = n * 8 + tile * 4 + row * 2 + e
            factor = row_factor(p.key.bits, row // 2, row % 2)
            sum_at = (group * p.q_tiles + n) * 4 + e
            if p.key.zero:
                zero = row_zero(p, "key", r, group, row, tile)
                r.x[i] = r.x[i] + scale * (r.c[i] * T.float32(factor * CODE_UNIT)) + zero * r.q_sum[sum_at]
            else:
                r.x[i] = r.x[i] + scale * (r.c[i] * T.float32(factor * CODE_UNIT) - r.q_sum[sum_at] * T.float32(p.offset(p.key)))
            r.c[i] = 0.0


def score(p: Any, r: Any, n: int, row: int, e: int, bias: Any) -> Any:
    """Logarithm (base 2) of the lane's weight for row g + 8 * `row`, plus `bias`. Multiplied and added at once, lest the compiler
    share the product between two sums, and spend two instructions on each."""
    i = n * 8 + row * 2 + e
    product, factor = r.x[i], r.score_scale[n * 2 + e]
    if p.doubled:
        factor = r.row_factor[i]
    elif not p.token_scaled and not p.halves:
        product = r.c[i] * T.float32(row_factor(p.key.bits, row // 2, row % 2))
    modifier = modifier_of(p)
    if modifier.active:
        return modifier.apply(T.call_extern("float32", "fmaf", product, factor, zero_term(p, r, n, e)), bias)
    return T.call_extern("float32", "fmaf", product, factor, bias)


def unbiased(p: Any, r: Any, n: int, e: int) -> Any:
    """The `bias` that makes `score` the score itself."""
    modifier = modifier_of(p)
    return T.float32(modifier.base) if modifier.active else zero_term(p, r, n, e)


def less_row_max(p: Any, r: Any, n: int, e: int) -> Any:
    """The `bias` that makes `score` the score less row_max."""
    row_max = r.row_max[n * 2 + e]
    return unbiased(p, r, n, e) - row_max if p.channel_scaled or modifier_of(p).active else -row_max


def zero_term(p: Any, r: Any, n: int, e: int) -> Any:
    """The part of a score that all tokens of a KV tile share."""
    return r.key_zero[n * 4 + e] if p.channel_scaled else T.float32(0.0)
