"""Packed-GQA rows of a CTA: as many as its registers hold. More rows of a KV head are runs, which are CTAs of their own."""

from __future__ import annotations

from kvgen.spec import KernelSpec

TILE_ROWS = 8
"""Packed-GQA rows of a tile: the columns of a matrix instruction."""


def q_tiles(spec: KernelSpec) -> int:
    """Tiles of packed-GQA rows of a CTA, so that all runs have about as many."""
    tiles = _tiles(spec)
    fewest = -(-tiles // _most(spec.attention.head_dim))
    return -(-tiles // fewest)


def runs(spec: KernelSpec) -> int:
    """CTAs that share the KV tiles of a split of a head, each with rows of its own."""
    return -(-_tiles(spec) // q_tiles(spec))


def rows_of_cta(spec: KernelSpec) -> int:
    """Packed-GQA rows of a CTA, at most."""
    return min(spec.attention.group * spec.attention.q_len, TILE_ROWS * q_tiles(spec))


def _tiles(spec: KernelSpec) -> int:
    return -(-spec.attention.group * spec.attention.q_len // TILE_ROWS)


def _most(head_dim: int) -> int:
    """The tiles whose registers leave enough for the loop: six for every 16 channels, and more that do not depend on the channels."""
    return min(4, max(1, 256 // head_dim))
