"""Shared memory of a CTA, as `traits.cuh` lays it out; rendered sources assert that both agree."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.lower.schedule import Params
from kvgen.reference.layout import PackedLayout
from kvgen.spec import KernelSpec

SUBTILE = 32
MAX_BATCH = 2048
"""Sequences per call: the CTA that computes a plan keeps their positions in shared memory."""
WORK_TILES = 128
"""Bytes in which a warp keeps its latest work tiles."""


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Shared:
    """Sizes in bytes, of one warp's slot, of all rings, and of everything."""

    slot: int
    ring: int
    total: int


def shared_memory(spec: KernelSpec, layout: PackedLayout, launch: Params) -> Shared:
    """Shared memory of a launch of a spec's kernel, for blocks of `layout`."""
    warps, kv_tile, tiles_in_flight = (launch.integer(name) for name in ("warps", "kv_tile", "tiles_in_flight"))
    subtiles = kv_tile // SUBTILE
    key, dim = layout.key, layout.head_dim
    per_channel = key.quantized and key.axis == "channel"
    stage = SUBTILE // layout.subtile * layout.subtile_bytes  # two blocks of 16 tokens share one
    slot = (dim * key.params * 2 if per_channel else 0) + subtiles * stage
    ring = warps * tiles_in_flight * slot
    barriers = 0 if launch.text("copy") == "cp_async" else _align(warps * subtiles * tiles_in_flight * 8, 16)
    q_rows = spec.attention.group * spec.attention.q_len
    residual = per_channel and q_rows <= 4
    tiles = -(-q_rows // 8)
    key_groups = dim // key.group if key.quantized and key.axis == "token" else 1
    query = tiles * dim * 16 * (2 if residual else 1)
    merge = _align(warps * min(q_rows, 8) * (dim + 1) * 4, 16)
    small = (tiles * 8 * (1 + key_groups) + warps * 16) * 4
    reduction = launch.text("reduction")
    pages = 2 * tiles_in_flight * max(1, subtiles * SUBTILE // layout.tokens) * 4 if spec.cache.page else 0
    reused = ring + barriers + query + merge  # a block is packed in the rings' and the merge's place, if that is large enough
    inbox = _align(reused + _align(warps * pages, 16) + warps * WORK_TILES + small + 16, 16)
    cluster = int(reduction.removeprefix("cluster")) if reduction.startswith("cluster") else 0
    inbox_bytes = tiles * (min(q_rows, 8) * dim * 4 + cluster * 64 + 16) if cluster else 0
    attend = _align(inbox + inbox_bytes, 128)
    flush = _flush(layout) if per_channel else 16
    return Shared(slot, ring, attend if flush <= reused else attend + flush)


def _flush(layout: PackedLayout) -> int:
    """Statistics of K per channel while a residual block is packed: extremes of runs of 16 tokens, params of groups."""
    return layout.head_dim * (layout.tokens // 16 * 4 + layout.tokens // layout.key.group * 12)
