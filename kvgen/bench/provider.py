"""The interface of the providers of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvgen.bench.case import Case
from kvgen.measure.job import TimingPolicy


@dataclass(frozen=True)
class Entrant:
    """A provider that is ready to run a case."""

    sample: Callable[[TimingPolicy], tuple[float, ...]]
    """One round: samples in µs per call, over inputs that are not in the device's cache."""
    nbytes: int
    """Bytes that a call must read."""
    error: Callable[[], float]
    """Relative L2 of the output against fp64 attention over what was read."""
    backend: str = ""
    """The variant of the provider that is used for this case, if it has several."""


class Provider(Protocol):
    """One way to compute the attention: `name` is the library, `backend` its variant."""

    name: str
    backend: str

    def prepare(self, case: Case) -> Entrant:
        """Raises UnsupportedError, with the reason, if it cannot run the case, ToolchainMissing if it is not installed."""
        ...
