"""The packed layout: one declared bijection between (token in block, channel) and (byte, bit) of a block.

A block holds `tokens` tokens of one KV head as one run of bytes:

    [K channel params][V channel params] then per sub-tile: [K codes][K token params][V codes][V token params]

Only the operands with that axis have the params section. Two orders of codes exist. `mma` is the order in which the lanes of
a warp hold m16n8k16 fragments (BitDecoding's interleaving, with K and transposed V on the 16-row side); `simd` puts 16 rows
in the 16 lanes of a vector. In both, an operand is a matrix [rows, k]: K has rows = tokens and k = channels, V has
rows = channels and k = tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import torch

from kvgen.digest import digest
from kvgen.spec import KernelSpec, QuantSpec

LAYOUT_VERSION = 1
LANES = 32
SECTION_ALIGN = 16
BLOCK_ALIGN = 128

Order = Literal["mma", "simd"]
Which = Literal["key", "value"]


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Operand:
    """How K or V sits in a block. `width` is the stored bits per element, `params` the numbers stored per group."""

    bits: int
    width: int
    axis: Literal["channel", "token"]
    group: int
    zero: bool
    rows_are_tokens: bool

    @property
    def quantized(self) -> bool:
        return self.bits != 16

    @property
    def params(self) -> int:
        """2 (scale and zero), 1 (scale), or 0 (not quantized)."""
        return (2 if self.zero else 1) if self.quantized else 0


@dataclass(frozen=True)
class PackedLayout:
    """Sizes, offsets and index maps of one block. Sizes and offsets are in bytes unless a name says otherwise."""

    tokens: int
    head_dim: int
    order: Order
    param_bytes: int
    key: Operand
    value: Operand

    @cached_property
    def id(self) -> str:
        """Digest that tells two layouts apart: a cache carries it, and a kernel refuses a cache with another one."""
        return digest({"version": LAYOUT_VERSION, **asdict(self)})

    @property
    def subtile(self) -> int:
        """Tokens per sub-tile."""
        return min(32, self.tokens)

    @property
    def subtiles(self) -> int:
        """Sub-tiles per block."""
        return self.tokens // self.subtile

    def operand(self, which: Which) -> Operand:
        """K's or V's part of the layout."""
        return self.key if which == "key" else self.value

    # --- sizes -----------------------------------------------------------------------------------------------------

    def codes_bytes(self, which: Which) -> int:
        """Codes of one sub-tile."""
        return self.subtile * self.head_dim * self.operand(which).width // 8

    def channel_params_bytes(self, which: Which) -> int:
        """Params section at the head of the block (axis channel)."""
        op = self.operand(which)
        if op.axis != "channel" or not op.quantized:
            return 0
        return _align(self.tokens // op.group * self.head_dim * op.params * self.param_bytes, SECTION_ALIGN)

    def token_params_bytes(self, which: Which) -> int:
        """Params section of one sub-tile (axis token)."""
        op = self.operand(which)
        if op.axis != "token" or not op.quantized:
            return 0
        return _align(self.subtile * (self.head_dim // op.group) * op.params * self.param_bytes, SECTION_ALIGN)

    @property
    def subtile_bytes(self) -> int:
        """One sub-tile with its token params."""
        return sum(self.codes_bytes(w) + self.token_params_bytes(w) for w in ("key", "value"))

    @property
    def header_bytes(self) -> int:
        """Channel params of K and V, before the first sub-tile."""
        return self.channel_params_bytes("key") + self.channel_params_bytes("value")

    @property
    def block_bytes(self) -> int:
        """One block of one KV head, padding included."""
        return _align(self.header_bytes + self.subtiles * self.subtile_bytes, BLOCK_ALIGN)

    @property
    def payload_bytes(self) -> int:
        """One block without its padding: what must be read."""
        return self.header_bytes + self.subtiles * self.subtile_bytes

    # --- offsets ---------------------------------------------------------------------------------------------------

    def codes_offset(self, which: Which) -> int:
        """Of the codes within a sub-tile."""
        return 0 if which == "key" else self.codes_bytes("key") + self.token_params_bytes("key")

    def token_params_offset(self, which: Which) -> int:
        """Of the token params within a sub-tile."""
        return self.codes_offset(which) + self.codes_bytes(which)

    def channel_params_offset(self, which: Which) -> int:
        """Of the channel params within a block."""
        return 0 if which == "key" else self.channel_params_bytes("key")

    # --- index maps ------------------------------------------------------------------------------------------------

    def code_bits(self, which: Which) -> torch.Tensor:
        """Bit offset in the block of every element: int64 [tokens, head_dim]."""
        op = self.operand(which)
        token = torch.arange(self.tokens).unsqueeze(1)
        channel = torch.arange(self.head_dim).unsqueeze(0)
        sub, local = token // self.subtile, token % self.subtile
        place = _mma_place if self.order == "mma" else _simd_place
        within = place(op, local, channel, self.subtile, self.head_dim)
        return (self.header_bytes + sub * self.subtile_bytes + self.codes_offset(which)) * 8 + within

    def param_offsets(self, which: Which) -> torch.Tensor:
        """Byte offset in the block of every scale (index 0) and zero (index 1).

        int64 [params, tokens / group, head_dim] for axis channel, [params, tokens, head_dim / group] for axis token.
        """
        op = self.operand(which)
        slot = _mma_param if self.order == "mma" else _simd_param
        kind = torch.arange(op.params).reshape(-1, 1, 1)
        if op.axis == "channel":
            group = torch.arange(self.tokens // op.group).reshape(1, -1, 1)
            channel = torch.arange(self.head_dim).reshape(1, 1, -1)
            index = group * self.head_dim * op.params + slot(op, kind, channel, self.head_dim, 0, 1)
            return self.channel_params_offset(which) + index * self.param_bytes
        token = torch.arange(self.tokens).reshape(1, -1, 1)
        groups = self.head_dim // op.group
        group = torch.arange(groups).reshape(1, 1, -1)
        index = slot(op, kind, token % self.subtile, self.subtile, group, groups)
        start = self.header_bytes + token // self.subtile * self.subtile_bytes + self.token_params_offset(which)
        return start + index * self.param_bytes


def packed_layout(spec: KernelSpec, tokens: int, order: Order) -> PackedLayout:
    """The layout of blocks of `tokens` tokens for a spec.

    Raises ValueError where a group does not fit the block or the order cannot hold the shape.
    """
    element = 32 if spec.attention.dtype == "float32" else 16

    if spec.key.boost.fraction > 0:
        raise ValueError("boosted channels have no packed layout")

    def operand(quant: QuantSpec, rows_are_tokens: bool) -> Operand:
        if not quant.quantized:
            return Operand(16, element, "token", spec.attention.head_dim, False, rows_are_tokens)
        return Operand(quant.bits, quant.bits, quant.axis, quant.group, quant.zero, rows_are_tokens)

    layout = PackedLayout(tokens, spec.attention.head_dim, order, element // 8, operand(spec.key, True), operand(spec.value, False))
    problem = layout_problem(layout)
    if problem:
        raise ValueError(problem)
    return layout


def layout_problem(layout: PackedLayout) -> str | None:
    """Why a layout cannot exist, or None."""
    if layout.tokens % 16 or layout.tokens % layout.subtile:
        return f"the residual block ({layout.tokens}) must be 16 tokens or a multiple of 32"
    for which in ("key", "value"):
        op = layout.operand(which)
        if op.quantized and op.axis == "channel" and layout.tokens % op.group:
            return f"the residual block ({layout.tokens}) must be a multiple of {which}.group ({op.group})"
        if layout.order == "mma":
            if op.width == 32:
                return "fragment order holds 16-bit and narrower elements only"
            if layout.head_dim % 32:
                return f"fragment order needs head_dim ({layout.head_dim}) to be a multiple of 32"
            if op.rows_are_tokens and op.bits == 2 and layout.subtile % 32:
                return "fragment order of a 2-bit K needs residual blocks of 32 tokens or more"
    return None


# --- fragment order ------------------------------------------------------------------------------------------------


def _channel_as_k(channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k-step, slot in 0..15) of a channel on the k axis: lane t of a quad holds 8 neighbouring channels in two k-steps."""
    x, t, y, i = channel // 32, channel % 32 // 8, channel % 8 // 4, channel % 4
    return 2 * x + y, 2 * t + i % 2 + 8 * (i // 2)


def _channel_as_row(channel: torch.Tensor) -> torch.Tensor:
    """Row of a channel on the 16-row side: what four 8x8 transposes of 8-channel loads give."""
    x, a, y, h, b = channel // 32, channel % 32 // 8, channel % 8 // 4, channel % 4 // 2, channel % 2
    return 32 * x + 16 * y + 8 * h + 2 * a + b


def _mma_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile, in fragment order."""
    if op.rows_are_tokens:
        row, rows, steps = token, tokens, head_dim // 16
        step, slot = _channel_as_k(channel)
    else:
        row, rows, steps = _channel_as_row(channel), head_dim, tokens // 16
        step, slot = token // 16, token % 16
    lane = 4 * (row % 8) + slot % 8 // 2
    if op.width == 16:
        tiles, words = rows // 16, 4
        tile, word, bit = row // 16, 2 * (slot // 8) + row % 16 // 8, 16 * (slot % 2)
    else:
        per_byte = 8 // op.bits
        words = max(1, 2 // per_byte)
        tiles = rows // (8 * per_byte * words)
        unit = row // (8 * per_byte)
        tile, word = unit // words, unit % words
        bit = 8 * (2 * (slot % 2) + slot // 8) + op.bits * (row % (8 * per_byte) // 8)
    index = (tile * steps + step if op.rows_are_tokens else step * tiles + tile) * words + word
    vector = vector_words(tiles * steps * words)
    return ((index // vector * LANES + lane) * vector + index % vector) * 32 + bit


def vector_words(words: int) -> int:
    """Words that a lane loads at once, of the `words` it owns in a sub-tile."""
    return 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1


def _mma_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int, groups: int) -> torch.Tensor:
    """Place of a param in its section.

    K per channel lies along k, beside the four slots that a lane scales: {zero pair, scale pair} twice, so that a 16-byte load
    is the A operand of the sum of q * z. All others lie beside rows: lane g of the eight finds rows g, g + 8, ... together.
    """
    del groups
    if op.axis == "channel" and op.rows_are_tokens:
        step, slot = _channel_as_k(index)
        quad = step * 4 + slot % 8 // 2
        first = (1 - kind) if op.zero else kind
        return quad * 4 * op.params + slot // 8 * 2 * op.params + first * 2 + slot % 2
    row = _channel_as_row(index) if op.axis == "channel" else index
    return ((group * 8 + row % 8) * (extent // 8) + row // 8) * op.params + kind


# --- vector order --------------------------------------------------------------------------------------------------

VECTOR_LANES = 16


def _simd_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile: a word holds neighbours along k, 16 rows lie side by side."""
    row, k, extent = (token, channel, head_dim) if op.rows_are_tokens else (channel, token, tokens)
    per_word = 32 // op.width
    word = (row // VECTOR_LANES * (extent // per_word) + k // per_word) * VECTOR_LANES + row % VECTOR_LANES
    return word * 32 + op.width * (k % per_word)


def _simd_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int, groups: int) -> torch.Tensor:
    """Scales of a group in natural order, then its zeros."""
    del groups
    return (group * op.params + kind) * extent + index
