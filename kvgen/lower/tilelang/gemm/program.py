# mypy: disable-error-code="untyped-decorator"
"""The tile-level kernel. Codes stay codes: scales are on the query or on scores, zeros are sums apart, as in form "mma"."""

from dataclasses import dataclass, replace
from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.gemm.sizes import ROWS, lost_row, memory_words, query_tile_rows
from kvgen.lower.tilelang.gemm.tiles import channel_param, fill_codes, token_param
from kvgen.lower.tilelang.mma.kernel import kernel
from kvgen.lower.tilelang.mma.mask import sees, set_limits
from kvgen.lower.tilelang.mma.query import normalize_query
from kvgen.lower.tilelang.mma.reduction import (
    finish_sums,
    reduce_all_splits,
    reduce_warps,
    state_at,
    store_partial,
    store_warps,
    write_output,
)
from kvgen.lower.tilelang.mma.residual import attend_residual, load_residual
from kvgen.lower.tilelang.mma.ring import find_block
from kvgen.lower.tilelang.mma.rows import packed_end
from kvgen.lower.tilelang.mma.score_modifier import modified, modifier_of
from kvgen.lower.tilelang.mma.softmax import begin_state
from kvgen.lower.tilelang.mma.state import CODE_UNIT, MASKED, MIN_SCORE, SCALE_FLOOR, static
from kvgen.lower.tilelang.mma.step import count_reader, flush
from kvgen.lower.tilelang.traits import Traits


@dataclass(frozen=True)
class Tiles:
    """Shared memory and fragments. Of a q row: `scale` of scores, `row_max`, `v` (log2 of V's largest scale), `row_sum`,
    the zeros' part `zo`, and the `factor` by which the last KV tile rescaled earlier sums."""

    q: Any
    qs: Any
    keys: Any
    values: Any
    probs: Any
    scores: Any
    scale: Any
    row_max: Any
    row_sum: Any
    v: Any
    zo: Any
    factor: Any
    o: Any
    s: Any


@T.macro
def allocate(p: Any) -> Any:
    """The tiles of a CTA."""
    tokens = p.tile_tokens
    q = T.alloc_shared((ROWS, p.dim), "float16")
    qs = T.alloc_shared((query_tile_rows(p), p.dim), "float16")
    keys = T.alloc_shared((tokens, p.dim), "float16")
    values = T.alloc_shared((tokens, p.dim), "float16")
    probs = T.alloc_shared((ROWS, tokens), "float16")
    scores = T.alloc_shared((query_tile_rows(p), tokens), "float32")
    scale = T.alloc_shared((ROWS,), "float32")
    row_max = T.alloc_shared((ROWS,), "float32")
    row_sum = T.alloc_shared((ROWS,), "float32")
    v = T.alloc_shared((ROWS,), "float32")
    zo = T.alloc_shared((ROWS,), "float32")
    factor = T.alloc_shared((ROWS,), "float32")
    o = T.alloc_fragment((ROWS, p.dim), "float32")
    s = T.alloc_fragment((query_tile_rows(p), tokens), "float32")
    return Tiles(q, qs, keys, values, probs, scores, scale, row_max, row_sum, v, zo, factor, o, s)


@T.macro
def begin_tiles(p: Any, at: Any, r: Any, t: Any) -> None:
    """The normalized query as a tile, and q rows that have seen nothing."""
    for i, j in T.Parallel(ROWS, p.dim):
        t.q[i, j] = T.float16(0.0)
        t.o[i, j] = 0.0
    for i, j in T.Parallel(ROWS, p.tile_tokens):
        t.probs[i, j] = T.float16(0.0)
    for i in T.Parallel(ROWS):
        t.row_max[i] = MIN_SCORE
        t.row_sum[i] = 0.0
        t.v[i] = SCALE_FLOOR
        t.zo[i] = 0.0
    T.sync_threads()
    if at.warp == 0:
        for n in static(p.q_tiles):
            q_row = n * 8 + at.g
            if q_row < p.q_rows:
                for word in T.unroll(p.chunks * 4):
                    channel = word // 4 * 32 + at.t * 8 + word % 4 * 2
                    pair = r.q[n * p.chunks * 4 + word]
                    t.q[q_row, channel] = T.cast(T.call_extern("float32", "kvgen::half_low", pair), "float16")
                    t.q[q_row, channel + 1] = T.cast(T.call_extern("float32", "kvgen::half_high", pair), "float16")
            if at.g == 0:
                for e in static(2):
                    t.scale[n * 8 + at.t * 2 + e] = r.score_scale[n * 2 + e] * T.float32(1.0 / CODE_UNIT if p.channel_scaled else 1.0)
    T.sync_threads()


@T.macro
def scale_query(p: Any, k: Any, t: Any, group: Any) -> None:
    """K per channel: the query times the scales in two halves; the second is what rounding took from the first."""
    for i, j in T.Parallel(lost_row(p), p.dim):
        product = T.cast(t.q[i, j], "float32") * channel_param(p, k, group, j, 0)
        t.qs[i, j] = T.cast(product, "float16")
        t.qs[lost_row(p) + i, j] = T.cast(product - T.cast(T.cast(product, "float16"), "float32"), "float16")


