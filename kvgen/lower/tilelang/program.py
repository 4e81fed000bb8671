# mypy: disable-error-code="untyped-decorator, valid-type"
"""Flash decoding over packed blocks: one warp attends to a split of a head with `T.gemm`, and stores a partial result.

Codes stay codes. They are expanded to fp16 denormals, code * 2^-24, and in the upper fields of a word to multiples of that (`field_unit`).
Scales move into the query where K has them per channel, else into scores and weights; zeros are sums apart. All matrices have their
channels in the order of matrix instructions (`channel`).

A matrix instruction has 16 query rows. Rows 0 to 7 are the CTA's, rows 8 to 15 hold what rounding to 16 bits takes from them, so that
products are those of 22 bits.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from kvgen.format.layout import Operand
from kvgen.lower.tilelang.sizes import Q_ROWS, ROW_BYTES, WARP, Sizes

MIN_SCORE = -(2.0**100)
"""Stands for minus infinity: finite, so that differences of it are numbers."""
MASKED = -(2.0**101)
CODE_UNIT = 2.0**24
PLAN_HEADER = 8
WORK_TILE = 8
"""int32 of a plan before the workers' ranges, and of a work tile (kvgen/schedule/plan.hpp)."""
LEAST_SCALE = 2.0**-12
"""The least scale of V that weights leave room for: unquantized tokens have it, and constant ones, whose scales are 0."""
HEADROOM = 3.0
"""log2 of what weights times V's scales may become before `row_max` is raised. Weights of unquantized tokens become 2^HEADROOM /
LEAST_SCALE, which float16 must hold."""
RESIDUAL_TILE = 16
"""Unquantized tokens that are attended at a time. The splits take such tiles in turn."""


def array(dtype: str) -> Any:
    """A flat tensor of any length."""
    return T.Tensor((T.dynamic("extent", "int64"),), dtype)


def program(p: Sizes, planned: bool) -> Any:
    """The program as a TileLang function, for all batches and lengths. The grid is (heads of the batch, splits), or the workers of a plan.
    A head is a sequence, a KV head and a run of eight of its query rows. Strides count 16 bytes. The caller's new tokens
    begin `k_new` and `v_new` behind the residual.
    """

    @T.prim_func
    def attend(
        q: array(p.dtype), packed: T.Tensor((T.dynamic("packed_rows", "int64"), 8), "float16"), table: array("int32"),
        lengths: array("int32"), k_residual: array(p.dtype), v_residual: array(p.dtype), plan: array("int32"),
        partial: array("float32"), stats: array("float32"),
        q_batch: T.int64, q_token: T.int64, q_head: T.int64,
        k_new: T.int64, k_batch: T.int64, k_token: T.int64, k_head: T.int64,
        v_new: T.int64, v_batch: T.int64, v_token: T.int64, v_head: T.int64,
        packed_outer: T.int64, packed_head: T.int64, table_stride: T.int64,
        q_len: T.int32, fresh: T.int32, runs: T.int32, ctas: T.int32, splits: T.int32, tiles_at: T.int32, scale: T.float32,
    ) -> None:  # fmt: skip
        with T.Kernel(ctas, splits, threads=WARP) as (cta, split):
            T.annotate_min_blocks_per_sm(p.ctas_per_sm)
            T.call_extern("handle", "kvgen::ptx::griddepcontrol_launch_dependents")  # the finishing kernel, which waits for the end
            f = allocate(p)
            k = SimpleNamespace(
                q=q, packed=packed, table=table, k_residual=k_residual, v_residual=v_residual, partial=partial, stats=stats,
                q_strides=(q_batch, q_token, q_head), k_new=(k_new, k_batch, k_token, k_head), v_new=(v_new, v_batch, v_token, v_head),
                packed_strides=(packed_outer, packed_head, table_stride), q_len=q_len, fresh=fresh, scale=scale,
            )  # fmt: skip
            if planned:
                for index in T.serial(plan[PLAN_HEADER + cta * 2], plan[PLAN_HEADER + cta * 2 + 1]):
                    attend_split(p, k, planned_work(plan, (tiles_at + index) * WORK_TILE, runs), f)
            else:
                attend_split(p, k, static_work(p, lengths, cta, runs, split, splits), f)

    return attend


