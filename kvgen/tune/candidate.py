"""Candidates of the tuner (one schedule at one workload) and their records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from kvgen.lower.schedule import Params, Schedule
from kvgen.plaindata import Facts, Json
from kvgen.spec import AnyWorkload

Key = tuple[str, str]
"""(schedule id, workload key)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule at one workload."""

    schedule: Schedule
    workload: AnyWorkload

    @property
    def key(self) -> Key:
        """Identity of the measurement."""
        return self.schedule.id, self.workload.key

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self.schedule.backend

    @property
    def layout(self) -> Params:
        """The layout part: caches packed for it serve every launch over it, of any back end."""
        return self.schedule.layout

    def __str__(self) -> str:
        return f"{self.schedule} at {self.workload.key}"


@dataclass(frozen=True)
class Record(Json):
    """A finished measurement. `kind` is an outcome's kind; numbers are in µs and None unless it is `ok`."""

    candidate: Candidate
    kind: str
    us: float | None = None
    read_us: float | None = None
    samples: tuple[float, ...] = ()
    accuracy: Facts = field(default_factory=dict)
    detail: str = ""
    resources: Facts = field(default_factory=dict)
    watts: float | None = None
    """Power of the GPU, under a sustained load."""
    clock_mhz: float | None = None
    """Clock of its multiprocessors then."""
    module: str = ""
    """sha256 of the compiled module that was measured: what is said here is of no other one."""

    @property
    def right(self) -> bool:
        """Whether the candidate was verified; it need not have been timed."""
        return self.kind == "ok"

    @property
    def ok(self) -> bool:
        """Whether the candidate was verified and timed."""
        return self.kind == "ok" and self.us is not None and math.isfinite(self.us)

    @property
    def cost(self) -> float:
        """µs, infinite for a failure."""
        return self.us if self.ok and self.us is not None else math.inf

    def joined(self, more: Record) -> Record:
        """This record with the samples of another measurement of the same candidate. A failure of either is the result."""
        if not self.ok or not more.ok:
            return more if self.ok else self
        samples = (*self.samples, *more.samples)
        reads = [(record.read_us, len(record.samples)) for record in (self, more) if record.read_us is not None]
        read = sum(us * count for us, count in reads) / sum(count for _, count in reads) if reads else None
        return replace(self, us=median(samples), read_us=read, samples=samples)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the candidate's fields beside the others; `from_json` reads it back."""
        data = super().to_json()
        return {**data.pop("candidate"), **data}

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Inverse of `to_json`. Raises ValueError on other data."""
        return super().from_json({**data, "candidate": data})
