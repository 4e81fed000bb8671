# mypy: disable-error-code="untyped-decorator"
"""The epilogue: a reduction over the warps of a CTA in shared memory, then over the splits of a head by the last CTA to arrive or by
a cluster. A partial result is (row_max, row_sum, output)."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import separate
from kvgen.lower.tilelang.mma.instructions import packer
from kvgen.lower.tilelang.mma.sinks import join_sink
from kvgen.lower.tilelang.mma.state import MIN_SCORE, q_rows, static
from kvgen.lower.tilelang.mma.step import arrive, count_reader
from kvgen.lower.tilelang.mma.values import true_output

LN2 = float.fromhex("0x1.62e430p-1")
BATCH = 16
"""Partial results that a thread loads before it uses the first."""
CLUSTER = 8
"""CTAs of a cluster, at most."""


@T.macro
def finish_sums(p: Any, r: Any) -> None:
    """Sum over the rows of a warp, and separate mixed output rows."""
    for n, e in q_rows(p):
        for distance in p.row_distances:
            r.row_sum[n * 2 + e] = r.row_sum[n * 2 + e] + T.shfl_xor(r.row_sum[n * 2 + e], distance)
        if p.value.zero and p.scaled_by_token("value"):
            for group in static(p.groups("value")):
                i = (group * p.q_tiles + n) * 4 + 2 + e
                for distance in p.row_distances:
                    r.zo[i] = r.zo[i] + T.shfl_xor(r.zo[i], distance)
    if p.scaled_by_token("value"):
        for i in T.unroll(p.q_tiles * p.steps // p.height("value")):
            separate(p.value.bits, r.o, i * p.height("value") * 4)


def state_at(p: Any, warp: Any, q_row: Any) -> Any:
    """Word of a warp's row_max for a q row; its row_sum follows."""
    return p.warps * p.q_rows * p.merge_stride + (warp * p.q_rows + q_row) * 2


