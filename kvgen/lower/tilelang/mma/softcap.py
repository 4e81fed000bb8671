"""Softcapping: a score s becomes cap * tanh(s / cap), as in Gemma 2. In log2 units x becomes C * tanh(x / C) with C = cap * log2(e).

tanh(x / C) is 1 - 2 / (1 + 2^a) with a = 2 * x / cap. Its error is absolute, at most 5e-7 with approximate exponentials and
reciprocals: a cap of 50 shifts a weight by 3e-5 at most, where an output may be off by 2e-3. `tanh.approx.f32` is cheaper, but
its relative error of 2^-11 shifts a score of 50 by 0.02, and its weight by 2 %."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.state import LOG2E

SERIES_FROM = 256.0
"""Caps from here on use a series for small scores, whose weights would otherwise be off by more than 1e-4."""
SERIES_BELOW = 0.5
"""Arguments a that the series is good for: its first neglected term is 2^-26 of the result."""
SERIES = tuple(c * (math.log(2) / 2) ** (2 * i + 1) for i, c in enumerate((1.0, -1 / 3, 2 / 15, -17 / 315)))
"""Coefficients of a, a^3, a^5, a^7 in tanh(a * ln 2 / 2)."""


@dataclass(frozen=True)
class Softcap:
    """A score modifier (`score_modifier.py`). Scores arrive as a = 2 * x / cap."""

    cap: float
    active = True

    @property
    def factor(self) -> float:
        """2 / cap, in the scale of scores."""
        return 2.0 / self.cap

    @property
    def base(self) -> float:
        """C of C - 2 * C / (1 + 2^a), which joins the subtraction of the softmax. The series yields C * tanh itself."""
        return self.cap * LOG2E if self.cap < SERIES_FROM else 0.0

    def apply(self, score: Any, bias: Any) -> Any:
        """`bias` plus the capped score, less `base`."""
        limit = self.cap * LOG2E
        power = T.call_extern("float32", "kvgen::ptx::exp2", score)
        inverse = T.call_extern("float32", "kvgen::reciprocal", T.float32(1.0) + power)
        if self.cap < SERIES_FROM:
            return _fma(T.float32(-2.0 * limit), inverse, bias)
        tanh = T.if_then_else(T.abs(score) < T.float32(SERIES_BELOW), _series(score), T.float32(1.0) - T.float32(2.0) * inverse)
        return _fma(T.float32(limit), tanh, bias)


def _series(a: Any) -> Any:
    total = T.float32(SERIES[-1])
    for coefficient in reversed(SERIES[:-1]):
        total = _fma(total, a * a, T.float32(coefficient))
    return total * a


def _fma(a: Any, b: Any, c: Any) -> Any:
    return T.call_extern("float32", "fmaf", a, b, c)