@T.macro
def affine_term(p: Any, k: Any, at: Any, r: Any, t: Any, group: Any, q_row: Any) -> None:
    """factor[0] = what a q row's scores get by K's zeros: per channel the whole term, per token the sum of the query."""
    r.factor[0] = 0.0
    for x in T.unroll(p.chunks):
        channel = x * 32 + at.lane
        if p.channel_scaled and p.key.zero:
            r.factor[0] = r.factor[0] + T.cast(t.q[q_row, channel], "float32") * channel_param(p, k, group, channel, 1)
        elif p.channel_scaled:
            scaled = T.cast(t.qs[q_row, channel], "float32") + T.cast(t.qs[lost_row(p) + q_row, channel], "float32")
            r.factor[0] = r.factor[0] - scaled * T.float32(p.offset(p.key))
        else:
            r.factor[0] = r.factor[0] + T.cast(t.q[q_row, channel], "float32") * T.float32(1.0 if p.key.zero else -p.offset(p.key))
    add_lanes(r.factor, 0)


@T.macro
def add_lanes(values: Any, at: Any) -> None:
    """Sum over a warp, in every lane."""
    for distance in static(5):
        values[at] = values[at] + T.shfl_xor(values[at], 1 << distance)


@T.macro
def score_q_row(p: Any, k: Any, r: Any, t: Any, kv_tile: Any, q_row: Any, token: Any, position: Any, limit: Any, i: Any) -> None:
    """x[i] = log2 of the weight of a token of the KV tile at word `kv_tile`; p[i] = V's scale."""
    subtile = kv_tile + token // p.layout.subtile * p.subtile_words
    local = token % p.layout.subtile
    if p.channel_scaled:
        r.x[i] = t.scores[q_row, token] + t.scores[lost_row(p) + q_row, token] + r.factor[0]
    elif p.key.zero:
        r.x[i] = token_param(p, k, "key", subtile, local, 0) * t.scores[q_row, token]
        r.x[i] = r.x[i] + token_param(p, k, "key", subtile, local, 1) * r.factor[0]
    else:
        r.x[i] = token_param(p, k, "key", subtile, local, 0) * (t.scores[q_row, token] + r.factor[0])
    if modifier_of(p).active:
        r.x[i] = modified(p, r.x[i] * t.scale[q_row])
        r.x[i] = T.if_then_else(sees(p, position, limit), r.x[i], T.float32(MASKED))
    else:
        r.x[i] = T.if_then_else(sees(p, position, limit), r.x[i] * t.scale[q_row], T.float32(MASKED))
    r.p[i] = token_param(p, k, "value", subtile, local, 0)


