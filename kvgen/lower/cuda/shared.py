"""What a CTA holds: packed-GQA rows, as many as its registers take, and shared memory. More rows of a KV head are runs, which are CTAs of
their own. Rendered sources hold the offsets of shared memory, and the kernels read them there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd

from kvgen.format.layout import Operand, PackedLayout
from kvgen.lower.gpu import pack_memory
from kvgen.lower.schedule import Params
from kvgen.spec import KernelSpec

TILE_ROWS = 8
"""Packed-GQA rows of a tile: the columns of a matrix instruction."""
SUBTILE = 32
WORK_TILES = 128
"""Bytes in which a warp keeps its latest work tiles."""
FLAGS = 16
PLANNED = {"copy": "cp_async", "reduction": "last_cta"}
"""What the planned kernel does differently from the schedule."""


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


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class SharedMemory:
    """Offsets in bytes. The rings begin at 0; arrays follow in this order. `docs/kernels.md` says what they hold."""

    slot: int
    """Not an offset: bytes of a KV tile in a ring."""
    barriers: int
    """Of bulk copies; the end of the rings."""
    query: int
    merge: int
    pages: int
    """Entries of the block table. A block is packed in the memory before it, if that is large enough."""
    work_tiles: int
    scalars: int
    """Factors of the query rows, sums of q, statistics of the warps."""
    flags: int
    cluster: int
    """What the CTAs of a cluster exchange."""
    flush: int
    """Where a block is packed."""
    total: int

    @property
    def ring(self) -> int:
        """Bytes of all rings."""
        return self.barriers

    def __str__(self) -> str:
        """As C++ constants: kSlot, kBarriers, ..."""
        words = {field.name: field.name.split("_") for field in fields(self)}
        return ", ".join(f"k{''.join(map(str.capitalize, word))} = {getattr(self, name)}" for name, word in words.items())


def cluster_size(reduction: str) -> int:
    """CTAs of a cluster: 8 for `cluster8`; 1 where there are no clusters."""
    return int(reduction.removeprefix(reduction.rstrip("0123456789")) or 1)


def shared_memory(spec: KernelSpec, layout: PackedLayout, launch: Params) -> SharedMemory:
    """Shared memory of the static kernel of a launch, for blocks of `layout`; with `PLANNED` in the launch, of the planned one."""
    warps, kv_tile, in_flight = (launch.integer(name) for name in ("warps", "kv_tile", "tiles_in_flight"))
    key, dim, rows = layout.key, layout.head_dim, spec.attention.group * spec.attention.q_len
    tiles, tile_rows = q_tiles(spec), min(rows, TILE_ROWS)
    key_groups = dim // key.group if key.quantized and key.axis == "token" else 1
    ctas = cluster_size(launch.text("reduction"))

    slot = _slot(layout, kv_tile)
    barriers = warps * in_flight * slot
    query = barriers + (0 if launch.text("copy") == "cp_async" else _align(warps * kv_tile // SUBTILE * in_flight * 8, 16))
    merge = query + tiles * dim * 16 * _copies(spec, layout, rows)
    pages = merge + _align(warps * tile_rows * (dim + 1) * 4, 16)
    work_tiles = pages + _align(warps * (2 * in_flight * max(1, kv_tile // layout.tokens) * 4 if spec.cache.page else 0), 16)
    if key.static:
        key_groups += 1  # the factors of packed tokens
    scalars = work_tiles + warps * WORK_TILES
    flags = scalars + (tiles * TILE_ROWS * (1 + key_groups) + warps * TILE_ROWS * 2) * 4
    cluster = _align(flags + FLAGS, 16)
    end = _align(cluster + (tiles * (tile_rows * dim * 4 + ctas * 64 + 16) if ctas > 1 else 0), 128)
    packing = pack_memory(layout)
    flush = 0 if packing <= pages else end
    return SharedMemory(slot, barriers, query, merge, pages, work_tiles, scalars, flags, cluster, flush, flush + packing if flush else end)


def _slot(layout: PackedLayout, kv_tile: int) -> int:
    """A KV tile: channel params of K and of V, a set for all tokens that surely share one, boost index, then sub-tiles. Two blocks of 16
    tokens share a sub-tile's place.
    """
    params = sum(kv_tile // gcd(op.group, kv_tile) * layout.head_dim * op.params * 2 for op in _per_channel(layout))
    return params + layout.key.boosted + kv_tile // SUBTILE * (SUBTILE // layout.subtile * layout.subtile_bytes)


def _per_channel(layout: PackedLayout) -> list[Operand]:
    return [op for op in (layout.key, layout.value) if op.per_channel]


def _copies(spec: KernelSpec, layout: PackedLayout, rows: int) -> int:
    """Copies of q: with static scales of K a second one that is multiplied, and in fp16 its rounding error. Of four rows or fewer free MMA
    columns carry that error, which K per channel takes a second copy for.
    """
    if layout.key.static and not layout.key.grouped:
        return 3 if rows > 4 and spec.attention.dtype == "float16" else 2
    return 2 if layout.key.per_channel and rows <= 4 else 1
