"""What takes part in a comparison."""

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
    """One turn: samples in µs per call, over inputs that do not sit in a cache."""
    nbytes: int
    """Bytes that a call must read."""
    error: Callable[[], float]
    """Relative L2 of the output against fp64 attention over what was read."""
    backend: str = ""
    """Which way is taken for this case, where the provider has several."""


class Provider(Protocol):
    """One way to compute the attention. `name` is who makes it, `backend` which of its ways."""

    name: str
    backend: str

    def prepare(self, case: Case) -> Entrant:
        """Raises UnsupportedError, with the reason, where it cannot run the case, ToolchainMissing where it can run none here."""
        ...