def work_of(n: Any) -> SimpleNamespace:
    """A split `split` of `splits` of a head: its sequence of `length` cached tokens, KV head, first query row, slot of its result, and its
    KV tiles [first, first + count). These are registers, because TileLang computes an expression wherever it is used.
    """
    names = ("batch", "head", "q_row", "length", "split", "splits", "slot", "first", "count")
    return SimpleNamespace(**{name: n[index] for index, name in enumerate(names)})


@T.macro
def static_work(p: Any, lengths: Any, cta: Any, runs: Any, split: Any, splits: Any) -> Any:
    """The splits share the packed KV tiles evenly."""
    n = T.alloc_local((9,), "int32")
    n[0] = T.truncdiv(cta, p.kv_heads * runs)
    n[1] = T.truncdiv(T.truncmod(cta, p.kv_heads * runs), runs)
    n[2] = T.truncmod(cta, runs) * Q_ROWS
    n[3] = lengths[n[0]]
    n[4] = split
    n[5] = splits
    n[6] = cta * splits + split
    tiles = T.truncdiv(n[3], p.layout.tokens) * p.block_tiles
    n[8] = T.truncdiv(tiles + splits - 1, splits)
    n[7] = split * n[8]
    n[8] = T.max(0, T.min(n[8], tiles - n[7]))
    return work_of(n)


@T.macro
def planned_work(plan: Any, at: Any, runs: Any) -> Any:
    """A work tile of the plan, whose length it has too: `lengths` may have advanced since."""
    n = T.alloc_local((9,), "int32")
    n[0] = plan[at]
    n[1] = T.truncdiv(plan[at + 1], runs)
    n[2] = T.truncmod(plan[at + 1], runs) * Q_ROWS
    n[3] = plan[at + 7]
    n[4] = plan[at + 4]
    n[5] = plan[at + 5]
    n[6] = plan[at + 6]
    n[7] = plan[at + 2]
    n[8] = plan[at + 3] - n[7]
    return work_of(n)


def accumulator(x: Any) -> T.Fragment:
    """Layout of the first eight rows of an accumulator: a lane has pairs of columns of one row."""
    return T.Fragment(
        (Q_ROWS, x.shape[1]),
        forward_thread_fn=lambda row, column: row * 4 + column % 8 // 2,
        forward_index_fn=lambda row, column: row * 0 + column // 8 * 2 + column % 2,
    )


