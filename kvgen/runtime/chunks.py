"""Rows of a few more query tokens than a kernel takes, on a GPU: each row is cut into pieces of as many as it takes, and all pieces of all
rows are one call of the kernel. A piece is a row of its own that ends where its queries end.

So many passes over packed blocks cost less than dequantizing them for FlashAttention, whose tiles have 128 query rows of one head each.
Where tokens wait in a residual, it is that of one length: there each piece gets one of its own, of what its row's newest pages hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.format.residual import cache_id, residual_rows
from kvgen.runtime.device import copied

if TYPE_CHECKING:
    from kvgen.runtime.calls import Calls
    from kvgen.runtime.paged import PagedCalls, Rows, Store
    from kvgen.runtime.varlen import Queries

PASSES = 32
"""Most passes over a row's packed blocks, each of up to PASS_ROWS query rows of a KV head: so many still took less time than dequantizing
32768 tokens (`benchmarks/gpu_extend.py`).
"""
PASS_ROWS = 16
BATCH = 256
"""Most pieces of a call, by which its workspace is sized."""
RESIDUAL_BYTES = 32 << 20
"""Most memory of the residuals of a call's pieces."""
Cut = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class Chunks:
    """Calls of a kernel over pieces of rows."""

    def __init__(self, calls: PagedCalls, kernel: Calls) -> None:
        attention, layout = kernel.spec.attention, kernel.layout
        self._piece, self._group, self._page, self._dtype = attention.q_len, attention.group, calls.page, kernel.dtype
        self._shape = attention.kv_heads, residual_rows(kernel.spec, layout.tokens).rows, layout.head_dim
        held = 2 * prod(self._shape) * kernel.dtype.itemsize
        self._batch = min(BATCH, max(1, RESIDUAL_BYTES // held)) if held else BATCH
        self._max_len, self._flag, self._device = calls.max_len, calls._overflow, calls.device
        self._launch = kernel.launch_for(self._batch, calls.max_len, self._piece)
        self._workspace, self._plan = calls._allocate(self._launch, self._batch, self._piece)
        self._cuts: dict[tuple[int, ...], Cut] = {}

    @staticmethod
    def of(calls: PagedCalls, kernel: Calls | None) -> Chunks | None:
        """Those of a kernel, by default that of `calls`; None where residuals keep more than what fills no block. Raises ValueError for a
        kernel of another cache.
        """
        own = calls.kernel
        if kernel is not None and cache_id(kernel.spec, kernel.layout) != cache_id(own.spec, own.layout):
            raise ValueError("chunks must be a kernel of the same cache, for more query tokens")
        cache = own.spec.cache
        if cache.sink or cache.local or cache.rollback:
            if kernel is not None:
                raise ValueError("chunks need a format without cache.sink, cache.local and cache.rollback")
            return None
        return Chunks(calls, kernel or own)

    def serves(self, count: int) -> bool:
        """Whether rows of so many query tokens are worth it."""
        return -(-count // self._piece) * -(-self._piece * self._group // PASS_ROWS) <= PASSES

    def attend(self, queries: Queries, store: Store, rows: Rows) -> None:
        """Fill `queries.out`."""
        counts, row, back, take, put = self._cut(queries.counts)
        shape = -1, self._piece, *queries.q.shape[1:]
        q = (queries.q if take is None else queries.q[take]).view(shape)
        out = (queries.out if put is None else torch.empty_like(q)).view(shape)
        lengths, table = (rows.lengths[row] - back).clamp_(min=0), rows.block_table[row]
        newest = self._newest(store, rows, counts, max(queries.counts)) if self._shape[1] else None
        for first in range(0, len(row), self._batch):
            part = slice(first, first + self._batch)
            self._launch.module.plan(lengths[part], self._plan, self._piece, 0, 1, self._max_len, self._flag.address)
            k, v = self._residuals(newest, row[part], lengths[part])
            cache = store.packed, k, v, lengths[part], table[part], None, store.scales
            rest = (out[part], None, queries.sinks, self._workspace, self._plan, queries.scale, self._max_len)
            self._launch.run(q[part], None, cache, rest, self._max_len, self._flag.address, advance=False)
        if put is not None:
            queries.out.copy_(out.flatten(0, 1)[put])

    def _newest(self, store: Store, rows: Rows, counts: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V [rows, kv_heads, tokens, head_dim] of the pages that hold a step's tokens, and where the first of them begins."""
        past = (rows.lengths - counts).clamp_(min=0) // self._page * self._page
        numbers = (past // self._page).long().unsqueeze(1) + torch.arange(1 - (-most // self._page), device=self._device)
        pages = rows.block_table.gather(1, numbers.clamp_(max=rows.block_table.shape[1] - 1))
        heads, _, dim = self._shape
        shape = 2, len(past), heads, pages.shape[1] * self._page, dim
        k, v = torch.empty(shape, dtype=self._dtype, device=self._device)
        held = store.packed, store.k_residual, store.v_residual, rows.lengths - past, pages, rows.slots, store.scales
        self._launch.module.unpack(*held, None, k.transpose(1, 2), v.transpose(1, 2))
        return k, v, past

    def _residuals(self, newest: tuple[Tensor, Tensor, Tensor] | None, row: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals of K and of V of pieces, one after the other."""
        heads, tokens, dim = self._shape
        if newest is None:
            none = torch.empty(len(row), heads, 0, dim, dtype=self._dtype, device=self._device)
            return none, none
        k, v, past = newest
        first = lengths // tokens * tokens - past[row]
        place = (first.unsqueeze(1) + torch.arange(tokens, device=self._device)).clamp_(0, k.shape[2] - 1)
        at = row[:, None, None], torch.arange(heads, device=self._device)[:, None], place[:, None]
        return k[at], v[at]

    def _cut(self, counts: Sequence[int]) -> Cut:
        """The tokens of each row; of each piece its row, and the row's tokens behind it; of each query of a piece its token, and of each
        token its query: these are None where all pieces are whole. If it is not, a row's first piece begins with queries that are no
        tokens of it.
        """
        key = tuple(counts)
        if key not in self._cuts:
            if len(self._cuts) > 8:
                self._cuts.clear()
            row, back, take, put = list[int](), list[int](), list[int](), list[int]()
            at, n = 0, self._piece
            for b, count in enumerate(key):
                pieces = -(-count // n)
                empty = pieces * n - count
                put += range(len(row) * n + empty, (len(row) + pieces) * n)
                take += [at + max(0, i - empty) for i in range(pieces * n)]
                row += [b] * pieces
                back += [n * i for i in reversed(range(pieces))]
                at += count
            whole = len(take) == at
            self._cuts[key] = (
                copied(key, torch.int32, self._device),
                copied(row, torch.int64, self._device), copied(back, torch.int32, self._device),
                None if whole else copied(take, torch.int64, self._device), None if whole else copied(put, torch.int64, self._device),
            )  # fmt: skip
        return self._cuts[key]