@T.macro
def store_warps(p: Any, at: Any, r: Any, memory: Any) -> None:
    """Store each warp's output and (row_max, row_sum) where the rings were, channels in their own order."""
    for n, e in q_rows(p):
        q_row = n * 8 + at.t * 2 + e
        if q_row < p.q_rows:
            row = (at.warp * p.q_rows + q_row) * p.merge_stride
            for i in T.unroll(p.steps // 2):
                for half in static(4):
                    channel = i * 32 + at.g // 2 * 8 + half * 2 + at.g % 2
                    memory[row + channel] = T.reinterpret(true_output(p, r, n, i * 2, half, e), "uint32")
            if at.g == 0:
                memory[state_at(p, at.warp, q_row)] = T.reinterpret(r.row_max[n * 2 + e], "uint32")
                memory[state_at(p, at.warp, q_row) + 1] = T.reinterpret(r.row_sum[n * 2 + e], "uint32")


@T.macro
def reduce_warps(p: Any, r: Any, memory: Any, q_row: Any, channel: Any) -> None:
    """factor[0], [1] = outputs of two channels of a q row over all warps; top[0], [1] = their row_max and row_sum."""
    state = T.alloc_local((p.warps * 2,), "float32")
    value = T.alloc_local((p.warps * 2,), "float32")
    begin_partials(r)
    for warp in T.unroll(p.warps):
        for i in static(2):
            state[warp * 2 + i] = T.reinterpret(memory[state_at(p, warp, q_row) + i], "float32")
            value[warp * 2 + i] = T.reinterpret(memory[(warp * p.q_rows + q_row) * p.merge_stride + channel + i], "float32")
    add_partials(r, state, value, p.warps)


@T.macro
def write_output(p: Any, k: Any, at: Any, r: Any, q_row: Any, channel: Any) -> None:
    """Divide and store two channels of a q row. A row that sees nothing gives 0 and an LSE of minus infinity, or its learned sink; a NaN
    stays one. With learned sinks `top` and `factor` change."""
    token = (at.q_row + q_row) // p.group
    head = at.head * p.group + (at.q_row + q_row) % p.group
    if token < k.q_len:
        if p.sinks:
            join_sink(k, r, head)
        inverse = T.if_then_else(r.top[1] == 0.0, T.float32(0.0), T.float32(1.0) / r.top[1])
        k.out[(at.batch * k.out_strides[0] + token * k.out_strides[1] + head * k.out_strides[2]) * 4 + channel // 2] = T.call_extern(
            "uint32", packer(p.mma_type), r.factor[0] * inverse, r.factor[1] * inverse
        )
        if k.with_lse != 0 and channel == 0:
            k.lse[(at.batch * (p.kv_heads * p.group) + head) * k.q_len + token] = T.if_then_else(
                r.top[1] == 0.0, -T.infinity("float32"), (r.top[0] + T.log2(r.top[1])) * T.float32(LN2)
            )


@T.macro
def store_partial(p: Any, k: Any, at: Any, r: Any, q_row: Any, channel: Any) -> None:
    """Store two channels of a split's partial result in the workspace."""
    row = (at.first_slot + at.split) * p.q_rows + q_row
    for i in static(2):
        k.partial[row * p.dim + channel + i] = r.factor[i]
    if channel == 0:
        k.stats[row * 2] = r.top[0]
        k.stats[row * 2 + 1] = r.top[1]


@T.macro
def add_partials(r: Any, state: Any, value: Any, count: Any) -> None:
    """Add a batch of partial results, as (row_max, row_sum) and two channels, to those in `top` and `factor`."""
    r.v[0] = r.top[0]
    for s in T.unroll(count):
        r.top[0] = T.max(r.top[0], state[s * 2])
    r.v[0] = T.call_extern("float32", "kvgen::ptx::exp2", r.v[0] - r.top[0])
    r.top[1] = r.top[1] * r.v[0]
    for i in static(2):
        r.factor[i] = r.factor[i] * r.v[0]
    for s in T.unroll(count):
        r.v[0] = T.call_extern("float32", "kvgen::ptx::exp2", state[s * 2] - r.top[0])
        r.top[1] = r.top[1] + r.v[0] * state[s * 2 + 1]
        for i in static(2):
            r.factor[i] = r.factor[i] + r.v[0] * value[s * 2 + i]


@T.macro
def begin_partials(r: Any) -> None:
    """Nothing added yet."""
    r.top[0] = MIN_SCORE
    r.top[1] = 0.0
    r.factor[0] = 0.0
    r.factor[1] = 0.0


@T.macro
def empty_partial(state: Any, value: Any, s: Any) -> None:
    """A partial result of no tokens."""
    state[s * 2] = MIN_SCORE
    state[s * 2 + 1] = 0.0
    value[s * 2] = 0.0
    value[s * 2 + 1] = 0.0


@T.macro
def reduce_splits(p: Any, k: Any, at: Any, r: Any, q_row: Any, channel: Any) -> None:
    """Like `reduce_warps`, over the splits' partial results in the workspace. All loads of a batch are issued before the first is used."""
    state = T.alloc_local((BATCH * 2,), "float32")
    value = T.alloc_local((BATCH * 2,), "float32")
    begin_partials(r)
    for index in T.serial(T.ceildiv(at.splits, BATCH)):
        for s in T.unroll(BATCH):
            empty_partial(state, value, s)
            if index * BATCH + s < at.splits:
                row = (at.first_slot + index * BATCH + s) * p.q_rows + q_row
                load_pair(state, s * 2, k.stats, row * 2)
                load_pair(value, s * 2, k.partial, row * p.dim + channel)
        add_partials(r, state, value, BATCH)


@T.macro
def load_pair(to: Any, at: Any, tensor: Any, source: Any) -> None:
    """Two floats from L2: another CTA wrote them."""
    pair = T.call_extern("int64", "kvgen::load_pair", T.access_ptr(tensor[source], "r"))
    to[at] = T.reinterpret(T.cast(pair, "uint32"), "float32")
    to[at + 1] = T.reinterpret(T.cast(T.shift_right(pair, T.int64(32)), "uint32"), "float32")


@T.macro
def store_for_cluster(p: Any, r: Any, memory: Any, q_row: Any, channel: Any) -> None:
    """Store two channels of a CTA's result where its cluster reads them."""
    for i in static(2):
        memory[p.merged_at + q_row * p.dim + channel + i] = T.reinterpret(r.factor[i], "uint32")
        if channel == 0:
            memory[p.merged_at + p.q_rows * p.dim + q_row * 2 + i] = T.reinterpret(r.top[i], "uint32")


def from_cta(memory: Any, at: Any, rank: Any) -> Any:
    """A float from the shared memory of a CTA of the cluster."""
    return T.call_extern("float32", "kvgen::load_cluster", T.access_ptr(memory[at], "r"), rank)


@T.macro
def reduce_in_cluster(p: Any, k: Any, at: Any, r: Any, memory: Any) -> None:
    """The splits of a head are a cluster: each CTA reduces some of the channels, through distributed shared memory."""
    state = T.alloc_local((CLUSTER * 2,), "float32")
    value = T.alloc_local((CLUSTER * 2,), "float32")
    T.call_extern("int32", "kvgen::cluster_sync")
    for index in T.serial(T.ceildiv(p.q_rows * p.dim // 2, p.threads)):
        item = (index * p.threads + at.thread) * at.splits + at.split
        if item < p.q_rows * p.dim // 2:
            q_row = item // (p.dim // 2)
            channel = item % (p.dim // 2) * 2
            begin_partials(r)
            for s in T.unroll(CLUSTER):
                empty_partial(state, value, s)
                if s < at.splits:
                    for i in static(2):
                        state[s * 2 + i] = from_cta(memory, p.merged_at + p.q_rows * p.dim + q_row * 2 + i, s)
                        value[s * 2 + i] = from_cta(memory, p.merged_at + q_row * p.dim + channel + i, s)
            add_partials(r, state, value, CLUSTER)
            write_output(p, k, at, r, q_row, channel)
    T.call_extern("int32", "kvgen::cluster_sync")


@T.macro
def reduce_all_warps(p: Any, k: Any, at: Any, r: Any, memory: Any) -> None:
    """Reduce over the warps, and store the output, or a partial result where the head is split."""
    finish_sums(p, r)
    T.ptx_wait_group(0)
    T.sync_threads()
    count_reader(k, at, r)
    store_warps(p, at, r, memory)
    T.sync_threads()
    for index in T.serial(T.ceildiv(p.q_rows * p.dim // 2, p.threads)):
        item = index * p.threads + at.thread
        if item < p.q_rows * p.dim // 2:
            q_row = item // (p.dim // 2)
            channel = item % (p.dim // 2) * 2
            reduce_warps(p, r, memory, q_row, channel)
            if at.splits == 1:
                write_output(p, k, at, r, q_row, channel)
            elif p.cluster:
                store_for_cluster(p, r, memory, q_row, channel)
            else:
                store_partial(p, k, at, r, q_row, channel)


@T.macro
def reduce_in_last_cta(p: Any, k: Any, at: Any, r: Any, memory: Any) -> None:
    """The last CTA of a cell to arrive completes it: it reads all partial results. It resets the counter for the next call."""
    T.sync_threads()
    if at.thread == 0:
        memory[0] = arrive(k.arrivals, at.cell)
    T.sync_threads()
    r.completed[0] = T.cast(T.cast(memory[0], "int32") == at.splits - 1, "int32")
    if r.completed[0] != 0:
        if at.thread == 0:
            k.arrivals[at.cell] = 0
        for index in T.serial(T.ceildiv(p.q_rows * p.dim // 2, p.threads)):
            item = index * p.threads + at.thread
            if item < p.q_rows * p.dim // 2:
                reduce_splits(p, k, at, r, item // (p.dim // 2), item % (p.dim // 2) * 2)
                write_output(p, k, at, r, item // (p.dim // 2), item % (p.dim // 2) * 2)


@T.macro
def reduce_all_splits(p: Any, k: Any, at: Any, r: Any, memory: Any) -> None:
    """Reduce over the splits of a cell, which one CTA completes: the last, or the first of a cluster."""
    r.completed[0] = 1
    if at.splits > 1:
        if p.cluster:
            reduce_in_cluster(p, k, at, r, memory)
            r.completed[0] = T.cast(at.split == 0, "int32")
        else:
            reduce_in_last_cta(p, k, at, r, memory)