@T.macro
def allocate(p: Any) -> Any:
    """What a warp holds. Of a KV tile: `ring` in shared memory, `query` as it is multiplied with codes, `zeros` of channels, `offset`
    of a query row's scores. Of a step: codes `keys` and `values`, `products` of keys, scores and then weights `x`, V's `scales`, `weights`
    of codes. Over all: the `normal` query and its `row_scale`, `row_max` (log2), `row_sum`, the zeros' part `zero_sum` of the output,
    and `out`, in units of codes. Those of a tile of the residual begin with `res`.
    """
    ring = T.alloc_shared((p.stages, p.tile_rows + p.params_rows, 8), "float16")
    normal = T.alloc_fragment((2 * Q_ROWS, p.dim), "float16")
    query = T.alloc_fragment((2 * Q_ROWS, p.dim), "float16")
    wide = T.alloc_fragment((Q_ROWS, p.dim), "float32")
    row_scale = T.alloc_fragment((Q_ROWS,), "float32")
    offset = T.alloc_fragment((Q_ROWS,), "float32")
    keys = T.alloc_fragment((p.step, p.dim), "float16")
    values = T.alloc_fragment((p.step, p.dim), "float16")
    products = T.alloc_fragment((2 * Q_ROWS, p.step), "float32")
    x = T.alloc_fragment((Q_ROWS, p.step), "float32")
    scales = T.alloc_fragment((Q_ROWS, p.step), "float32")
    scale = T.alloc_fragment((Q_ROWS,), "float32")
    zeros = T.alloc_fragment((8, p.dim), "float16")
    offsets = T.alloc_fragment((2 * Q_ROWS, 8), "float32")
    offset_x = T.alloc_fragment((Q_ROWS, 8), "float32")
    flag = T.alloc_local((1,), "int32")
    zero_x = T.alloc_fragment((Q_ROWS, p.step), "float32")
    weights = T.alloc_fragment((2 * Q_ROWS, p.step), "float16")
    row_max = T.alloc_fragment((Q_ROWS,), "float32")
    before = T.alloc_fragment((Q_ROWS,), "float32")
    row_sum = T.alloc_fragment((Q_ROWS,), "float32")
    zero_sum = T.alloc_fragment((Q_ROWS,), "float32")
    part = T.alloc_fragment((Q_ROWS,), "float32")
    out = T.alloc_fragment((2 * Q_ROWS, p.dim), "float32")
    res_query = T.alloc_fragment((2 * Q_ROWS, p.dim), p.dtype)
    res_keys = T.alloc_fragment((RESIDUAL_TILE, p.dim), p.dtype)
    res_values = T.alloc_fragment((RESIDUAL_TILE, p.dim), p.dtype)
    res_products = T.alloc_fragment((2 * Q_ROWS, RESIDUAL_TILE), "float32")
    res_x = T.alloc_fragment((Q_ROWS, RESIDUAL_TILE), "float32")
    res_weights = T.alloc_fragment((2 * Q_ROWS, RESIDUAL_TILE), p.dtype)
    T.annotate_layout({x: accumulator(x) for x in (wide, x, zero_x, scales, offset_x, res_x)})
    return SimpleNamespace(
        ring=ring, normal=normal, query=query, wide=wide, row_scale=row_scale, offset=offset, keys=keys, values=values, products=products,
        x=x, scales=scales, scale=scale, zeros=zeros, offsets=offsets, offset_x=offset_x, flag=flag, zero_x=zero_x, weights=weights,
        row_max=row_max, before=before, row_sum=row_sum, zero_sum=zero_sum, part=part, out=out, res_query=res_query, res_keys=res_keys,
        res_values=res_values, res_products=res_products, res_x=res_x, res_weights=res_weights,
    )  # fmt: skip


def channel(j: Any) -> Any:
    """The channel of column j of a matrix: lanes of a quad have eight neighbouring channels each of every 32."""
    return j // 32 * 32 + j % 8 // 2 * 8 + j // 16 % 2 * 4 + j // 8 % 2 * 2 + j % 2


def field_unit(bits: int, row: Any) -> Any:
    """What a code of row `row` of K's or V's 16-row side is a multiple of, inverted: rows g, g + 8, ... of a word's fields."""
    if bits == 8:
        return T.float32(CODE_UNIT)
    field = row // 8 % (8 // bits)
    return T.reinterpret(T.cast((127 + 24 - bits * field) * 2**23, "int32"), "float32")


