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

    a, c = spec.attention, spec.cache
    boosted = spec.key.boost
    boost = f" +{boosted.fraction:.1%} in 4 bits ({boosted.select})" if boosted.fraction else ""
    features = {
        f"pages of {c.page}": c.page,
        f"sink {c.sink}": c.sink,
        f"local {c.local}": c.local,
        f"rollback {c.rollback}": c.rollback,
        f"window {a.window}": a.window,
        f"soft cap {a.softcap:g}": a.softcap,
        "learned sinks": a.sinks,
        f"{a.q_len} query tokens": a.q_len > 1,
    }
    heads = f"{a.q_heads}/{a.kv_heads} heads of {a.head_dim}, {a.dtype}"
    return ", ".join([operand("K", spec.key) + boost, operand("V", spec.value), heads, *(text for text, has in features.items() if has)])
