# mypy: disable-error-code="untyped-decorator"
"""The mask seam, and causal masking: no query attends to a token after its own position.

A mask is an object with
    windowed            whether it hides old tokens; the scheduler skips the KV tiles before those that a query sees
    first_token(limit)  the first token that a query sees, perhaps negative; `limit` is the position after the query's own
"""

from __future__ import annotations

from typing import Any, Protocol

import tilelang.language as T

from kvgen.lower.tilelang.mma.rows import packed_end
from kvgen.lower.tilelang.mma.sliding_window import SlidingWindow
from kvgen.lower.tilelang.mma.state import MASKED, q_rows
from kvgen.lower.tilelang.traits import Traits


class Mask(Protocol):
    """What is plugged in."""

    @property
    def windowed(self) -> bool: ...
    def first_token(self, limit: Any) -> Any: ...


class CausalMask:
    """A query sees every token up to its own."""

    windowed = False

    def first_token(self, limit: Any) -> Any:  # noqa: ARG002
        """The sequence's first."""
        return 0


def mask_of(p: Traits) -> Mask:
    """The mask of a program."""
    return CausalMask() if p.window is None else SlidingWindow(p.window)


@T.macro
def set_limits(p: Any, k: Any, at: Any, work: Any, r: Any) -> None:
    """`limit` of a q row is the position after that of its query token: the queries are the last q_len tokens, in order."""
    for n, e in q_rows(p):
        token = (at.q_row + n * 8 + (at.t % 2 if p.halves else at.t) * 2 + e) // p.group
        r.limit[n * 2 + e] = packed_end(p, work.blocks) + work.residual - T.max(0, k.q_len - 1 - token)


def first_tile(p: Traits, k: Any, packed: Any, residual: Any) -> Any:
    """First packed KV tile that a query of the call sees, of a sequence of `packed` blocks and `residual` tokens. Those before
    it are not touched, nor are their pages: a block table may have no page for them."""
    oldest = mask_of(p).first_token(packed * p.tokens + residual - k.q_len + 1)
    return T.min(T.truncdiv(T.max(0, oldest), p.tile_tokens), packed * p.block_tiles)


def sees(p: Traits, position: Any, limit: Any) -> Any:
    """Whether a query sees the token at `position`; `limit` is the first position after its own."""
    mask = mask_of(p)
    return T.And(position < limit, position >= mask.first_token(limit)) if mask.windowed else position < limit


def visible(p: Traits, at: Any, r: Any, token: Any, n: int, row: int, e: int, value: Any) -> Any:
    """`value`, or minus infinity where the q row's query does not see row g + 8 * `row` of the packed sub-tile at position `token`."""
    mask = mask_of(p)
    if not p.causal and not mask.windowed:
        return value
    own = at.t // 2 * 16 if p.halves else 0
    position, limit = token + own + row * 8 + at.g, r.limit[n * 2 + e]
    # A single query token stands behind all packed tokens: only the start of its window can be among them.
    seen = sees(p, position, limit) if p.causal else position >= mask.first_token(limit)
    return T.if_then_else(seen, value, T.float32(MASKED))
