# mypy: disable-error-code="untyped-decorator"
"""Masks: which tokens a query sees, and the first KV tile that holds one of them. A query sees the tokens up to its own
position, with a sliding window only the last `window` of these."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.rows import packed_end
from kvgen.lower.tilelang.mma.state import MASKED, q_rows
from kvgen.lower.tilelang.traits import Traits


@T.macro
def set_limits(p: Any, k: Any, at: Any, work: Any, r: Any) -> None:
    """`limit` of a q row is the position after that of its query token: the queries are the last q_len tokens, in order."""
    for n, e in q_rows(p):
        token = (at.q_row + n * 8 + (at.t % 2 if p.halves else at.t) * 2 + e) // p.group
        r.limit[n * 2 + e] = packed_end(p, work.blocks) + work.residual - T.max(0, k.q_len - 1 - token)


def first_tile(p: Traits, k: Any, packed: Any, residual: Any) -> Any:
    """First packed KV tile that a query of the call sees, of a sequence of `packed` blocks and `residual` tokens. Those before
    it are not touched, nor are their pages: a block table may have no page for them."""
    oldest = packed * p.tokens + residual - k.q_len + 1 - p.window
    return T.min(T.truncdiv(T.max(0, oldest), p.tile_tokens), packed * p.block_tiles)


def sees(p: Traits, position: Any, limit: Any) -> Any:
    """Whether a query sees the token at `position`; `limit` is the first position after its own."""
    if p.window is None:
        return position < limit
    return T.And(position < limit, position >= limit - p.window)


def visible(p: Traits, at: Any, r: Any, token: Any, n: int, row: int, e: int, value: Any) -> Any:
    """`value`, or minus infinity where the q row's query does not see row g + 8 * `row` of the packed sub-tile at position `token`."""
    if not p.causal and p.window is None:
        return value
    own = at.t // 2 * 16 if p.halves else 0
    position, limit = token + own + row * 8 + at.g, r.limit[n * 2 + e]
    # A single query token stands behind all packed tokens: only its window can end among them.
    seen = sees(p, position, limit) if p.causal else position >= limit - p.window
    return T.if_then_else(seen, value, T.float32(MASKED))
