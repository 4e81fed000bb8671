"""The numbers of one TileLang program, computed from spec and schedule; no TileLang here.

Everything in shared or packed memory is counted in 32-bit words. A KV tile is `tile_subtiles` sub-tiles of one block, which share K's
channel params. The warps of a CTA take KV tiles round-robin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvgen.format.layout import Operand, PackedLayout, Which, vector_words
from kvgen.format.residual import ResidualRows, residual_rows
from kvgen.format.window import window_places
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.spec import KernelSpec

LANES = 32
COLUMNS = 8
"""Columns of a matrix instruction. They are packed-GQA rows: (query token, query head) pairs."""


@dataclass(frozen=True)
class Traits:
    """Spec and schedule as integers. `group` is query heads per KV head, `q_tiles` the tiles of 8 packed-GQA rows of a CTA."""

    layout: PackedLayout
    rows: ResidualRows
    """Which tokens are unquantized, and their rows in the residual tensors."""
    dtype: str
    group: int
    kv_heads: int
    max_q_len: int
    page_blocks: int
    window_places: int
    """Places of the packed blocks of a contiguous cache with a sliding window; 0 if every block has one of its own."""
    warps: int
    stages: int
    tile_subtiles: int
    q_tiles: int
    min_ctas: int
    exact_q: bool
    cluster: bool
    softcap: float
    window: int | None
    sinks: bool
    """Whether each query head has a learned logit in the denominator."""

    # --- query -----------------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Channels per head."""
        return self.layout.head_dim

    @property
    def steps(self) -> int:
        """k-steps of a score, and row tiles of the output: 16 channels each."""
        return self.dim // 16

    @property
    def chunks(self) -> int:
        """Runs of 32 channels: a quad of lanes loads one with 16 bytes each."""
        return self.dim // 32

    @property
    def q_rows(self) -> int:
        """Packed-GQA rows of a CTA."""
        return min(COLUMNS * self.q_tiles, self.group * self.max_q_len)

    @property
    def one_run(self) -> bool:
        """Whether a CTA holds all packed-GQA rows of a KV head."""
        return self.group * self.max_q_len <= COLUMNS * self.q_tiles

    @property
    def halves(self) -> bool:
        """Whether columns 4 to 7 repeat the first four, so that lanes t < 2 weigh tokens 0 to 15 of a sub-tile, the others the rest."""
        return self.group * self.max_q_len <= COLUMNS // 2

    @property
    def doubled(self) -> bool:
        """Whether those columns hold what rounding the scaled query to 16 bits loses."""
        return self.channel_scaled and self.halves

    @property
    def own_rows(self) -> int:
        """8-row runs of a sub-tile of which a lane weighs a row."""
        return self.layout.subtile // 8 // (2 if self.halves else 1)

    @property
    def row_distances(self) -> tuple[int, ...]:
        """Exchanges between lanes that reduce over all rows of a column."""
        return (2, 4, 8, 16) if self.halves else (4, 8, 16)

    @property
    def low(self) -> bool:
        """Whether that rest has matrix instructions of its own."""
        return self.channel_scaled and self.exact_q and not self.doubled

    @property
    def causal(self) -> bool:
        """Whether several query tokens need masks in the packed part."""
        return self.max_q_len > 1

    @property
    def bf16(self) -> bool:
        """Type of query, residual and output."""
        return self.dtype == "bfloat16"

    @property
    def mma_type(self) -> str:
        """The residual's type, as matrix instructions call it."""
        return "bf16" if self.bf16 else "fp16"

    # --- memory, in words --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.layout.tokens

    @property
    def block_words(self) -> int:
        """One block of one head."""
        return self.layout.block_bytes // 4

    @property
    def header_words(self) -> int:
        """Channel params, before the first sub-tile."""
        return self.layout.header_bytes // 4

    @property
    def subtile_words(self) -> int:
        """One sub-tile with its token params."""
        return self.layout.subtile_bytes // 4

    def codes(self, which: Which) -> int:
        """Offset of codes in a sub-tile."""
        return self.layout.codes_offset(which) // 4

    def params(self, which: Which) -> int:
        """Offset of token params in a sub-tile."""
        return self.layout.token_params_offset(which) // 4

    @property
    def channel_words(self) -> int:
        """K's channel params of one group of tokens; 0 where K is scaled per token."""
        return self.dim * self.key.params * 2 // 4 if self.channel_scaled else 0

    @property
    def value_channel_words(self) -> int:
        """V's channel params of one group of tokens; 0 where V is scaled per token."""
        return self.dim * self.value.params * 2 // 4 if self.value.per_channel else 0

    # --- operands ----------------------------------------------------------------------------------------------------

    @property
    def key(self) -> Operand:
        """How K is stored."""
        return self.layout.key

    @property
    def value(self) -> Operand:
        """How V is stored."""
        return self.layout.value

    @property
    def channel_scaled(self) -> bool:
        """Whether K has a scale per channel, which moves into the query."""
        return self.key.per_channel

    @property
    def token_scaled(self) -> bool:
        """Whether K has scales per token, which multiply products; a K of 16 bits has neither."""
        return self.scaled_by_token("key")

    def scaled_by_token(self, which: Which) -> bool:
        """Whether K or V has scales per token; with 16 bits it has none."""
        operand = self.layout.operand(which)
        return operand.quantized and not operand.per_channel

    def operand_type(self, which: Which) -> str:
        """Type of K's or V's operands: codes are denormals of fp16, elements of 16 bits are what they are."""
        return "fp16" if self.layout.operand(which).quantized else self.mma_type

    @property
    def row_tiles(self) -> int:
        """16-token tiles of a sub-tile."""
        return self.layout.subtile // 16

    def groups(self, which: Which) -> int:
        """Scales per token (axis token), else 1."""
        operand = self.layout.operand(which)
        return self.dim // operand.group if operand.axis == "token" else 1

    @property
    def product_groups(self) -> int:
        """K's groups whose products are kept apart until lanes take their own rows of them."""
        return self.groups("key") if self.halves else 1

    def group_steps(self, which: Which) -> int:
        """16-channel steps that share a scale per token."""
        return self.steps // self.groups(which)

    @staticmethod
    def offset(operand: Operand) -> int:
        """What symmetric codes are stored with on top."""
        return 0 if operand.zero else 1 << (operand.bits - 1)

    @staticmethod
    def centre(operand: Operand) -> float:
        """The code in the middle. Probability * scale is rounded: what a code is away from it is multiplied by that, what it
        stands for by the probability itself, so that errors do not grow with a zero that is far from all values."""
        return float(1 << (operand.bits - 1)) if not operand.zero else ((1 << operand.bits) - 1) / 2

    def row_params(self, which: Which) -> int:
        """Words of token params per group and row of a run of 8: scale and zero of that row in each run."""
        return self.layout.subtile // 8 * self.layout.operand(which).params // 2

    def own_params(self, which: Which) -> int:
        """Those that a lane loads: of the runs that it weighs."""
        return self.own_rows * self.layout.operand(which).params // 2

    def vectors(self, which: Which) -> int:
        """Loads that a lane needs for the codes of a sub-tile."""
        return self._words(which) // self.vector(which)

    def vector(self, which: Which) -> int:
        """Words of such a load."""
        return vector_words(self._words(which))

    def fragment_words(self, which: Which) -> int:
        """Words of an A operand (of two, where codes have 2 bits)."""
        return {16: 4, 8: 2}.get(self.layout.operand(which).bits, 1)

    def fragments(self, which: Which) -> int:
        """A operands in a load, in memory order."""
        return self.vector(which) // self.fragment_words(which)

    def fragment(self, which: Which, index: Any) -> tuple[Any, Any]:
        """16-row tile (the first of two, where codes have 2 bits) and k-step of a lane's A operand `index`, a number or an expression."""
        tiles, steps = self._tiles(which)
        outer, inner = (index // steps, index % steps) if which == "key" else (index % tiles, index // tiles)
        return outer * self.height(which), inner

    def height(self, which: Which) -> int:
        """16-row tiles that a word has codes of."""
        return 2 if self.layout.operand(which).bits == 2 else 1

    def _tiles(self, which: Which) -> tuple[int, int]:
        """Operands of a sub-tile: along rows, and k-steps."""
        rows, depth = (self.layout.subtile, self.dim) if which == "key" else (self.dim, self.layout.subtile)
        return rows // 16 // self.height(which), depth // 16

    def _words(self, which: Which) -> int:
        tiles, steps = self._tiles(which)
        return tiles * steps * self.fragment_words(which)

    @property
    def unpacked(self) -> int:
        """Sink and local tokens, which no block holds."""
        return self.rows.sink + self.rows.local

    @property
    def one_block(self) -> bool:
        """Whether the residual has the rows of one block, in the order of its tokens: no sink, local or rollback tokens."""
        return self.rows.rows == self.tokens and self.unpacked == 0

    @property
    def sink_tiles(self) -> int:
        """Tiles of 16 tokens of the sink."""
        return -(-self.rows.sink // 16)

    @property
    def residual_rounds(self) -> int:
        """Tiles of 16 unquantized tokens that a warp attends to, at most."""
        tiles = self.sink_tiles - (-(self.tokens - 1 + self.rows.local + self.max_q_len) // 16)
        return -(-tiles // self.warps)

    # --- ring ----------------------------------------------------------------------------------------------------------

    @property
    def tile_tokens(self) -> int:
        """Tokens of a KV tile."""
        return self.tile_subtiles * self.layout.subtile

    @property
    def tile_bytes(self) -> int:
        """Bytes of a KV tile."""
        return 4 * (self.tile_subtiles * self.subtile_words + self.channel_words + self.value_channel_words)

    @property
    def wave_bytes(self) -> int:
        """Bytes that a multiprocessor could read while the CTAs of a wave start and end (docs/design.md)."""
        return 256 * 1024

    @property
    def block_tiles(self) -> int:
        """KV tiles of a block."""
        return self.layout.subtiles // self.tile_subtiles

    @property
    def tiles_in_flight(self) -> int:
        """KV tiles that a warp's ring holds, at least one."""
        return max(1, self.stages // self.tile_subtiles)

    @property
    def value_params_at(self) -> int:
        """V's channel params in a warp's ring. They are read at the end of a KV tile, when those of the tile that comes into its place have
        been asked for, so there is room for one tile more."""
        return self.stages * self.subtile_words + self.tiles_in_flight * self.channel_words

    @property
    def ring_words(self) -> int:
        """A warp's ring: sub-tiles, then K's channel params, then V's."""
        return self.value_params_at + (self.tiles_in_flight + 1) * self.value_channel_words

    @property
    def query_words(self) -> int:
        """The query as fragments in shared memory; where K is scaled per token it stays in registers."""
        return self.q_tiles * self.chunks * LANES * 4 if self.channel_scaled else 0

    @property
    def query_at(self) -> int:
        """Where it lies: behind the rings."""
        return self.warps * self.ring_words

    @property
    def merge_stride(self) -> int:
        """Floats of a row while warps merge; odd, so that lanes hit different banks."""
        return self.dim + 1

    @property
    def merged_at(self) -> int:
        """Where a CTA of a cluster stores its result, behind those of its warps: rows of channels, then their states."""
        return self.warps * self.q_rows * (self.merge_stride + 2)

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: rings and query, in whose place warps merge later."""
        merged = self.q_rows * (self.dim + 2) if self.cluster else 0
        return 4 * max(self.query_at + self.query_words, self.merged_at + merged)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return LANES * self.warps


def make_traits(spec: KernelSpec, schedule: Schedule) -> Traits:
    """The traits of a schedule. Raises ValueError where the layout cannot hold the spec."""
    layout = layout_of(spec, schedule.layout)
    launch = schedule.launch
    attention = spec.attention
    return Traits(
        layout=layout,
        rows=residual_rows(spec, layout.tokens),
        dtype=attention.dtype,
        group=attention.group,
        kv_heads=attention.kv_heads,
        max_q_len=attention.q_len,
        page_blocks=(spec.cache.page or 0) // layout.tokens,
        window_places=window_places(spec, layout.tokens),
        warps=launch.integer("warps"),
        stages=launch.integer("stages"),
        tile_subtiles=launch.integer("kv_tile") // layout.subtile,
        q_tiles=launch.integer("q_tiles"),
        min_ctas=launch.integer("ctas_per_sm"),
        exact_q=bool(launch["exact_q"]),
        cluster=launch.text("reduction") == "cluster",
        softcap=attention.softcap,
        window=attention.window,
        sinks=attention.sinks,
    )
