"""Packed-GQA rows of a CTA: as many as its registers hold. More rows of a KV head are runs, which are CTAs of their own."""

from __future__ import annotations

from kvgen.spec import KernelSpec

TILE_ROWS = 8
"""Packed-GQA rows of a tile: the columns of a matrix instruction."""


WARPGROUP_TILES = (2, 4, 8)
"""Tiles that one wgmma may have here; of 256 channels and more, at most the second."""


def q_tiles(spec: KernelSpec, mma: str = "warp") -> int:
    """Tiles of packed-GQA rows of a CTA, so that all runs have about as many. With `warpgroup` some may be empty."""
    tiles = _tiles(spec)
    fewest = -(-tiles // _most(spec.attention.head_dim, mma))
    even = -(-tiles // fewest)
    return even if mma == "warp" else next(count for count in WARPGROUP_TILES if count >= even)


def runs(spec: KernelSpec, mma: str = "warp") -> int:
    """CTAs that share the KV tiles of a split of a head, each with rows of its own."""
    return -(-_tiles(spec) // q_tiles(spec, mma))


def rows_of_cta(spec: KernelSpec, mma: str = "warp") -> int:
    """Packed-GQA rows of a CTA, at most."""
    return min(spec.attention.group * spec.attention.q_len, TILE_ROWS * q_tiles(spec, mma))


def _tiles(spec: KernelSpec) -> int:
    return -(-spec.attention.group * spec.attention.q_len // TILE_ROWS)


def _most(head_dim: int, mma: str) -> int:
    """The tiles whose registers leave enough for the loop: six for every 16 channels, and more that do not depend on the channels. The
    warps of a warpgroup have a quarter of the channels each.
    """
    return min(4, max(1, 256 // head_dim)) if mma == "warp" else 8 if head_dim <= 128 else 4
