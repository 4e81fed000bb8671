"""The measurement of one workload, as plain data: written by the tuner, stored in the registry."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from kvgen.plaindata import Json
from kvgen.spec import AnyWorkload


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

    def check(self) -> None:
        """Raises ValueError for times that no measurement gives."""
        require_times(f"the measurement of {self.workload.key}", self.us, *self.samples, self.read_us, self.default_us)


def require_times(what: str, *times: float | None) -> None:
    """Raise ValueError unless every time is a number above 0, by which others can be divided. None: not measured."""
    if not all(us is None or 0 < us <= sys.float_info.max for us in times):
        raise ValueError(f"{what} has a time that is no finite number above 0")
