"""Compares two series of samples: the ratio of their medians with a bootstrap interval."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from kvgen.errors import MeasureError
from kvgen.measure.job import LEAST_ROUNDS

MIN_EFFECT = 0.02
CONFIDENCE = 0.95
RESAMPLES = 2000

VerdictKind = Literal["faster", "same", "slower", "unclear"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """New time over old time: the ratio of medians and its interval. Below 1 is faster."""

    kind: VerdictKind
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.kind} ({self.ratio:.3f}, {self.low:.3f} to {self.high:.3f})"


def compare(
    new: Sequence[float],
    old: Sequence[float],
    *,
    min_effect: float = MIN_EFFECT,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Verdict:
    """Bootstrap of median(new) / median(old), in any unit of time.

    Two series of the same size are treated as pairs of interleaved rounds and drawn together, so that drift of the machine
    cancels. faster: the whole interval lies under 1 - min_effect; slower: over 1 + min_effect; same: between the two; else
    unclear. Raises MeasureError without samples, or with samples that are not positive.
    """
    if not new or not old:
        raise MeasureError("a comparison needs samples of both sides")
    if min(*new, *old) <= 0:
        raise MeasureError("a comparison needs positive times")
    draws = sorted(_ratios(new, old, random.Random(seed)))
    tail = (1 - confidence) / 2
    low, high = draws[int(tail * RESAMPLES)], draws[min(RESAMPLES - 1, int((1 - tail) * RESAMPLES))]
    few = min(len(new), len(old)) < LEAST_ROUNDS  # too few to know how much they vary
    return Verdict("unclear" if few else _kind(low, high, min_effect), median(new) / median(old), low, high)


def _ratios(new: Sequence[float], old: Sequence[float], rng: random.Random) -> list[float]:
    if len(new) == len(old):
        index = range(len(new))
        picks = (rng.choices(index, k=len(new)) for _ in range(RESAMPLES))
        return [median([new[i] for i in pick]) / median([old[i] for i in pick]) for pick in picks]
    return [median(rng.choices(new, k=len(new))) / median(rng.choices(old, k=len(old))) for _ in range(RESAMPLES)]


def _kind(low: float, high: float, effect: float) -> VerdictKind:
    if high < 1 - effect:
        return "faster"
    if low > 1 + effect:
        return "slower"
    return "same" if low >= 1 - effect and high <= 1 + effect else "unclear"
