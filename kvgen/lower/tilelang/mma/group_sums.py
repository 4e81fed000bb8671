# mypy: disable-error-code="untyped-decorator"
"""V scaled per channel: P*V of a KV tile, which lies within one group of tokens, is summed as probability * code. At the tile's end the
sums are multiplied by the channels' scales and added to the output."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import row_factor, separate
from kvgen.lower.tilelang.mma.state import CODE_UNIT, static


@T.macro
def begin_group(p: Any, r: Any) -> None:
    """Nothing added yet: `zo` has the sums of probabilities."""
    for i in T.unroll(p.q_tiles * p.steps * 4):
        r.group_sums[i] = 0.0
    for i in T.unroll(p.q_tiles * 4):
        r.zo[i] = 0.0


@T.macro
def add_group(p: Any, at: Any, r: Any, memory: Any, params: Any) -> None:
    """o += scale * (sum of probability * code) + zero * (sum of probabilities). A lane's channels are rows g and g + 8 of every row tile;
    their params lie side by side."""
    for i in T.unroll(p.q_tiles * p.steps // p.height("value")):
        separate(p.value.bits, r.group_sums, i * p.height("value") * 4)
    for i in T.unroll(p.steps // 2):
        for row in static(4):  # of two row tiles
            at_row = params + (at.g * p.steps + i * 2 + row // 2) * p.value.params
            word = memory[at_row + row % 2 if p.value.zero else at_row]
            r.v[1] = T.call_extern("float32", "kvgen::half_low" if p.value.zero or row % 2 == 0 else "kvgen::half_high", word)
            factor = row_factor(p.value.bits, row // 2, row % 2) * CODE_UNIT
            for n in static(p.q_tiles):
                for e in static(2):
                    out = (n * p.steps + i * 2 + row // 2) * 4 + row % 2 * 2 + e
                    codes = r.group_sums[out] * T.float32(factor) - r.zo[n * 4 + e] * T.float32(p.offset(p.value))
                    r.o[out] = r.o[out] + r.v[1] * codes
                    if p.value.zero:
                        r.o[out] = r.o[out] + T.call_extern("float32", "kvgen::half_high", word) * r.zo[n * 4 + e]
