"""Where every number of a block lies: the index maps of a packed layout, over the order of MMA fragments and that of CPU vectors."""

from __future__ import annotations

import torch

from kvgen.format.layout import LANES, Operand, PackedLayout, Which, full_runs, vector_words

VECTOR_LANES = 16


def code_bits(layout: PackedLayout, which: Which) -> torch.Tensor:
    """Bit offset in the block of every element: int64 [tokens, head_dim]."""
    op = layout.operand(which)
    token = torch.arange(layout.tokens).unsqueeze(1)
    channel = torch.arange(layout.head_dim).unsqueeze(0)
    sub, local = token // layout.subtile, token % layout.subtile
    place = _mma_place if layout.order == "mma" else _simd_place
    within = place(op, local, channel, layout.subtile, layout.head_dim)
    return (layout.header_bytes + sub * layout.subtile_bytes + layout.codes_offset(which)) * 8 + within


def param_offsets(layout: PackedLayout, which: Which) -> torch.Tensor:
    """Byte offset in the block of every scale (index 0) and zero (index 1).

    int64 [params, tokens / group, head_dim] for axis channel, [params, tokens, head_dim / group] for axis token.
    """
    op = layout.operand(which)
    slot = _mma_param if layout.order == "mma" else _simd_param
    kind = torch.arange(op.params).reshape(-1, 1, 1)
    if op.axis == "channel":
        group = torch.arange(layout.tokens // op.group).reshape(1, -1, 1)
        channel = torch.arange(layout.head_dim).reshape(1, 1, -1)
        index = group * layout.head_dim * op.params + slot(op, kind, channel, layout.head_dim, 0)
        return layout.channel_params_offset(which) + index * layout.bytes_of_param(op)
    token = torch.arange(layout.tokens).reshape(1, -1, 1)
    group = torch.arange(layout.head_dim // op.group).reshape(1, 1, -1)
    index = slot(op, kind, token % layout.subtile, layout.subtile, group)
    start = layout.header_bytes + token // layout.subtile * layout.subtile_bytes + layout.token_params_offset(which)
    return start + index * layout.bytes_of_param(op)


def boost_index_offsets(layout: PackedLayout) -> torch.Tensor:
    """Byte offset in the block of the number of every boosted channel: int64 [tokens / group, boosted channels]."""
    channels = layout.key.boosted
    return layout.channel_params_end + torch.arange(layout.tokens // layout.key.group * channels).reshape(-1, channels)


def boost_bits(layout: PackedLayout) -> torch.Tensor:
    """Bit offset in the block of the upper two bits of every boosted channel: int64 [tokens, boosted channels]."""
    token, slot = torch.arange(layout.tokens).unsqueeze(1), torch.arange(layout.key.boosted).unsqueeze(0)
    place = _mma_place if layout.order == "mma" else _simd_place
    upper = Operand(2, 2, "channel", layout.key.group, True, rows_are_tokens=True)
    within = place(upper, token % layout.subtile, slot, layout.subtile, layout.boost_slots)
    start = layout.header_bytes + token // layout.subtile * layout.subtile_bytes + layout.boost_codes_offset
    return start * 8 + within


# --- fragment order ------------------------------------------------------------------------------------------------


def _channel_in_quad(channel: torch.Tensor, full: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(16-channel tile, lane t of a quad, place in 0..3) of a channel, of which the first `full` runs have 32 channels."""
    wide = channel < 32 * full
    tile = torch.where(wide, 2 * (channel // 32) + channel % 8 // 4, channel // 16)
    return tile, torch.where(wide, channel % 32 // 8, channel % 16 // 4), channel % 4


def _channel_as_k(channel: torch.Tensor, full: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k-step, slot in 0..15) of a channel on the k axis: a lane's channels are neighbours, in two k-steps where runs have 32."""
    step, t, i = _channel_in_quad(channel, full)
    return step, 2 * t + i % 2 + 8 * (i // 2)


def _channel_as_row(channel: torch.Tensor, full: int) -> torch.Tensor:
    """Row of a channel on the 16-row side, as 8x8 transpositions of a lane's loads produce it: four in a run of 32, two in one of 16."""
    tile, t, i = _channel_in_quad(channel, full)
    return 16 * tile + 8 * (i // 2) + 2 * t + i % 2


def _mma_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile, in fragment order."""
    full, codec = full_runs(op, head_dim), op.codec
    if op.rows_are_tokens:
        row, rows, steps = token, tokens, head_dim // 16
        step, slot = _channel_as_k(channel, full)
    else:
        row, rows, steps = _channel_as_row(channel, full), head_dim, tokens // 16
        step, slot = token // 16, token % 16
    tile, tiles = row // codec.row_tile, -(-rows // codec.row_tile)  # the last words of V may be half empty
    word, bit = codec.place(row % codec.row_tile, slot)
    index = (tile * steps + step if op.rows_are_tokens else step * tiles + tile) * codec.words + word
    vector = vector_words(tiles * steps * codec.words)
    lane = 4 * (row % 8) + slot % 8 // 2
    return ((index // vector * LANES + lane) * vector + index % vector) * 32 + bit


def _mma_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int) -> torch.Tensor:
    """Position of a param in its section.

    Params of K per channel lie along k, next to the four slots that a lane scales: {zero pair, scale pair} twice, so that a 16-byte load
    is the A operand of the sum of q * z. All others lie along rows: lane g of the eight finds rows g, g + 8, ... next to each other.
    """
    if op.axis == "channel" and op.rows_are_tokens:
        step, slot = _channel_as_k(index, full_runs(op, extent))
        quad = step * 4 + slot % 8 // 2
        first = (1 - kind) if op.zero else kind
        return quad * 4 * op.params + slot // 8 * 2 * op.params + first * 2 + slot % 2
    row = _channel_as_row(index, full_runs(op, extent)) if op.axis == "channel" else index
    return ((group * 8 + row % 8) * (extent // 8) + row // 8) * op.params + kind


# --- vector order --------------------------------------------------------------------------------------------------


def _simd_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile: a word has neighbours along k; 16 rows are adjacent."""
    row, k, extent = (token, channel, head_dim) if op.rows_are_tokens else (channel, token, tokens)
    per_word = 32 // op.width
    word = (row // VECTOR_LANES * (extent // per_word) + k // per_word) * VECTOR_LANES + row % VECTOR_LANES
    return word * 32 + op.width * (k % per_word)


def _simd_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int) -> torch.Tensor:
    """Scales of a group in natural order, then its zeros."""
    return (group * op.params + kind) * extent + index
