"""The budget of a build, in measurements and in seconds, and how far the build is."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

RESERVE = 0.3
"""Fraction of the seconds that is kept for the final, where that needs no more."""
_PART = r"(\d+(?:\.\d+)?)\s*(h|min|m|s)\s*"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds of a duration: `90`, `90s`, `3m`, `5min`, `1h30m`; of several numbers each has a unit. Raises ValueError with an example."""
    compact = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        return float(compact)
    if re.fullmatch(f"(?:{_PART})+", compact) is None:
        raise ValueError(f"{text!r:.60} is not a duration; write 90s, 3m, 5min or 1h30m")
    return sum(float(number) * _UNITS[unit[0]] for number, unit in re.findall(_PART, compact))


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of a build; None means unbounded. With neither, the whole space is measured."""

    trials: int | None = None
    """Measurements of one schedule at one workload. The default schedule is measured whatever the bound is."""
    seconds: float | None = None
    """Wall-clock seconds for everything: compiling, measuring, finalists."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that bound nothing or leave nothing."""
        if self.trials is not None and self.trials < 1:
            raise ValueError(f"trials must be 1 or more, not {self.trials}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"a budget must be longer than 0 s, and end, not {self.seconds:g} s")


@dataclass
class Clock:
    """What is left of a budget."""

    budget: Budget
    now: Callable[[], float] = time.monotonic
    used: int = 0
    """Measurements so far."""
    needed: float = 0.0
    """Seconds that the final takes at least."""
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.now()

    @property
    def elapsed(self) -> float:
        """Seconds since the build began."""
        return self.now() - self.start

    @property
    def left(self) -> float | None:
        """Seconds left of the whole build; None without a bound."""
        return None if self.budget.seconds is None else max(0.0, self.budget.seconds - self.elapsed)

    @property
    def trials_left(self) -> int | None:
        """Measurements left; None without a bound."""
        return None if self.budget.trials is None else max(0, self.budget.trials - self.used)

    @property
    def search_left(self) -> float | None:
        """Seconds left until the final must begin; None without a bound."""
        return None if self.budget.seconds is None else max(0.0, self._before(RESERVE))

    @property
    def measuring_left(self) -> float:
        """Seconds that a measurement of the search may take which begins now: it may last into the first half of the final's time."""
        return 0.0 if self.search_over else self._before(RESERVE / 2)

    @property
    def search_over(self) -> bool:
        """Whether only the finalists may still be measured."""
        return self.trials_left == 0 or self.search_left == 0

    def _before(self, share: float) -> float:
        """Seconds until this share of the budget is left, or what the final takes at least."""
        if self.budget.seconds is None:
            return math.inf
        return self.budget.seconds - max(share * self.budget.seconds, self.needed) - self.elapsed


Phase = Literal["waiting", "compiling", "searching", "finalists", "done"]


@dataclass(frozen=True)
class Best:
    """The best time of one workload so far, in µs, beside the default's (None until it is measured)."""

    us: float
    schedule: str
    default_us: float | None


@dataclass(frozen=True)
class Progress:
    """A snapshot of a build: measurements of this build (`done`), the most that it may take (`planned`, None until the search begins) and
    those of earlier builds (`known`); `failures` by kind, `best` by workload key, seconds `elapsed` and `left` (None without a bound).
    """

    phase: Phase
    note: str
    """The current activity."""
    done: int
    planned: int | None
    known: int
    failures: Counter[str]
    best: Mapping[str, Best]
    elapsed: float
    left: float | None


Watch = Callable[[Progress], None]
