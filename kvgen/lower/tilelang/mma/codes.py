# mypy: disable-error-code="untyped-decorator"
"""Codes as A operands: masked fields of a word read as fp16 denormals. The top field is left mixed with the lower ones, which
saves an instruction per word; sums of rows are separated afterwards, once. Elements of 16 bits are operands as they are.

V's codes may be *complemented* in the first eight tokens of every run of 16: these are read as -(top code - code), by the instruction
that masks them. Sums of products then stay near zero however many tokens are summed, and the tensor core, which truncates when it
accumulates, loses nothing (docs/design.md)."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.state import static

SIGNS = 0x80008000
"""The signs of two halves."""


def row_factor(bits: int, tile: int, half: int) -> float:
    """What a sum over rows `half` * 8 .. + 7 of 16-row tile `tile` is to be multiplied by: fields sit at different bits."""
    field = {16: 0, 8: 0, 4: half, 2: tile % 2 * 2 + half}[bits]
    return 2.0 ** (-bits * field)


def masked(word: Any, mask: int, complemented: bool) -> Any:
    """The fields under a mask of two halves, or their complements as negative numbers."""
    if not complemented:
        return word & T.uint32(mask)
    return T.call_extern("uint32", "kvgen::ptx::not_and_or", word, T.uint32(mask), T.uint32(SIGNS))


@T.macro
def expand(bits: Any, r: Any, at: Any, complemented: Any) -> None:
    """The A operand (two for 2-bit codes) in the words from `at` on of the vector last loaded: four of 16 bits, two of 8, else one.
    `complemented`: its columns 0 to 7 are; never of 16 bits."""
    if bits == 16:
        for i in static(4):
            r.a[i] = r.words[at + i]
    elif bits == 8:
        r.a[0] = masked(r.words[at], 0x00FF00FF, complemented)
        r.a[1] = masked(r.words[at + 1], 0x00FF00FF, complemented)
        r.a[2] = T.call_extern("uint32", "kvgen::ptx::odd_bytes", r.words[at])
        r.a[3] = T.call_extern("uint32", "kvgen::ptx::odd_bytes", r.words[at + 1])
    elif bits == 4:
        r.a[0] = masked(r.words[at], 0x000F000F, complemented)
        r.a[1] = masked(r.words[at], 0x00FF00FF, complemented)
        r.a[3] = T.call_extern("uint32", "kvgen::ptx::odd_bytes", r.words[at])
        r.a[2] = r.a[3] & T.uint32(0x000F000F)
    else:
        r.a[0] = masked(r.words[at], 0x00030003, complemented)
        r.a[1] = masked(r.words[at], 0x000C000C, complemented)
        r.a[4] = masked(r.words[at], 0x00300030, complemented)
        r.a[5] = masked(r.words[at], 0x00FF00FF, complemented)
        r.a[7] = T.call_extern("uint32", "kvgen::ptx::odd_bytes", r.words[at])
        r.a[2] = r.a[7] & T.uint32(0x00030003)
        r.a[3] = r.a[7] & T.uint32(0x000C000C)
        r.a[6] = r.a[7] & T.uint32(0x00300030)


@T.macro
def separate(bits: Any, sums: Any, at: Any) -> None:
    """Take the lower fields out of the mixed one, in the accumulators of one A operand (two 16-row tiles for 2-bit codes)."""
    for e in static(2):
        if bits == 4:
            sums[at + 2 + e] = sums[at + 2 + e] - sums[at + e]
        if bits == 2:
            sums[at + 6 + e] = sums[at + 6 + e] - (sums[at + e] + sums[at + 2 + e] + sums[at + 4 + e])


@T.macro
def mix(bits: Any, sums: Any, at: Any) -> None:
    """Inverse of `separate`, row factors included: plain sums become what the packed loop goes on to add to."""
    for e in static(2):
        if bits == 4:
            sums[at + 2 + e] = sums[at + 2 + e] * T.float32(16.0) + sums[at + e]
        if bits == 2:
            sums[at + 2 + e] = sums[at + 2 + e] * T.float32(4.0)
            sums[at + 4 + e] = sums[at + 4 + e] * T.float32(16.0)
            sums[at + 6 + e] = sums[at + 6 + e] * T.float32(64.0) + (sums[at + e] + sums[at + 2 + e] + sums[at + 4 + e])
