"""What the tuner needs of whoever measures for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvgen.toolchain import Artifact
from kvgen.tune.decide import Kind
from kvgen.tune.point import Point, Record


class Bench(Protocol):
    """Verifies and times compiled points, each in a process that can be killed."""

    devices: int
    """Points that can be measured at the same time."""
    exclusive: bool
    """Compilers must rest while something is measured."""
    policy: Mapping[str, Any]
    """How and on what is measured: part of every study's identity."""

    def ready(self) -> None:
        """Start and compile what measuring itself needs; may be called beside everything else, and need not be."""
        ...

    def shortest_final(self, entrants: int) -> float:
        """Seconds that the final takes for so many, at least."""
        ...

    def measure(self, point: Point, artifact: Artifact, device: int) -> Record:
        """Verify, then time. Whatever the candidate does becomes a record."""
        ...

    def final(self, entrants: Sequence[tuple[Point, Artifact]], seconds: float | None) -> list[Record]:
        """Measure again, taking turns, so that all see the same machine; in about `seconds` where given, but never less than
        the shortest final, which is a whole one: every entrant and the read beside it.
        """
        ...

    def compare(self, new: Record, old: Record) -> Kind:
        """Whether `new` is faster, beyond noise."""
        ...

    def close(self) -> None:
        """Kill what runs."""
        ...
