"""Rows of a few more query tokens than a kernel takes, on a GPU: each row is cut into pieces of as many as it takes, and all pieces of all
rows are one call of the kernel. A piece is a row of its own that ends where its queries end.

So many passes over packed blocks cost less than dequantizing them for FlashAttention, whose tiles have 128 query rows of one head each. It
needs tokens that are quantized as they arrive: a residual is that of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.format.residual import cache_id
from kvgen.runtime.device import copied

if TYPE_CHECKING:
    from kvgen.runtime.calls import Calls
    from kvgen.runtime.paged import PagedCalls, Rows, Store
    from kvgen.runtime.varlen import Queries

PASSES = 16
"""Most passes over a row's packed blocks, each of up to PASS_ROWS query rows of a KV head."""
PASS_ROWS = 16
BATCH = 256
"""Pieces of a call, by which its workspace is sized."""


class Chunks:
    """Calls of a kernel over pieces of rows."""

    def __init__(self, calls: PagedCalls, kernel: Calls) -> None:
        attention = kernel.spec.attention
        self._kernel, self._piece, self._group = kernel, attention.q_len, attention.group
        self._max_len, self._flag, self._device = calls.max_len, calls._overflow, calls.device
        self._memory = {launch: calls._allocate(launch, BATCH, self._piece) for launch in kernel._distinct}
        self._cuts: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = {}

    @staticmethod
    def of(calls: PagedCalls, kernel: Calls | None) -> Chunks | None:
        """Those of a kernel, by default that of `calls`; None where tokens wait in residuals. Raises ValueError for another cache's."""
        own = calls.kernel
        if kernel is not None and cache_id(kernel.spec, kernel.layout) != cache_id(own.spec, own.layout):
            raise ValueError("chunks must be a kernel of the same cache, for more query tokens")
        if own.spec.cache.quantize != "arrival":
            if kernel is not None:
                raise ValueError("chunks need a format whose tokens are quantized as they arrive (cache.quantize: arrival)")
            return None
        return Chunks(calls, kernel or own)

    def serves(self, count: int) -> bool:
        """Whether rows of so many query tokens are worth it."""
        return -(-count // self._piece) * -(-self._piece * self._group // PASS_ROWS) <= PASSES

    def attend(self, queries: Queries, store: Store, rows: Rows) -> None:
        """Fill `queries.out`."""
        row, back, take, put = self._cut(queries.counts)
        shape = -1, self._piece, *queries.q.shape[1:]
        q = (queries.q if take is None else queries.q[take]).view(shape)
        out = (queries.out if put is None else torch.empty_like(q)).view(shape)
        lengths, table = (rows.lengths[row] - back).clamp_(min=0), rows.block_table[row]
        for first in range(0, len(row), BATCH):
            part = slice(first, first + BATCH)
            launch = self._kernel.launch_for(len(lengths[part]), self._max_len, self._piece)
            workspace, plan = self._memory[launch]
            launch.module.plan(lengths[part], plan, self._piece, 0, 1, self._max_len, self._flag.address)
            none = [x.new_empty(len(lengths[part]), *x.shape[1:]) for x in (store.k_residual, store.v_residual)]
            cache = store.packed, none[0], none[1], lengths[part], table[part], None, store.scales
            rest = (out[part], None, queries.sinks, workspace, plan, queries.scale, self._max_len)
            launch.run(q[part], None, cache, rest, self._max_len, self._flag.address, advance=False)
        if put is not None:
            torch.index_select(out.flatten(0, 1), 0, put, out=queries.out)

    def _cut(self, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Of each piece its row, and the row's tokens behind it; of each query of a piece its token, and of each token its query; these are
        None where all pieces are whole. The first piece of a row begins with queries that are no tokens of it, if it is not.
        """
        key = tuple(counts)
        if key not in self._cuts:
            if len(self._cuts) > 8:
                self._cuts.clear()
            row, back, take, put = [], [], [], []
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
                copied(row, torch.int64, self._device), copied(back, torch.int32, self._device),
                None if whole else copied(take, torch.int64, self._device), None if whole else copied(put, torch.int64, self._device),
            )  # fmt: skip
        return self._cuts[key]
