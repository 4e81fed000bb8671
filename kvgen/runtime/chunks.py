"""Rows of a few more query tokens than a kernel takes, on a GPU: each row is cut into pieces of as many as it takes, and all pieces of all
rows are one call of the kernel. A piece is a row of its own that ends where its queries end.

So many passes over packed blocks cost less than dequantizing them for FlashAttention, whose tiles have 128 query rows of one head each.
Where tokens wait in a residual, it is that of one length: there each piece gets one of its own, of what its row's newest pages hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.format.residual import cache_id, residual_rows
from kvgen.runtime.device import copied
from kvgen.spec.dispatch import EQUAL, UNEQUAL

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
USUAL = 64, 2048
"""Pieces, and tokens of each, for which a launch is chosen: with more tokens all take about as long."""
LEVEL = UNEQUAL.tile / EQUAL.tile
"""Longest length of a call's rows over their mean up to which every piece gets as many CTAs: a plan, which shares them out by lengths,
takes so many times as long for as many tokens.
"""
Cut = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Part:
    """The pieces of a call."""

    mine: slice
    """Which of all they are."""
    lengths: Tensor
    """int32 [pieces]: the tokens of each piece's row up to its last query."""
    block_table: Tensor
    """int32 [pieces, pages]."""
    plan: Tensor | None
    """None: every piece gets as many CTAs."""
    held: Tensor | None
    """int64: of each row of their residuals, its place among the tokens of the newest pages."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of some rows, for all layers of a step."""

    take: Tensor | None
    """int64: of each query of a piece, its token; None where that is its place."""
    put: Tensor | None
    """int64: of each token, its query; None likewise."""
    parts: Sequence[Part]
    bound: int
    """Of the lengths, by the host."""
    newest: Rows | None
    """The rows' newest pages as sequences of their own, which hold all tokens that pieces have in residuals; None without residuals."""


class Chunks:
    """Calls of a kernel over pieces of rows."""

    def __init__(self, calls: PagedCalls, kernel: Calls) -> None:
        attention, layout = kernel.spec.attention, kernel.layout
        self._piece, self._group, self._page, self._dtype = attention.q_len, attention.group, calls.page, kernel.dtype
        self._shape = attention.kv_heads, residual_rows(kernel.spec, layout.tokens).rows, layout.head_dim
        held = 2 * prod(self._shape) * kernel.dtype.itemsize
        self._batch = min(BATCH, max(1, RESIDUAL_BYTES // held)) if held else BATCH
        self._max_len, self._flag, self._device = calls.max_len, calls._overflow, calls.device
        self._launch = kernel.launch_for(*USUAL, self._piece)
        self._workspace, plan = calls._allocate(self._launch, self._batch, self._piece)
        self._plan_size = len(plan)
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

    def pieces(self, counts: Sequence[int], rows: Rows, bounds: Sequence[int]) -> Pieces:
        """Those of rows with so many query tokens and, by the host's bounds, at most so many tokens."""
        tokens, row, back, take, put = self._cut(counts)
        bound, newest, held = max(bounds), None, None
        lengths, table = (rows.lengths[row] - back).clamp_(min=0), rows.block_table[:, : -(-bound // self._page)][row]
        if self._shape[1]:
            newest, past = self._newest(rows, tokens, max(counts))
            held = self._held(newest, row, lengths - past[row])
        parts = list[Part]()
        for first in range(0, len(row), self._batch):
            mine, plan = slice(first, first + self._batch), None
            if bound * len(bounds) > LEVEL * sum(bounds):
                plan = torch.empty(self._plan_size, dtype=torch.int32, device=self._device)
                self._launch.module.plan(lengths[mine], plan, self._piece, 0, 1, self._max_len, self._flag.address)
            parts.append(Part(mine, lengths[mine], table[mine], plan, None if held is None else held[mine].flatten()))
        return Pieces(take, put, parts, bound, newest)

    def attend(self, queries: Queries, store: Store, pieces: Pieces) -> None:
        """Fill `queries.out`."""
        shape, (heads, _, dim) = (-1, self._piece, *queries.q.shape[1:]), self._shape
        q = (queries.q if pieces.take is None else queries.q[pieces.take]).view(shape)
        out = (queries.out if pieces.put is None else torch.empty_like(q)).view(shape)
        newest = None if pieces.newest is None else self._dequantized(store, pieces.newest)
        for part in pieces.parts:
            k = v = torch.empty(len(part.lengths), heads, 0, dim, dtype=self._dtype, device=self._device)
            if newest is not None and part.held is not None:
                k, v = newest.index_select(1, part.held).view(2, len(part.lengths), *self._shape)
            cache = store.packed, k, v, part.lengths, part.block_table, None, store.scales
            rest = (out[part.mine], None, queries.sinks, self._workspace, part.plan, queries.scale, pieces.bound)
            self._launch.run(q[part.mine], None, cache, rest, self._max_len, self._flag.address, advance=False)
        if pieces.put is not None:
            queries.out.copy_(out.flatten(0, 1)[pieces.put])

    def _newest(self, rows: Rows, counts: Tensor, most: int) -> tuple[Rows, Tensor]:
        """The pages that hold a step's tokens, and the tokens before them."""
        past = (rows.lengths - counts).clamp_(min=0) // self._page * self._page
        numbers = (past // self._page).long().unsqueeze(1) + torch.arange(1 - (-most // self._page), device=self._device)
        pages = rows.block_table.gather(1, numbers.clamp_(max=rows.block_table.shape[1] - 1))
        return replace(rows, lengths=rows.lengths - past, block_table=pages), past

    def _held(self, newest: Rows, row: Tensor, lengths: Tensor) -> Tensor:
        """Of each piece, whose row has so many tokens in its newest pages by then, where its residual lies among those of all rows."""
        heads, tokens, _ = self._shape
        room = newest.block_table.shape[1] * self._page
        first = (lengths // tokens * tokens).unsqueeze(1)  # pages begin where blocks do
        place = (first + torch.arange(tokens, device=self._device)).clamp_(0, room - 1)
        head = row.unsqueeze(1) * heads + torch.arange(heads, device=self._device)
        return head.unsqueeze(2) * room + place.unsqueeze(1)

    def _dequantized(self, store: Store, newest: Rows) -> Tensor:
        """K and V of the newest pages, [2, rows * kv_heads * tokens, head_dim]."""
        (heads, _, dim), (rows, pages) = self._shape, newest.block_table.shape
        made = torch.empty(2, rows, heads, pages * self._page, dim, dtype=self._dtype, device=self._device)
        packed, k_held, v_held, lengths, table, slots, scales = newest.over(store)
        self._launch.module.unpack(packed, k_held, v_held, lengths, table, slots, scales, None, *made.transpose(2, 3))
        return made.view(2, -1, dim)

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