@T.macro
def weigh_q_row(p: Any, k: Any, at: Any, work: Any, r: Any, t: Any, kv_tile: Any, group: Any, first: Any, q_row: Any) -> None:
    """One warp: probabilities of a q row over the KV tile's tokens, a token per lane and sub-tile."""
    limit = packed_end(p, work.blocks) + work.residual - T.max(0, k.q_len - 1 - (at.q_row + q_row) // p.group)
    affine_term(p, k, at, r, t, group, q_row)
    r.top[0] = MIN_SCORE
    r.top[1] = 2.0**SCALE_FLOOR
    for i in static(p.tile_subtiles):
        score_q_row(p, k, r, t, kv_tile, q_row, i * 32 + at.lane, first + i * 32 + at.lane, limit, i)
        r.top[0] = T.max(r.top[0], r.x[i])
        r.top[1] = T.max(r.top[1], r.p[i])
    for distance in static(5):
        for i in static(2):
            r.top[i] = T.max(r.top[i], T.shfl_xor(r.top[i], 1 << distance))
    r.top[0] = T.max(r.top[0], t.row_max[q_row])
    r.top[1] = T.max(T.log2(r.top[1]), t.v[q_row])
    r.factor[1] = T.exp2(t.row_max[q_row] + t.v[q_row] - (r.top[0] + r.top[1]))
    r.row_sum[0] = 0.0
    r.row_sum[1] = 0.0
    for i in static(p.tile_subtiles):
        token = i * 32 + at.lane
        r.x[i] = T.exp2(r.x[i] - (r.top[0] + r.top[1]))
        r.row_sum[0] = r.row_sum[0] + r.x[i]
        t.probs[q_row, token] = T.cast(r.x[i] * r.p[i], "float16")
        r.row_sum[1] = r.row_sum[1] - T.cast(t.probs[q_row, token], "float32") * T.float32(p.centre(p.value))
        if p.value.zero:
            subtile = kv_tile + token // p.layout.subtile * p.subtile_words
            zero = token_param(p, k, "value", subtile, token % p.layout.subtile, 1)
            r.row_sum[1] = r.row_sum[1] + r.x[i] * (zero + r.p[i] * T.float32(p.centre(p.value)))
    add_lanes(r.row_sum, 0)
    add_lanes(r.row_sum, 1)
    T.sync_warp()
    if at.lane == 0:
        t.row_max[q_row] = r.top[0]
        t.v[q_row] = r.top[1]
        t.factor[q_row] = r.factor[1]
        t.row_sum[q_row] = t.row_sum[q_row] * r.factor[1] + r.row_sum[0]
        t.zo[q_row] = t.zo[q_row] * r.factor[1] + r.row_sum[1]


@T.macro
def attend_kv_tile(p: Any, k: Any, at: Any, work: Any, r: Any, t: Any, tile: Any) -> None:
    """Codes of KV tile `tile` to shared memory, scores, probabilities, output."""
    if p.page_blocks:
        r.page[0] = k.table[at.batch * k.table_stride + tile // p.block_tiles // p.page_blocks]
    find_block(p, k, at, r, tile // p.block_tiles)
    start = tile % p.block_tiles * p.tile_subtiles
    kv_tile = r.source[0] * 4 + p.header_words + start * p.subtile_words
    group = r.source[0] * 4 + (start * p.layout.subtile // p.key.group * p.channel_words if p.channel_scaled else 0)
    T.sync_threads()
    fill_codes(p, k, "key", t.keys, kv_tile)
    fill_codes(p, k, "value", t.values, kv_tile)
    if p.channel_scaled:
        scale_query(p, k, t, group)
    T.sync_threads()
    T.clear(t.s)
    T.gemm(t.qs if p.channel_scaled else t.q, t.keys, t.s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
    for i, j in T.Parallel(query_tile_rows(p), p.tile_tokens):
        t.scores[i, j] = t.s[i, j]
    T.sync_threads()
    for index in T.serial(T.max(0, T.ceildiv(p.q_rows - at.warp, p.warps))):
        weigh_q_row(p, k, at, work, r, t, kv_tile, group, tile * p.tile_tokens + p.rows.sink, at.warp + index * p.warps)
    T.sync_threads()
    for i, j in T.Parallel(ROWS, p.dim):
        t.o[i, j] = t.o[i, j] * t.factor[i]
    T.gemm(t.probs, t.values, t.o, policy=T.GemmWarpPolicy.FullCol)


@T.macro
def store_tiles(p: Any, joint: Any, t: Any, memory: Any) -> None:
    """Store the tiles' result as that of one more warp."""
    for i, j in T.Parallel(ROWS, p.dim):
        if i < p.q_rows:
            memory[(p.warps * p.q_rows + i) * p.merge_stride + j] = T.reinterpret(t.o[i, j] + t.zo[i], "uint32")
    for i in T.Parallel(ROWS):
        if i < p.q_rows:
            memory[state_at(joint, p.warps, i)] = T.reinterpret(t.row_max[i] + t.v[i], "uint32")
            memory[state_at(joint, p.warps, i) + 1] = T.reinterpret(t.row_sum[i], "uint32")


@T.macro
def store_result(p: Any, joint: Any, k: Any, at: Any, r: Any, memory: Any) -> None:
    """Reduce over the warps' residuals and the tiles, and store the output, or a partial result where the head is split."""
    for index in T.serial(T.ceildiv(p.q_rows * p.dim // 2, p.threads)):
        item = index * p.threads + at.thread
        if item < p.q_rows * p.dim // 2:
            q_row = item // (p.dim // 2)
            channel = item % (p.dim // 2) * 2
            reduce_warps(joint, r, memory, q_row, channel)
            if at.splits == 1:
                write_output(p, k, at, r, q_row, channel)
            else:
                store_partial(p, k, at, r, q_row, channel)


def states(p: Traits) -> Traits:
    """The traits of the last reduction: the tiles' state is that of one more warp."""
    return replace(p, warps=p.warps + 1)


@T.macro
def attend(p: Any, k: Any, at: Any, work: Any, r: Any, t: Any, memory: Any) -> None:
    """Attend to a work tile, whose query is being loaded. The residual is that of form "mma"."""
    begin_state(p, r)
    set_limits(p, k, at, work, r)
    normalize_query(p, k, at, r)
    begin_tiles(p, at, r, t)
    load_residual(p, k, at, work, r, 0)
    attend_residual(p, k, at, work, r)
    finish_sums(p, r)
    store_warps(states(p), at, r, memory)
    for index in T.serial(work.count):
        attend_kv_tile(p, k, at, work, r, t, work.first + index)


@T.macro
def finish(p: Any, k: Any, at: Any, work: Any, r: Any, t: Any, memory: Any) -> None:
    """Reduce over warps and splits, store, and pack the residual."""
    T.sync_threads()
    count_reader(k, at, r)
    store_tiles(p, states(p), t, memory)
    T.sync_threads()
    store_result(p, states(p), k, at, r, memory)
    reduce_all_splits(p, k, at, r, memory)
    flush(p, k, at, work, r, memory)


def program(p: Traits, planned: bool) -> Any:
    """The program as a TileLang function, with the arguments of form "mma"."""
    return kernel(p, planned, memory_words(p), allocate, attend, finish)
