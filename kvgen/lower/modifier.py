"""The score modifier of a spec, as every C++ back end includes it: `<header>.cuh` and `<header>.hpp` define the type; and which specs
support extend attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.spec import AttentionSpec, KernelSpec


@dataclass(frozen=True)
class Modifier:
    """A type of namespace `kvgen`, over a struct of constants. Torch's extend attention has it, too."""

    type: str = "NoModifier"
    header: str = ""
    constants: str = ""


def modifier_of(attention: AttentionSpec) -> Modifier:
    """What changes a score before the mask is applied."""
    if attention.softcap:
        return Modifier("Softcap<ModifierConstants>", "softcap", _constants(kCap=float(attention.softcap)))
    return Modifier()


def extend_refusal(spec: KernelSpec, *, gpu: bool) -> str | None:
    """Why kernels of a GPU, or of the CPU, cannot attend with more query tokens than `attention.q_len`; None if they can.

    The CPU's do it themselves. On a GPU the cache is dequantized for torch's kernels (`kvgen.runtime.extend`).
    """
    if gpu and spec.attention.dtype == "float32":
        return "attention.dtype is float32, and torch's flash attention takes 16 bits"
    return None


def _constants(**values: float) -> str:
    members = "".join(f"  static constexpr float {name} = {value!r}f;\n" for name, value in values.items())
    return f"struct ModifierConstants {{\n{members}}};\n"
