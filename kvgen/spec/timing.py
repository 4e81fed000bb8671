"""The measurement of one workload, as plain data: written by the tuner, stored in the registry."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import computed_field

from kvgen.plaindata import Json
from kvgen.spec.model import Workload


@dataclass(frozen=True)
class Timing(Json):
    """Time of one workload in microseconds per call."""

    workload: Workload
    us: float
    """Median."""
    samples: tuple[float, ...] = ()
    """Every sample that `us` is the median of."""
    read_us: float | None = None
    """A pure read of the same bytes in the same run."""
    default_us: float | None = None
    """The default schedule in the same run."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def read_fraction(self) -> float | None:
        """Share of the read's speed that the kernel reaches: 1 is as fast as reading alone."""
        return self.read_us / self.us if self.read_us is not None and self.us > 0 else None
