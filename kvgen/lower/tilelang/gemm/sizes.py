"""Shapes of the tiles, and the shared memory that they take; no TileLang here."""

from __future__ import annotations

from kvgen.lower.gpu import pack_memory
from kvgen.lower.tilelang.traits import COLUMNS, Traits

ROWS = 16
"""Rows of a matrix instruction: the tile of probabilities has no fewer."""
SLACK = 256
"""Bytes lost to alignment, at most."""


def q_rows(p: Traits) -> int:
    """q rows that there is room for: whole q tiles."""
    return COLUMNS * p.q_tiles


def query_tile_rows(p: Traits) -> int:
    """Rows of the query's tile: the q rows, and where K is scaled per channel what rounding took from them."""
    return max(ROWS, 2 * q_rows(p)) if p.channel_scaled else ROWS


def lost_row(p: Traits) -> int:
    """Row of the first q row's rest."""
    return query_tile_rows(p) // 2


def memory_words(p: Traits) -> int:
    """The arena of reduction and flush: a state per warp and one of the tiles; statistics of K while a block is packed."""
    states = (p.warps + 1) * p.q_rows * (p.merge_stride + 2)
    packing = pack_memory(p.layout) // 4
    return -(-max(states, packing) // 4) * 4


def shared_bytes(p: Traits) -> int:
    """All of it, were nothing laid over anything else."""
    tokens, dim = p.tile_tokens, p.dim
    halves = ROWS * dim + query_tile_rows(p) * dim + 2 * tokens * dim + ROWS * tokens
    floats = query_tile_rows(p) * tokens + 6 * ROWS
    return 2 * halves + 4 * (floats + memory_words(p)) + SLACK
