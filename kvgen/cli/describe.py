"""Formats in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.spec import AnySpec, QuantSpec


def describe(spec: AnySpec) -> str:
    """A format in a few words."""
    from kvgen.spec import MatrixSpec

    if isinstance(spec, MatrixSpec):
        return f"{spec.operation} a matrix, {spec.matrix.dtype}, int{spec.matrix.bits} per {spec.matrix.axis} symmetric"

    def operand(letter: str, quant: QuantSpec) -> str:
        if not quant.quantized:
            return f"{letter} {spec.attention.dtype}"
        return f"{letter} int{quant.bits} per {quant.axis} /{quant.group}{'' if quant.zero else ' symmetric'}"

    a = spec.attention
    boost = f" +{spec.key.boost.fraction:.1%} in 4 bits" if spec.key.boost.fraction else ""
    place = f", pages of {spec.cache.page}" if spec.cache.page else ""
    return f"{operand('K', spec.key)}{boost}, {operand('V', spec.value)}, {a.q_heads}/{a.kv_heads} heads of {a.head_dim}, {a.dtype}{place}"