@T.macro
def attend_split(p: Any, k: Any, work: Any, f: Any) -> None:
    """Attend to the split's KV tiles and its part of the residual, and store the partial result."""
    T.sync_threads()
    for i in T.unroll(p.stages):
        copy_kv_tile(p, k, work, f, i)
    load_residual(p, k, work, f, work.split * RESIDUAL_TILE)
    begin(p, k, work, f)
    attend_residual(p, k, work, f)
    for i in T.serial(work.count):
        T.ptx_wait_group((p.stages - 1) * p.copies)
        T.sync_threads()
        slot = T.truncmod(i, p.stages)
        if p.layout.key.per_channel:
            scale_query(p, f, slot)
        for step in T.serial(p.kv_tile // p.step):
            token = (work.first + i) * p.kv_tile + step * p.step
            score_keys(p, k, work, f, slot, step, token)
            load_scales(p, f, slot, step)
            update_softmax(p, f, f.x)
            add_values(p, f, slot, step)
        T.sync_threads()
        copy_kv_tile(p, k, work, f, i + p.stages)
    store(p, k, work, f)


@T.macro
def begin(p: Any, k: Any, work: Any, f: Any) -> None:
    """Load the query, normalize it to fp16 below 1 by a power of two, and reset the state."""
    T.fill(f.row_max, MIN_SCORE)
    T.clear(f.row_sum)
    T.clear(f.zero_sum)
    T.clear(f.out)
    lane = T.get_thread_binding(0)
    row = work.q_row + lane // 4
    head = work.head * p.group + T.truncmod(row, p.group)
    at = (work.batch * k.q_strides[0] + T.truncdiv(row, p.group) * k.q_strides[1] + head * k.q_strides[2] + lane % 4) * 8
    T.call_extern("handle", f"kvgen::load_query<{p.dim}>", f.res_query.data, T.address_of(k.q[at]), row < p.group * k.q_len)
    for r, j in T.Parallel(Q_ROWS, p.dim):
        f.wide[r, j] = T.cast(f.res_query[r, j], "float32")
    T.reduce_absmax(f.wide, f.part, dim=1)
    for r in T.Parallel(Q_ROWS):
        exponent = T.max(T.reinterpret(f.part[r], "uint32") >> 23, T.uint32(1))
        f.row_scale[r] = k.scale * T.reinterpret((exponent + 1) << 23, "float32")
        f.part[r] = T.reinterpret((T.uint32(253) - exponent) << 23, "float32")
    for r, j in T.Parallel(Q_ROWS, p.dim):
        f.wide[r, j] = f.wide[r, j] * f.part[r]
    split_halves(f.wide, f.query, p.dim)
    if p.layout.key.per_channel:
        for r, j in T.Parallel(2 * Q_ROWS, p.dim):
            f.normal[r, j] = f.query[r, j]
    else:
        T.reduce_sum(f.wide, f.offset, dim=1)


@T.macro
def split_halves(wide: Any, halves: Any, columns: Any) -> None:
    """Rows 0 to 7 of `halves` = `wide`, rounded, and rows 8 to 15 what that took from it."""
    for r, j in T.Parallel(Q_ROWS, columns):
        halves[r, j] = T.cast(wide[r, j], halves.dtype)
    for r, j in T.Parallel(Q_ROWS, columns):
        halves[r + Q_ROWS, j] = T.cast(wide[r, j] - T.cast(T.cast(wide[r, j], halves.dtype), "float32"), halves.dtype)


@T.macro
def load_residual(p: Any, k: Any, work: Any, f: Any, first: Any) -> None:
    """Start to load unquantized tokens from `first` on. The last one stands in for those behind it."""
    if first < T.truncmod(work.length, p.layout.tokens) + k.fresh:
        load_rows(p, k, work, f.res_keys, k.k_residual, k.k_new, first)
        load_rows(p, k, work, f.res_values, k.v_residual, k.v_new, first)


@T.macro
def load_rows(p: Any, k: Any, work: Any, rows: Any, held: Any, new: Any, first: Any) -> None:
    """A lane loads from tokens `lane // 4` and `lane // 4 + 8` of the tile: the residual has the first of them, the caller this step's."""
    at = T.alloc_local((2,), "int64")
    old = T.truncmod(work.length, p.layout.tokens)
    lane = T.get_thread_binding(0)
    for half in T.unroll(2):
        token = T.min(first + half * 8 + lane // 4, old + k.fresh - 1)
        at[half] = T.cast((work.batch * p.kv_heads + work.head) * p.layout.tokens + token, "int64") * (p.dim // 8)
        if token >= old:
            at[half] = new[0] + work.batch * new[1] + (token - old) * new[2] + work.head * new[3]
        at[half] = (at[half] + lane % 4) * 8
    T.call_extern("handle", f"kvgen::load_rows<{p.dim}>", rows.data, T.address_of(held[at[0]]), T.address_of(held[at[1]]))


@T.macro
def attend_residual(p: Any, k: Any, work: Any, f: Any) -> None:
    """Attend to the split's unquantized tokens; then `out` is in units of codes."""
    rest = T.truncmod(work.length, p.layout.tokens) + k.fresh
    tiles = T.truncdiv(rest + RESIDUAL_TILE - 1, RESIDUAL_TILE)
    for tile in T.serial(T.truncdiv(tiles - work.split + work.splits - 1, work.splits)):
        first = (work.split + tile * work.splits) * RESIDUAL_TILE
        T.clear(f.res_products)
        T.gemm(f.res_query, f.res_keys, f.res_products, transpose_B=True)
        for r, t in T.Parallel(Q_ROWS, RESIDUAL_TILE):
            seen = first + t < rest - hidden(p, k, work, r)
            f.res_x[r, t] = T.if_then_else(seen, f.res_products[r, t] * k.scale, T.float32(MASKED))
        for r in T.Parallel(Q_ROWS):
            f.scale[r] = T.float32(LEAST_SCALE)
        update_softmax(p, f, f.res_x)
        split_halves(f.res_x, f.res_weights, RESIDUAL_TILE)
        T.call_extern("handle", f"kvgen::transpose_rows<{p.dim}>", f.res_values.data)
        T.gemm(f.res_weights, f.res_values, f.out)
        load_residual(p, k, work, f, first + work.splits * RESIDUAL_TILE)
    for half in (0, Q_ROWS):
        for r, j in T.Parallel(Q_ROWS, p.dim):
            f.out[r + half, j] = f.out[r + half, j] * (T.float32(1.0) / field_unit(p.layout.value.width, j))


def hidden(p: Sizes, k: Any, work: Any, r: Any) -> Any:
    """The last tokens of the sequence that query row r does not see."""
    return T.max(0, k.q_len - 1 - T.truncdiv(work.q_row + r, p.group))


@T.macro
def copy_kv_tile(p: Any, k: Any, work: Any, f: Any, i: Any) -> None:
    """Start to copy the split's i-th KV tile, and the channel params of its group of tokens, if there is one."""
    if i < work.count:
        block = T.truncdiv(work.first + i, p.block_tiles)
        part = T.truncmod(work.first + i, p.block_tiles)
        outer = k.table[work.batch * k.packed_strides[2] + T.truncdiv(block, p.page_blocks)] if p.page_blocks else work.batch
        inner = T.truncmod(block, p.page_blocks) if p.page_blocks else block
        row = outer * k.packed_strides[0] + work.head * k.packed_strides[1] + inner * (p.layout.block_bytes // ROW_BYTES)
        slot = T.truncmod(i, p.stages)
        copy_rows(k, f, slot, row + p.layout.header_bytes // ROW_BYTES + part * p.tile_rows, 0, p.tile_rows)
        copy_rows(k, f, slot, row + T.truncdiv(part * p.kv_tile, p.layout.key.group) * p.params_rows, p.tile_rows, p.params_rows)
    else:
        for _ in T.unroll(p.copies):
            T.ptx_commit_group()


@T.macro
def copy_rows(k: Any, f: Any, slot: Any, row: Any, to: Any, rows: Any) -> None:
    """Start to copy `rows` rows of packed memory, a row per lane at a time. What is left may be rows that T.async_copy cannot share among
    all lanes.
    """
    whole = rows // WARP * WARP
    if whole > 0:
        T.async_copy(k.packed[row : row + whole, 0:8], f.ring[slot, to : to + whole, 0:8])
    if rows > whole:
        name = f"kvgen::copy_rows<{rows - whole}>"
        T.call_extern("handle", name, T.address_of(f.ring[slot, to + whole, 0]), T.address_of(k.packed[row + whole, 0]))
        T.ptx_commit_group()


def token_param(p: Sizes, f: SimpleNamespace, slot: Any, step: Any, which: Any, t: Any, kind: int) -> Any:
    """K's or V's scale (kind 0) or zero (kind 1) of token t of a step."""
    half = (t % 8 * 4 + t // 8 % 4) * p.layout.operand(which).params + kind
    row = t // 32 * p.subtile_rows + p.layout.token_params_offset(which) // ROW_BYTES + half // 8
    return T.cast(f.ring[slot, step * (p.step // 32 * p.subtile_rows) + row, half % 8], "float32")


@T.macro
def scale_query(p: Any, f: Any, slot: Any) -> None:
    """K per channel: the query times the scales, and the part of scores that the zeros add."""
    name = f"kvgen::scale_query<{p.dim}, {'true' if p.layout.key.zero else 'false'}>"
    T.call_extern("handle", name, f.query.data, f.zeros.data, f.normal.data, T.address_of(f.ring[slot, p.tile_rows, 0]))
    T.clear(f.offsets)
    T.gemm(f.normal, f.zeros, f.offsets, transpose_B=True)
    for r, j in T.Parallel(Q_ROWS, 8):
        f.offset_x[r, j] = f.offsets[r, j]
    for r, j in T.Parallel(Q_ROWS, 8):
        f.offset_x[r, j] = f.offset_x[r, j] + f.offsets[r + Q_ROWS, j]
    T.reduce_max(f.offset_x, f.offset, dim=1)
    for r in T.Parallel(Q_ROWS):
        f.offset[r] = f.offset[r] * f.row_scale[r] * T.float32(1.0 if p.layout.key.zero else -(2.0 ** (p.layout.key.width - 1)))


@T.macro
def score_keys(p: Any, k: Any, work: Any, f: Any, slot: Any, step: Any, token: Any) -> None:
    """x = scores of a step's tokens, the first of which is at position `token`, in units of log2."""
    key = p.layout.key
    name = f"kvgen::expand_keys<{key.width}, {p.dim}, {p.step}, {p.layout.subtile_bytes}>"
    T.call_extern("handle", name, f.keys.data, T.address_of(f.ring[slot, step * (p.step // 32) * p.subtile_rows, 0]))
    T.clear(f.products)
    T.gemm(f.query, f.keys, f.products, transpose_B=True)
    for r, t in T.Parallel(Q_ROWS, p.step):
        f.x[r, t] = f.products[r, t]
    for r, t in T.Parallel(Q_ROWS, p.step):
        f.x[r, t] = f.x[r, t] + f.products[r + Q_ROWS, t]
    for r, t in T.Parallel(Q_ROWS, p.step):
        if key.per_channel:
            f.x[r, t] = f.x[r, t] * (f.row_scale[r] * field_unit(key.width, t)) + f.offset[r]
        elif key.zero:
            f.x[r, t] = f.row_scale[r] * (
                token_param(p, f, slot, step, "key", t, 0) * (f.x[r, t] * field_unit(key.width, t))
                + token_param(p, f, slot, step, "key", t, 1) * f.offset[r]
            )
        else:
            f.x[r, t] = (
                f.row_scale[r]
                * token_param(p, f, slot, step, "key", t, 0)
                * (f.x[r, t] * field_unit(key.width, t) + f.offset[r] * T.float32(-(2.0 ** (p.layout.key.width - 1))))
            )
    if p.q_len > 1:
        for r, t in T.Parallel(Q_ROWS, p.step):
            f.x[r, t] = T.if_then_else(token + t < work.length + k.fresh - hidden(p, k, work, r), f.x[r, t], T.float32(MASKED))


@T.macro
def update_softmax(p: Any, f: Any, x: Any) -> None:
    """x = weights of scores x, 2^(x - row_max). `row_max` is raised when a weight times `scale`, the largest of V's scales, passes the
    headroom; then what was summed is rescaled.
    """
    columns = x.shape[1]
    T.reduce_max(x, f.part, dim=1)
    for r in T.Parallel(Q_ROWS):
        f.before[r] = f.row_max[r]
        f.part[r] = f.part[r] + T.log2(f.scale[r])
        f.row_max[r] = T.if_then_else(f.part[r] > f.row_max[r] + HEADROOM, f.part[r], f.row_max[r])
        f.flag[0] = T.any_sync(T.cast(f.row_max[r] > f.before[r], "int32"))
    if f.flag[0] != 0:
        for r in T.Parallel(Q_ROWS):
            f.before[r] = exp2(f.before[r] - f.row_max[r])
            f.row_sum[r] = f.row_sum[r] * f.before[r]
            f.zero_sum[r] = f.zero_sum[r] * f.before[r]
        for r, j in T.Parallel(Q_ROWS, p.dim):
            f.out[r, j] = f.out[r, j] * f.before[r]
        for r, j in T.Parallel(Q_ROWS, p.dim):
            f.out[r + Q_ROWS, j] = f.out[r + Q_ROWS, j] * f.before[r]
    for r, t in T.Parallel(Q_ROWS, columns):
        x[r, t] = exp2(x[r, t] - f.row_max[r])
    T.reduce_sum(x, f.part, dim=1)
    for r in T.Parallel(Q_ROWS):
        f.row_sum[r] = f.row_sum[r] + f.part[r]


def exp2(x: Any) -> Any:
    """One instruction, where T.exp2 takes care of results that are denormals."""
    return T.call_extern("float32", "kvgen::ptx::exp2", x)


@T.macro
def load_scales(p: Any, f: Any, slot: Any, step: Any) -> None:
    """V's scales of a step's tokens, and the largest of them and LEAST_SCALE."""
    for r, t in T.Parallel(Q_ROWS, p.step):
        f.scales[r, t] = token_param(p, f, slot, step, "value", t, 0)
    T.fill(f.scale, LEAST_SCALE)
    T.reduce_max(f.scales, f.scale, dim=1, clear=False)


@T.macro
def add_values(p: Any, f: Any, slot: Any, step: Any) -> None:
    """out += weights times scales, times codes of V. `zero_sum` += weights times zeros."""
    value = p.layout.value
    name = f"kvgen::expand_values<{value.width}, {p.dim}, {p.step}, {p.layout.subtile_bytes}>"
    row = step * (p.step // 32) * p.subtile_rows + p.layout.codes_offset("value") // 16
    T.call_extern("handle", name, f.values.data, T.address_of(f.ring[slot, row, 0]))
    for r, t in T.Parallel(Q_ROWS, p.step):
        if value.zero:
            f.zero_x[r, t] = f.x[r, t] * (f.scales[r, t] * least_code(value, t) + token_param(p, f, slot, step, "value", t, 1))
        else:
            f.zero_x[r, t] = f.x[r, t] * (f.scales[r, t] * least_code(value, t))
    for r, t in T.Parallel(Q_ROWS, p.step):
        f.x[r, t] = f.x[r, t] * f.scales[r, t]
    split_halves(f.x, f.weights, p.step)
    T.gemm(f.weights, f.values, f.out)
    T.reduce_sum(f.zero_x, f.part, dim=1)
    for r in T.Parallel(Q_ROWS):
        f.zero_sum[r] = f.zero_sum[r] + f.part[r]


def least_code(value: Operand, t: Any) -> Any:
    """What is added to V's codes of token t as the operand has them. Those of the first eight of 16 tokens are less by the largest."""
    lowest = 0.0 if value.zero else -(2.0 ** (value.width - 1))
    return T.if_then_else(t % 16 < 8, T.float32(lowest + 2**value.width - 1), T.float32(lowest))


@T.macro
def store(p: Any, k: Any, work: Any, f: Any) -> None:
    """Store the partial result: sums of weighted values, and their row_max and row_sum."""
    for r, j in T.Parallel(Q_ROWS, p.dim):
        f.wide[r, j] = f.out[r, j]
    for r, j in T.Parallel(Q_ROWS, p.dim):
        f.wide[r, j] = (f.wide[r, j] + f.out[r + Q_ROWS, j]) * field_unit(p.layout.value.width, j) + f.zero_sum[r]
    row = T.cast(work.slot, "int64") * Q_ROWS
    for r, j in T.Parallel(Q_ROWS, p.dim):
        if work.q_row + r < p.group * k.q_len:
            k.partial[(row + r) * p.dim + channel(j)] = f.wide[r, j]
    for r in T.Parallel(Q_ROWS):
        k.stats[(row + r) * 2] = f.row_max[r]
    for r in T.Parallel(Q_ROWS):
        k.stats[(row + r) * 2 + 1] = f.row_sum[r]
