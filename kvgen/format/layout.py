"""The packed layout: one declared bijection between (token in block, channel) and (byte, bit) of a block.

A block contains `tokens` tokens of one KV head as contiguous bytes:

    [K channel params][V channel params][boost index]
    then per sub-tile: [K codes][K token params][boost codes][V codes][V token params]

Only the operands with that axis have the params section, and only a boosted K has a boost index (the numbers of the boosted
channels per group of tokens, ascending) and boost codes (the upper two bits of theirs, ordered as the codes of a 2-bit K that has
these channels alone). Padding behind the index lets the sub-tiles begin at a multiple of 128 bytes, like the block.

Two orders of codes exist. `mma` is the order in which the lanes of a warp hold m16n8k16 fragments (BitDecoding's interleaving,
with K and transposed V on the 16-row side); `simd` puts 16 rows in the 16 lanes of a vector. In both, an operand is a matrix
[rows, k]: K has rows = tokens and k = channels, V has rows = channels and k = tokens.

This module says what a block holds, how large it is and which layouts exist, without torch. The maps themselves are tensors:
`kvgen.format.places`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from kvgen.digest import digest
from kvgen.format.codecs import Codec, codec
from kvgen.spec import KernelSpec, KeySpec, QuantSpec
from kvgen.spec.rules import TWO_LEVELS

LAYOUT_VERSION = 2
SECTION_ALIGN = 16
BLOCK_ALIGN = 128
LANES = 32
BOOST_CHANNELS = 256
"""Channel numbers of a boost index are bytes."""
BOOST_RUN = 16
"""Upper bits of so many boosted channels lie together."""

Order = Literal["mma", "simd"]
Which = Literal["key", "value"]


@dataclass(frozen=True)
class Boost:
    """Channels of every group that have 4 bits instead of 2, and how they are chosen."""

    channels: int
    select: Literal["mean_abs", "range", "static"]


@dataclass(frozen=True)
class Rotation:
    """A normalized Walsh-Hadamard transform of every `block` channels of a head, after fixed `signs` (`format/rotation.py`)."""

    block: int
    signs: bool


@dataclass(frozen=True)
class Operand:
    """How K or V sits in a block. `width` is the stored bits per element, `params` the numbers stored per group."""

    bits: int
    width: int
    axis: Literal["channel", "token"]
    group: int
    zero: bool
    rows_are_tokens: bool
    boost: Boost | None = None
    rotation: Rotation | None = None
    type: str | None = None
    """Of codes that are floats."""
    static: Literal[True] | None = None
    """True where scales are given with the cache: in place of those of groups, or (nvfp4) beside them."""

    @property
    def codec(self) -> Codec:
        """How its elements are stored."""
        return codec(self.bits, self.width, self.zero, self.type)

    @property
    def quantized(self) -> bool:
        return self.codec.quantized

    @property
    def grouped(self) -> bool:
        """Whether groups have params, in the block."""
        return self.quantized and (not self.static or self.type in TWO_LEVELS)

    @property
    def per_channel(self) -> bool:
        """Whether a group of tokens has params per channel, at the head of the block."""
        return self.grouped and self.axis == "channel"

    @property
    def per_token(self) -> bool:
        """Whether a group of channels has params per token, at the end of the sub-tile's codes."""
        return self.grouped and self.axis == "token"

    @property
    def params(self) -> int:
        """2 (scale and zero), 1 (scale), or 0 (not quantized, or with a static scale alone)."""
        return (2 if self.zero else 1) if self.grouped else 0

    @property
    def boosted(self) -> int:
        """Channels of a group that have four bits."""
        return self.boost.channels if self.boost else 0


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class PackedLayout:
    """Sizes and offsets of one block, in bytes unless a name says otherwise."""

    tokens: int
    head_dim: int
    order: Order
    param_bytes: int
    key: Operand
    value: Operand

    @cached_property
    def id(self) -> str:
        """Digest of the layout. It is part of what a cache stores (`residual.cache_id`), and a kernel refuses a cache with another one."""
        return digest({"version": LAYOUT_VERSION, **_plain(asdict(self))})

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

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """K's and V's part of the layout."""
        return self.key, self.value

    @property
    def rotations(self) -> tuple[Rotation | None, Rotation | None]:
        """K's and V's, before they are stored."""
        return self.key.rotation, self.value.rotation

    # --- sizes -----------------------------------------------------------------------------------------------------

    def codes_bytes(self, which: Which) -> int:
        """Codes of one sub-tile."""
        return self.subtile * self.code_channels(which) * self.operand(which).width // 8

    def code_channels(self, which: Which) -> int:
        """Channels that codes have room for: in fragment order V has whole row tiles."""
        op = self.operand(which)
        return _align(self.head_dim, op.codec.row_tile) if self.order == "mma" and not op.rows_are_tokens else self.head_dim

    def bytes_of_param(self, op: Operand) -> int:
        """Bytes of a scale or zero."""
        return op.codec.param_bytes or self.param_bytes

    def channel_params_bytes(self, which: Which) -> int:
        """Params section at the head of the block (axis channel)."""
        op = self.operand(which)
        if not op.per_channel:
            return 0
        return _align(self.tokens // op.group * self.head_dim * op.params * self.bytes_of_param(op), SECTION_ALIGN)

    def token_params_bytes(self, which: Which) -> int:
        """Params section of one sub-tile (axis token)."""
        op = self.operand(which)
        if not op.per_token:
            return 0
        return _align(self.subtile * (self.head_dim // op.group) * op.params * self.bytes_of_param(op), SECTION_ALIGN)

    @property
    def boost_codes_bytes(self) -> int:
        """Upper bits of the boosted channels in one sub-tile. They fill runs of 16 channels."""
        return self.subtile * self.boost_slots * 2 // 8

    @property
    def boost_slots(self) -> int:
        """Boosted channels of a group, and places without one up to a whole run."""
        return _align(self.key.boosted, BOOST_RUN)

    @property
    def _boost_numbers(self) -> int:
        return self.tokens // self.key.group * self.key.boosted

    @property
    def channel_params_end(self) -> int:
        """Channel params of K and V, which come first in a block."""
        return self.channel_params_bytes("key") + self.channel_params_bytes("value")

    @property
    def subtile_bytes(self) -> int:
        """One sub-tile with its token params."""
        return sum(self.codes_bytes(w) + self.token_params_bytes(w) for w in ("key", "value")) + self.boost_codes_bytes

    @property
    def header_bytes(self) -> int:
        """Channel params of K and V, the boost index, and padding before the first sub-tile."""
        return _align(self.channel_params_end + self._boost_numbers, BLOCK_ALIGN)

    @property
    def block_bytes(self) -> int:
        """One block of one KV head, padding included."""
        return _align(self.end, BLOCK_ALIGN)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block without padding, which a kernel must read."""
        return self.channel_params_end + self._boost_numbers + self.subtiles * self.subtile_bytes

    @property
    def end(self) -> int:
        """Offset of the first byte behind the last sub-tile."""
        return self.header_bytes + self.subtiles * self.subtile_bytes

    # --- offsets ---------------------------------------------------------------------------------------------------

    def codes_offset(self, which: Which) -> int:
        """Of the codes within a sub-tile."""
        return 0 if which == "key" else self.boost_codes_offset + self.boost_codes_bytes

    @property
    def boost_codes_offset(self) -> int:
        """Of the boost codes within a sub-tile."""
        return self.codes_bytes("key") + self.token_params_bytes("key")

    def token_params_offset(self, which: Which) -> int:
        """Of the token params within a sub-tile."""
        return self.codes_offset(which) + self.codes_bytes(which)

    def channel_params_offset(self, which: Which) -> int:
        """Of the channel params within a block."""
        return 0 if which == "key" else self.channel_params_bytes("key")


def packed_layout(spec: KernelSpec, tokens: int, order: Order) -> PackedLayout:
    """The layout of blocks of `tokens` tokens for a spec.

    Raises ValueError if a group does not fit the block or the order does not support the shape.
    """
    element = 32 if spec.attention.dtype == "float32" else 16
    dim = spec.attention.head_dim
    key, value = _operand(spec.key, dim, element, rows_are_tokens=True), _operand(spec.value, dim, element, rows_are_tokens=False)
    layout = PackedLayout(tokens, dim, order, element // 8, key, value)
    problem = layout_problem(layout)
    if problem:
        raise ValueError(problem)
    return layout


def _operand(quant: QuantSpec, head_dim: int, element: int, *, rows_are_tokens: bool) -> Operand:
    if not quant.quantized:
        return Operand(16, element, "token", head_dim, False, rows_are_tokens)
    boost = None
    if isinstance(quant, KeySpec) and quant.boost.fraction > 0:
        boost = Boost(quant.boosted(head_dim), quant.boost.select)
    rotation = rotation_of(quant, head_dim)
    kind = None if quant.type == "int" else quant.type
    if not quant.grouped:
        return Operand(quant.bits, quant.bits, "token", head_dim, False, rows_are_tokens, boost, rotation, kind, True)
    static: Literal[True] | None = True if quant.static else None
    return Operand(quant.bits, quant.bits, quant.axis, quant.group, quant.zero, rows_are_tokens, boost, rotation, kind, static)


def rotation_of(quant: QuantSpec, head_dim: int) -> Rotation | None:
    """The rotation of K or V that kernels do before it is stored."""
    return (
        None if quant.rotate is None or quant.rotate.applied == "caller" else Rotation(quant.rotate.channels(head_dim), quant.rotate.signs)
    )


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Facts without absent features, so that adding a feature to kvgen does not change the id of layouts without it."""
    return {key: _plain(value) if isinstance(value, dict) else value for key, value in data.items() if value is not None}


def layout_problem(layout: PackedLayout) -> str | None:
    """Why a layout cannot exist, or None."""
    if layout.tokens < 1 or layout.tokens % 16 or layout.tokens % layout.subtile:
        return f"the residual block ({layout.tokens}) must be 16 tokens or a multiple of 32"
    for which in ("key", "value"):
        op = layout.operand(which)
        if op.per_channel and layout.tokens % op.group:
            return f"the residual block ({layout.tokens}) must be a multiple of {which}.group ({op.group})"
        if op.boost and layout.head_dim > BOOST_CHANNELS:
            return f"a boost index numbers {BOOST_CHANNELS} channels, head_dim is {layout.head_dim}"
        if layout.order == "mma":
            if op.width == 32:
                return "fragment order holds 16-bit and narrower elements only"
            if op.boosted % BOOST_RUN:
                return f"fragment order holds {BOOST_RUN} boosted channels together, and {op.boosted} are no multiple"
            if op.rows_are_tokens and layout.subtile % op.codec.row_tile:
                return f"fragment order of {op.codec.label} K needs residual blocks of {op.codec.row_tile} tokens or more"
    return None


def full_runs(op: Operand, head_dim: int) -> int:
    """Runs of 32 channels, in which lane t of a quad has 8 neighbouring channels; runs of 16, in which it has 4, follow.

    The last 16 channels of an odd multiple of 16 are such a run. Where groups of channels are no multiple of 32, all runs are, so that a
    k-step (of K) or a row tile (of V) has channels of one group.
    """
    return 0 if op.per_token and op.group % 32 and op.group < head_dim else head_dim // 32


def vector_words(words: int) -> int:
    """Words that a lane loads at once, of the `words` it owns in a sub-tile."""
    return 4 if words % 4 == 0 else 2 if words % 2 == 0 else 1
