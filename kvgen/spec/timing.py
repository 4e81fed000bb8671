"""The measurement of one workload, as plain data: written by the tuner, stored in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.spec.model import Workload


@dataclass(frozen=True)
class Timing:
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

    @property
    def read_fraction(self) -> float | None:
        """Share of the read's speed that the kernel reaches: 1 is as fast as reading alone."""
        return self.read_us / self.us if self.read_us is not None and self.us > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        return {
            "workload": self.workload.model_dump(mode="json"),
            "us": self.us,
            "samples": list(self.samples),
            "read_us": self.read_us,
            "default_us": self.default_us,
            "read_fraction": self.read_fraction,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        """Inverse of `to_json`. Raises KeyError, TypeError, ValueError or SpecError on other data."""

        def number(name: str) -> float | None:
            value = data.get(name)
            return None if value is None else float(value)

        samples = tuple(float(sample) for sample in data.get("samples", ()))
        return cls(Workload(**data["workload"]), float(data["us"]), samples, number("read_us"), number("default_us"))
