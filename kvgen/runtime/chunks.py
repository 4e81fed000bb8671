"""Rows of a few more query tokens than a kernel takes, on a GPU: each row is cut into pieces of as many as it takes, and all pieces of all
rows are one call of the kernel. A piece is a row of its own that ends where its queries end.

So many passes over packed blocks cost less than dequantizing them for FlashAttention, whose tiles have 128 query rows of one head each.
Where tokens wait in a residual, it is that of one length: a piece takes for one the page in which it ends, dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    slots: Tensor | None
    """int32 [pieces]: the newest page in which each of them ends; None without residuals."""


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
    """The rows' newest pages, each a sequence of its own, which hold all tokens that pieces have in residuals; None without these."""


class Chunks:
    """Calls of a kernel over pieces of rows."""

    def __init__(self, calls: PagedCalls, kernel: Calls) -> None:
        attention, layout = kernel.spec.attention, kernel.layout
        self._piece, self._group, self._page, self._dtype = attention.q_len, attention.group, calls.page, kernel.dtype
        self._shape = attention.kv_heads, residual_rows(kernel.spec, layout.tokens).rows, layout.head_dim
        self._max_len, self._flag, self._device = calls.max_len, calls._overflow, calls.device
        self._launch = kernel.launch_for(*USUAL, self._piece)
        self._workspace, plan = calls._allocate(self._launch, BATCH, self._piece)
        self._plan_size = len(plan)
        self._cuts: dict[tuple[int, ...], Cut] = {}

    @staticmethod
    def of(calls: PagedCalls, kernel: Calls | None) -> Chunks | None:
        """Those of a kernel, by default that of `calls`, if it can have any. Raises ValueError for one that cannot, or of another cache."""
        own = calls.kernel
        if kernel is not None and cache_id(kernel.spec, kernel.layout) != cache_id(own.spec, own.layout):
            raise ValueError("chunks must be a kernel of the same cache, for more query tokens")
        if Chunks.fit(own, calls.page):
            return Chunks(calls, kernel or own)
        if kernel is not None:
            raise ValueError("chunks need a format without cache.sink, cache.local and cache.rollback; with a residual, pages of one block")
        return None

    @staticmethod
    def fit(kernel: Calls, page: int) -> bool:
        """Whether a piece has all that a row of the cache has: it has no residual, or one of at most a page."""
        cache, rows = kernel.spec.cache, residual_rows(kernel.spec, kernel.layout.tokens).rows
        return rows in (0, page) and not (cache.sink or cache.local or cache.rollback)

    def serves(self, count: int) -> bool:
        """Whether rows of so many query tokens are worth it."""
        return -(-count // self._piece) * -(-self._piece * self._group // PASS_ROWS) <= PASSES

    def pieces(self, counts: Sequence[int], rows: Rows, bounds: Sequence[int]) -> Pieces:
        """Those of rows with so many query tokens and, by the host's bounds, at most so many tokens."""
        tokens, row, back, take, put = self._cut(counts)
        bound, newest, slots = max(bounds), None, None
        lengths, table = (rows.lengths[row] - back).clamp_(min=0), rows.block_table[:, : -(-bound // self._page)][row]
        if self._shape[1]:
            count = 1 - (-max(counts) // self._page)
            past = (rows.lengths - tokens).clamp_(min=0) // self._page  # pages without any of the step's tokens
            newest = self._newest(rows, past, count)
            slots = (lengths // self._page - past[row]).clamp_(max=count - 1) + row.int() * count
        parts = list[Part]()
        for first in range(0, len(row), BATCH):
            mine, plan = slice(first, first + BATCH), None
            if bound * len(bounds) > LEVEL * sum(bounds):
                plan = torch.empty(self._plan_size, dtype=torch.int32, device=self._device)
                self._launch.module.plan(lengths[mine], plan, self._piece, 0, 1, self._max_len, self._flag.address)
            parts.append(Part(mine, lengths[mine], table[mine], plan, None if slots is None else slots[mine]))
        return Pieces(take, put, parts, bound, newest)

    def attend(self, queries: Queries, store: Store, pieces: Pieces) -> None:
        """Fill `queries.out`."""
        shape, (heads, _, dim) = (-1, self._piece, *queries.q.shape[1:]), self._shape
        q = (queries.q if pieces.take is None else queries.q[pieces.take]).view(shape)
        out = (queries.out if pieces.put is None else torch.empty_like(q)).view(shape)
        k = v = torch.empty(len(pieces.parts[0].lengths), heads, 0, dim, dtype=self._dtype, device=self._device)
        if pieces.newest is not None:
            k, v = self._dequantized(store, pieces.newest)
        for part in pieces.parts:
            held = (k, v) if part.slots is not None else (k[: len(part.lengths)],) * 2
            cache = store.packed, *held, part.lengths, part.block_table, part.slots, store.scales
            rest = (out[part.mine], None, queries.sinks, self._workspace, part.plan, queries.scale, pieces.bound)
            self._launch.run(q[part.mine], None, cache, rest, self._max_len, self._flag.address, advance=False)
        if pieces.put is not None:
            queries.out.copy_(out.flatten(0, 1)[pieces.put])

    def _newest(self, rows: Rows, past: Tensor, count: int) -> Rows:
        """So many pages of each row behind its first `past`."""
        numbers = past.unsqueeze(1) + torch.arange(count, device=self._device)
        lengths = (rows.lengths.unsqueeze(1) - numbers * self._page).clamp_(0, self._page).int().flatten()
        pages = rows.block_table.gather(1, numbers.clamp_(max=rows.block_table.shape[1] - 1).long())
        every = torch.arange(len(past), dtype=torch.int32, device=self._device) if rows.slots is None else rows.slots
        return replace(rows, lengths=lengths, block_table=pages.view(-1, 1), slots=every.repeat_interleave(count))

    def _dequantized(self, store: Store, newest: Rows) -> Tensor:
        """K and V of the newest pages, [2, pages, kv_heads, tokens, head_dim]."""
        made = torch.empty(2, len(newest.lengths), *self._shape, dtype=self._dtype, device=self._device)
        packed, k_held, v_held, lengths, table, slots, scales = newest.over(store)
        self._launch.module.unpack(packed, k_held, v_held, lengths, table, slots, scales, None, *made.transpose(2, 3))
        return made

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
