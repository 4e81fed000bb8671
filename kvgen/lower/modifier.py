"""The score modifier of a spec, as every C++ back end includes it: `<header>.cuh` and `<header>.hpp` define the type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.spec import AttentionSpec  # an exported kernel copies this module, and has no spec package


@dataclass(frozen=True)
class Modifier:
    """A type of namespace `kvgen`, over a struct of constants. `extends`: torch's extend attention has it, too."""

    type: str = "NoModifier"
    header: str = ""
    constants: str = ""
    extends: bool = True


def modifier_of(attention: AttentionSpec) -> Modifier:
    """What changes a score before the mask is applied."""
    if attention.softcap:
        return Modifier("Softcap<ModifierConstants>", "softcap", _constants(kCap=float(attention.softcap)))
    return Modifier()


def _constants(**values: float) -> str:
    members = "".join(f"  static constexpr float {name} = {value!r}f;\n" for name, value in values.items())
    return f"struct ModifierConstants {{\n{members}}};\n"
