"""The score modifier seam: it changes a score before the mask is applied. Scores are logarithms to base 2: x = s * log2(e).

A modifier is an object with
    active              whether it changes scores; an inactive modifier costs no instruction
    factor              what scores are multiplied by beforehand, together with their scale
    base                the `bias` of `apply` that yields the score itself
    apply(score, bias)  `bias` plus the new score, less `base`; `score` has been multiplied by `factor`
"""

from __future__ import annotations

from typing import Any, Protocol

import tilelang.language as T

from kvgen.lower.tilelang.mma.softcap import Softcap
from kvgen.lower.tilelang.traits import Traits


class ScoreModifier(Protocol):
    """What is plugged in."""

    @property
    def active(self) -> bool: ...
    @property
    def factor(self) -> float: ...
    @property
    def base(self) -> float: ...
    def apply(self, score: Any, bias: Any) -> Any: ...


class NoModifier:
    """Scores as they are."""

    active = False
    factor = 1.0
    base = 0.0

    def apply(self, score: Any, bias: Any) -> Any:
        """Their sum."""
        return score + bias


def modifier_of(p: Traits) -> ScoreModifier:
    """The modifier of a program."""
    return Softcap(p.softcap) if p.softcap > 0 else NoModifier()


def scaled(p: Traits, scale: Any) -> Any:
    """`scale` times the modifier's factor."""
    return scale * T.float32(modifier_of(p).factor)


def modified(p: Traits, score: Any) -> Any:
    """The new score; `score` has been multiplied by `scaled`."""
    return modifier_of(p).apply(score, T.float32(modifier_of(p).base))
