# mypy: disable-error-code="untyped-decorator"
"""Output of a sub-tile: V's rows are channels, probabilities times V's scale are the B operand."""

from __future__ import annotations

import struct
from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.codes import expand, row_factor
from kvgen.lower.tilelang.mma.instructions import multiply, packer
from kvgen.lower.tilelang.mma.scores import load_codes, row_scale
from kvgen.lower.tilelang.mma.state import ALL, CODE_UNIT, static


@T.macro
def scale_probabilities(p: Any, r: Any) -> None:
    """Probability * scale in the operands' type, moved from accumulator to B layout by transposing 8x8 matrices; one set per group. With
    `halves` columns 4 to 7 hold tokens 16 to 31: their sums are not read, and the exchange puts these tokens into the first columns."""
    for group in static(p.groups("value")):
        for n in static(p.q_tiles):
            for row in static(p.own_rows):
                scale = row_scale(p, "value", r, group, row)
                i = n * 8 + row * 2
                b = (group * p.q_tiles + n) * 4 + row
                pair = T.call_extern("uint32", packer(p.operand_type("value")), r.p[i] * scale, r.p[i + 1] * scale)
                r.pb[b] = T.call_extern("uint32", "kvgen::ptx::transpose", pair)
                if p.halves:
                    r.pb[b + 2] = T.call_extern("uint32", "__shfl_xor_sync", T.uint32(ALL), r.pb[b], 16)


@T.macro
def set_middle(p: Any, r: Any) -> None:
    """The A operand that turns sums over codes into sums over what codes are away from the middle one: in rows 0 to 7, top code - middle
    in the columns of complemented tokens, and -middle in the others. Scaled per channel, V has no complemented tokens, and the sums of
    probabilities are multiplied at the end of a group: ones."""
    for half in static(2):
        r.middle[half * 2] = T.uint32(middle_word(p, half))
        r.middle[half * 2 + 1] = T.uint32(0)


def middle_word(p: Any, half: int) -> int:
    """Its two fp16 in columns 8 * `half` and on."""
    centre = p.centre(p.value)
    value = 1.0 if p.value.per_channel else -centre if half else (1 << p.value.bits) - 1 - centre
    return int.from_bytes(struct.pack("<2e", value, value), "little")


@T.macro
def sum_probabilities(p: Any, r: Any) -> None:
    """Sums of scaled probabilities as rounded, times `middle`: the first two sums of `zo`, of a whole warp. The others see zeros, and
    are those of probability times what the middle code stands for, of a lane."""
    for group in static(p.groups("value")):
        for n in static(p.q_tiles):
            for step in static(p.row_tiles):
                multiply(r.middle, 0, r.pb, (group * p.q_tiles + n) * 4 + step * 2, r.zo, (group * p.q_tiles + n) * 4)


@T.macro
def add_values(p: Any, at: Any, r: Any, memory: Any, subtile: Any) -> None:
    """o += codes times scaled probabilities; where V is scaled per channel, `group_sums` += codes times probabilities."""
    scale_probabilities(p, r)
    if p.value.quantized:
        sum_probabilities(p, r)
    for vector in T.unroll(p.vectors("value")):
        load_codes(p, "value", at, r, memory, subtile, vector)
        for i in T.unroll(p.fragments("value")):
            tile, step = p.fragment("value", vector * p.fragments("value") + i)
            expand(p.value.bits, r, i * p.fragment_words("value"), p.scaled_by_token("value"))
            for n in static(p.q_tiles):
                b = (tile // p.group_steps("value") * p.q_tiles + n) * 4 + step * 2
                for part in static(2 if p.value.bits == 2 else 1):
                    multiply(r.a, part * 4, r.pb, b, code_sums(p, r), (n * p.steps + tile + part) * 4, p.operand_type("value"))


def code_sums(p: Any, r: Any) -> Any:
    """What codes times weights are added to."""
    return r.group_sums if p.value.per_channel else r.o


def true_output(p: Any, r: Any, n: int, tile: Any, half: int, e: int) -> Any:
    """The lane's output row 8 * `half` + g from 16-row tile `tile` on, once sums are separated: codes in units of one, and the
    zeros' part. Without scales per token the sums are the output."""
    if not p.scaled_by_token("value"):
        return r.o[(n * p.steps + tile) * 4 + half * 2 + e]
    group = tile // p.group_steps("value")
    at = (group * p.q_tiles + n) * 4 + e
    zero = r.zo[at + 2] + r.zo[at]
    factor = row_factor(p.value.bits, half // 2, half % 2) * CODE_UNIT
    return r.o[(n * p.steps + tile) * 4 + half * 2 + e] * T.float32(factor) + zero
