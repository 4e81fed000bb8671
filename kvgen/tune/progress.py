"""Snapshots of a running build, for a progress view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Phase = Literal["waiting", "compiling", "measuring", "finalists", "done"]


@dataclass(frozen=True)
class Best:
    """The best time of one workload so far, in µs, beside the default's (None until it is measured)."""

    us: float
    schedule: str
    default_us: float | None


@dataclass(frozen=True)
class Progress:
    """A snapshot of a run."""

    phase: Phase
    note: str
    """The current activity."""
    done: int
    """Measurements taken in this run."""
    planned: int | None
    """Measurements that the run may take at most; None until the search begins."""
    known: int
    """Measurements found from earlier runs."""
    failures: Counter[str]
    """Outcomes other than ok, by kind."""
    best: Mapping[str, Best]
    """By workload key."""
    elapsed: float
    """Seconds."""
    left: float | None
    """Seconds left of the budget; None without a bound."""


Watch = Callable[[Progress], None]
