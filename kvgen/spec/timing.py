"""The measurement of one workload, as plain data: written by the tuner, stored in the registry."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgen.plaindata import Json
from kvgen.spec.operations import AnyWorkload


@dataclass(frozen=True)
class Timing(Json):
    """Time of one workload in microseconds per call."""

    workload: AnyWorkload
    us: float
    """Median."""
    samples: tuple[float, ...] = ()
    """Every sample that `us` is the median of."""
    read_us: float | None = None
    """A pure read of the same bytes in the same run; of an operation on a matrix, a copy that moves them."""
    default_us: float | None = None
    """The default schedule in the same run."""
    watts: float | None = None
    """Power of the GPU during the measurement, if the workload's load is sustained."""
    clock_mhz: float | None = None
    """Clock of its multiprocessors then."""

    read_fraction: float | None = field(init=False, default=None)
    """Share of the read's speed that the kernel reaches: 1 is as fast as reading alone."""

    def __post_init__(self) -> None:
        fraction = self.read_us / self.us if self.read_us is not None and self.us > 0 else None
        object.__setattr__(self, "read_fraction", fraction)
