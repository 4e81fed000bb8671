# mypy: disable-error-code="untyped-decorator"
"""Tiles from packed memory: codes and params looked up element by element where the packed layout has them."""

from __future__ import annotations

from typing import Any

import tilelang.language as T


def channel_slot(channel: Any) -> tuple[Any, Any]:
    """(k-step, slot) of a channel on the k axis."""
    return channel // 32 * 2 + channel % 8 // 4, channel % 32 // 8 * 2 + channel % 2 + channel % 4 // 2 * 8


def channel_row(channel: Any) -> Any:
    """Row of a channel on the 16-row side."""
    return channel // 32 * 32 + channel % 8 // 4 * 16 + channel % 4 // 2 * 8 + channel % 32 // 8 * 2 + channel % 2


def code(p: Any, k: Any, which: str, subtile: Any, token: Any, channel: Any) -> Any:
    """The code of an element of a sub-tile that begins at word `subtile`."""
    bits = p.layout.operand(which).bits
    if which == "key":
        row, (step, slot), steps, rows = token, channel_slot(channel), p.steps, p.layout.subtile
    else:
        row, step, slot, steps, rows = channel_row(channel), token // 16, token % 16, p.layout.subtile // 16, p.dim
    height = 8 * (8 // bits)
    words = 2 if bits == 8 else 1
    tile = row // height // words
    index = (tile * steps + step if which == "key" else step * (rows // height // words) + tile) * words + row // height % words
    lane = row % 8 * 4 + slot % 8 // 2
    bit = (slot % 2 * 2 + slot // 8) * 8 + row % height // 8 * bits
    vector = p.vector(which)
    word = k.packed[subtile + p.codes(which) + (index // vector * 32 + lane) * vector + index % vector]
    return (word >> T.cast(bit, "uint32")) & T.uint32(2**bits - 1)


def number(k: Any, at: Any, half: Any) -> Any:
    """The half-precision number in half `half` of word `at` of packed memory."""
    word = k.packed[at]
    return T.if_then_else(
        half % 2 == 0, T.call_extern("float32", "kvgen::half_low", word), T.call_extern("float32", "kvgen::half_high", word)
    )


def channel_param(p: Any, k: Any, group: Any, channel: Any, kind: int) -> Any:
    """Scale (kind 0) or zero (kind 1) of a channel of K; `group` is the word where its group's params begin."""
    step, slot = channel_slot(channel)
    first = 1 - kind if p.key.zero else kind
    half = (step * 4 + slot % 8 // 2) * 4 * p.key.params + slot // 8 * 2 * p.key.params + first * 2 + slot % 2
    return number(k, group + half // 2, half)


def token_param(p: Any, k: Any, which: str, subtile: Any, token: Any, kind: int) -> Any:
    """Scale (kind 0) or zero (kind 1) of a token of a sub-tile."""
    params = p.layout.operand(which).params
    half = (token % 8 * (p.layout.subtile // 8) + token // 8) * params + kind
    return number(k, subtile + p.params(which) + half // 2, half)


@T.macro
def fill_codes(p: Any, k: Any, which: Any, tile: Any, kv_tile: Any) -> None:
    """tile[token, channel] = codes of the KV tile that begins at word `kv_tile`."""
    for token, channel in T.Parallel(p.tile_tokens, p.dim):
        subtile = kv_tile + token // p.layout.subtile * p.subtile_words
        tile[token, channel] = T.cast(code(p, k, which, subtile, token % p.layout.subtile, channel), "float16")
