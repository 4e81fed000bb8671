# mypy: disable-error-code="untyped-decorator"
"""Which tokens of a sequence are unquantized, where they lie, and how they are cut into tiles of 16. `ResidualRows` of
`kvgen.format.residual` is the same for the host.

Tokens are counted from the end of the packed blocks; those of the sink are negative.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.traits import Traits


def packed_blocks(p: Traits, length: Any) -> Any:
    """Packed blocks of a sequence of `length` tokens."""
    return (T.max(0, length - p.unpacked) if p.unpacked else length) // p.tokens


def packed_end(p: Traits, blocks: Any) -> Any:
    """The first position after the packed blocks."""
    return blocks * p.tokens + p.rows.sink


def unquantized(p: Traits, length: Any, blocks: Any) -> Any:
    """The end of the unquantized tokens of a sequence; negative if they do not fill the sink."""
    return length - packed_end(p, blocks) if p.unpacked else length % p.tokens


def fills_block(p: Traits, work: Any) -> Any:
    """Whether the step completes a block, and packs it: tokens 0 to N_r - 1."""
    return work.residual >= p.tokens + p.rows.local


def warp_tile(p: Traits, at: Any, index: Any) -> Any:
    """Number of a warp's tile."""
    return (index * p.warps + (p.warps - 1 - at.warp)) * at.splits + (at.splits - 1 - at.split)


@T.macro
def find_tile(p: Any, at: Any, work: Any, r: Any, index: Any) -> None:
    """With a sink, store where a warp's tile begins and ends in registers. The tiles of the sink come first, and none goes beyond its
    end."""
    if p.rows.sink:
        number = warp_tile(p, at, index)
        if number < p.sink_tiles:
            r.tile[0] = number * 16 - packed_end(p, work.blocks)
            r.tile[1] = T.min(p.rows.sink - packed_end(p, work.blocks), work.residual)
        else:
            r.tile[0] = (number - p.sink_tiles) * 16
            r.tile[1] = work.residual


def tile_begin(p: Traits, at: Any, r: Any, index: Any) -> Any:
    """First token of a warp's tile, which `find_tile` found last."""
    return r.tile[0] if p.rows.sink else warp_tile(p, at, index) * 16


def tile_end(p: Traits, work: Any, r: Any) -> Any:
    """The end of the tokens that this tile may hold."""
    return r.tile[1] if p.rows.sink else work.residual


def row_of(p: Traits, work: Any, token: Any) -> Any:
    """The row of a token in the residual tensors."""
    if p.one_block:
        return token
    position = packed_end(p, work.blocks) + token
    behind = p.rows.sink + T.truncmod(position - p.rows.sink, p.rows.capacity)
    return T.if_then_else(position < p.rows.sink, position, behind) if p.rows.sink else behind
