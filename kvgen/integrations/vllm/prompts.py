"""Rows of many tokens on a GPU: FlashAttention, as vLLM ships it, over their own K and V, or over K and V dequantized out of the pages.

Dequantized K and V of a row and some KV heads take at most SCRATCH bytes at a time. They are as the pages hold them, so the query of a
format that rotates is rotated, and the output rotated back: products with a matrix of signs, whose scale is left to the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvgen.runtime.paged import PagedCalls, Rows, Store
from kvgen.runtime.varlen import turn_of

SCRATCH = 64 << 20
"""Most bytes of dequantized K and V, unless one head takes more."""
Attend = Callable[..., Any]
"""vLLM's `flash_attn_varlen_func`, of a version that the heads fit."""


class Prompts:
    """The calls of a layer's format. Tokens are [tokens, heads, head_dim]; `starts` are int32 [rows + 1] on the device."""

    def __init__(self, calls: PagedCalls, attend: Attend) -> None:
        attention, layout = calls.kernel.spec.attention, calls.kernel.layout
        self._calls, self._attend = calls, attend
        window = (-1, -1) if attention.window is None else (attention.window - 1, 0)
        self._mask = {"causal": True, "window_size": list(window), "softcap": attention.softcap}
        self._heads, self._group, self._dim = attention.kv_heads, attention.q_heads // attention.kv_heads, attention.head_dim
        self._turns = [turn_of(rotation, self._dim, calls.kernel.dtype, calls.device) for rotation in layout.rotations]

    def own(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, starts: Tensor, longest: int, scale: float) -> None:
        """Rows over their own tokens alone: their sequences have no others."""
        self._attend(q, k, v, longest, starts, longest, starts, softmax_scale=scale, out=out, **self._mask)

    def cached(self, q: Tensor, out: Tensor, store: Store, row: Rows, spans: Tensor, bound: int, scale: float) -> None:
        """One row over all of its sequence, which is written already and has at most `bound` tokens. `spans` are int32 [2, 2]: 0 and the
        number of queries, 0 and that of tokens.
        """
        turn, back = self._turns
        if turn is not None:
            q, scale = q @ turn[0], scale * turn[1]
        most = max(1, SCRATCH // (2 * bound * self._dim * q.element_size()))
        parts = -(-self._heads // most)
        for i in range(parts):
            some = slice(self._heads * i // parts, self._heads * (i + 1) // parts)
            mine = slice(some.start * self._group, some.stop * self._group)
            k, v = self._calls.dequantized(store, row, some, bound)
            self._attend(
                q[:, mine], k[0], v[0], len(q), spans[0], bound, spans[1], softmax_scale=scale, out=out[:, mine], **self._mask
            )  # fmt: skip
        if back is not None:
            out.copy_((out @ back[0].T).mul_(back[1]))
