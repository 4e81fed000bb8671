"""Positions of codes and params in a sub-tile: the order of MMA fragments, and the order of CPU vectors."""

from __future__ import annotations

import torch

from kvgen.format.layout import LANES, Operand, vector_words

VECTOR_LANES = 16


# --- fragment order ------------------------------------------------------------------------------------------------


def full_runs(op: Operand, head_dim: int) -> int:
    """Runs of 32 channels of an operand, in which lane t of a quad holds 8 neighbouring channels; runs of 16, in which it holds 4, follow.

    The last 16 channels of an odd multiple of 16 are such a run. Where groups of channels are no multiple of 32, all runs are, so that a
    k-step (of K) or a row tile (of V) has channels of one group.
    """
    split = op.quantized and op.axis == "token" and op.group % 32 and op.group < head_dim
    return 0 if split else head_dim // 32


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


def mma_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile, in fragment order."""
    full = full_runs(op, head_dim)
    if op.rows_are_tokens:
        row, rows, steps = token, tokens, head_dim // 16
        step, slot = _channel_as_k(channel, full)
    else:
        row, rows, steps = _channel_as_row(channel, full), head_dim, tokens // 16
        step, slot = token // 16, token % 16
    lane = 4 * (row % 8) + slot % 8 // 2
    if op.width == 16:
        tiles, words = rows // 16, 4
        tile, word, bit = row // 16, 2 * (slot // 8) + row % 16 // 8, 16 * (slot % 2)
    else:
        per_byte = 8 // op.bits
        words = max(1, 2 // per_byte)
        tiles = -(-rows // (8 * per_byte * words))  # the last words of a 2-bit V may be half empty
        unit = row // (8 * per_byte)
        tile, word = unit // words, unit % words
        bit = 8 * (2 * (slot % 2) + slot // 8) + op.bits * (row % (8 * per_byte) // 8)
    index = (tile * steps + step if op.rows_are_tokens else step * tiles + tile) * words + word
    vector = vector_words(tiles * steps * words)
    return ((index // vector * LANES + lane) * vector + index % vector) * 32 + bit


def mma_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int) -> torch.Tensor:
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


def simd_place(op: Operand, token: torch.Tensor, channel: torch.Tensor, tokens: int, head_dim: int) -> torch.Tensor:
    """Bit offset of an element within the codes of its sub-tile: a word has neighbours along k; 16 rows are adjacent."""
    row, k, extent = (token, channel, head_dim) if op.rows_are_tokens else (channel, token, tokens)
    per_word = 32 // op.width
    word = (row // VECTOR_LANES * (extent // per_word) + k // per_word) * VECTOR_LANES + row % VECTOR_LANES
    return word * 32 + op.width * (k % per_word)


def simd_param(op: Operand, kind: torch.Tensor, index: torch.Tensor, extent: int, group: torch.Tensor | int) -> torch.Tensor:
    """Scales of a group in natural order, then its zeros."""
    return (group * op.params + kind) * extent + index
