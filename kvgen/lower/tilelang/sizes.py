"""The numbers of one program, from spec and schedule; no TileLang here."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.format.layout import PackedLayout
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.spec import KernelSpec

WARP = 32
"""Threads of a CTA: one warp, so nothing in the loop waits for another one."""
Q_ROWS = 8
"""Packed-GQA rows of a CTA: (query token, query head) pairs. A matrix instruction has 16; the others hold what rounding to 16 bits
takes from the first eight."""
ROW_BYTES = 16
"""Packed memory is copied in rows of so many bytes."""
STEP = 64
"""Tokens between two updates of the softmax state, at most."""


@dataclass(frozen=True)
class Sizes:
    """Spec and schedule as integers. `group` is query heads per KV head, `page_blocks` 0 in a contiguous cache."""

    layout: PackedLayout
    dtype: str
    group: int
    kv_heads: int
    q_len: int
    page_blocks: int
    kv_tile: int
    stages: int
    ctas_per_sm: int

    @property
    def dim(self) -> int:
        """Channels per head."""
        return self.layout.head_dim

    @property
    def step(self) -> int:
        """Tokens of one softmax step."""
        return min(STEP, self.kv_tile)

    @property
    def subtile_rows(self) -> int:
        """Rows of a sub-tile of 32 tokens, with its token params."""
        return self.layout.subtile_bytes // ROW_BYTES

    @property
    def tile_rows(self) -> int:
        """Rows of a KV tile's sub-tiles."""
        return self.kv_tile // self.layout.subtile * self.subtile_rows

    @property
    def params_rows(self) -> int:
        """Rows of K's channel params of one group of tokens; 0 where K is scaled per token."""
        return self.dim * self.layout.key.params * 2 // ROW_BYTES if self.layout.key.per_channel else 0

    @property
    def copies(self) -> int:
        """Asynchronous copies of a KV tile."""
        return sum((rows >= WARP) + (rows % WARP > 0) for rows in (self.tile_rows, self.params_rows))

    @property
    def tile_bytes(self) -> int:
        """Bytes that are copied for a KV tile."""
        return (self.tile_rows + self.params_rows) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: the ring of KV tiles."""
        return self.stages * self.tile_bytes

    @property
    def block_tiles(self) -> int:
        """KV tiles of a packed block."""
        return self.layout.tokens // self.kv_tile

    @property
    def runs(self) -> int:
        """CTAs that share the packed-GQA rows of a KV head in the longest call."""
        return -(-self.group * self.q_len // Q_ROWS)


def sizes_of(spec: KernelSpec, schedule: Schedule) -> Sizes:
    """The numbers of a schedule. Raises ValueError where the layout cannot hold the spec."""
    layout, launch, attention = layout_of(spec, schedule.layout), schedule.launch, spec.attention
    return Sizes(
        layout,
        attention.dtype,
        attention.group,
        attention.kv_heads,
        attention.q_len,
        (spec.cache.page or 0) // layout.tokens,
        launch.integer("kv_tile"),
        launch.integer("stages"),
        launch.integer("ctas_per_sm"),
    )
