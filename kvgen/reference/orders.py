"""Positions of codes and params in a sub-tile: the order of MMA fragments, and the order of CPU vectors."""

from __future__ import annotations

import torch

from kvgen.reference.layout import LANES, Operand, vector_words

VECTOR_LANES = 16


# --- fragment order ------------------------------------------------------------------------------------------------


def _channel_as_k(channel: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k-step, slot in 0..15) of a channel on the k axis: lane t of a quad holds 8 neighbouring channels in two k-steps.

    Of an odd number of runs of 16 channels, lane t holds 4 neighbouring channels of the last run, in one k-step.
    """
    x, i = channel // 32, channel % 4
    last = channel >= channels // 32 * 32
    t = torch.where(last, channel % 16 // 4, channel % 32 // 8)
    y = torch.where(last, 0, channel % 8 // 4)
    return 2 * x + y, 2 * t + i % 2 + 8 * (i // 2)


def _channel_as_row(channel: torch.Tensor) -> torch.Tensor:
    """Row of a channel on the 16-row side, as four 8x8 transpositions of 8-channel loads produce it."""
    x, a, y, h, b = channel // 32, channel % 32 // 8, channel % 8 // 4, channel % 4 // 2, channel % 2
    return 32 * x + 16 * y + 8 * h + 2 * a + b


def mma_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile, in fragment order."""
    if op.rows_are_tokens:
        row, rows, steps = token, tokens, head_dim // 16
        step, slot = _channel_as_k(channel, head_dim)
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


def mma_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int, groups: int) -> torch.Tensor:
    """Position of a param in its section.

    Params of K per channel lie along k, next to the four slots that a lane scales: {zero pair, scale pair} twice, so that a 16-byte load
    is the A operand of the sum of q * z. All others lie along rows: lane g of the eight finds rows g, g + 8, ... next to each other.
    """
    del groups
    if op.axis == "channel" and op.rows_are_tokens:
        step, slot = _channel_as_k(index, extent)
        quad = step * 4 + slot % 8 // 2
        first = (1 - kind) if op.zero else kind
        return quad * 4 * op.params + slot // 8 * 2 * op.params + first * 2 + slot % 2
    row = _channel_as_row(index) if op.axis == "channel" else index
    return ((group * 8 + row % 8) * (extent // 8) + row // 8) * op.params + kind


# --- vector order --------------------------------------------------------------------------------------------------


def simd_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile: a word has neighbours along k; 16 rows are adjacent."""
    row, k, extent = (token, channel, head_dim) if op.rows_are_tokens else (channel, token, tokens)
    per_word = 32 // op.width
    word = (row // VECTOR_LANES * (extent // per_word) + k // per_word) * VECTOR_LANES + row % VECTOR_LANES
    return word * 32 + op.width * (k % per_word)


def simd_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int, groups: int) -> torch.Tensor:
    """Scales of a group in natural order, then its zeros."""
    del groups
    return (group * op.params + kind) * extent + index
