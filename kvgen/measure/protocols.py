"""What a worker needs of a candidate of any operation, to verify and to time it: `attention` and `matrix` implement these protocols."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from kvgen.measure.job import CheckPolicy, TimingPolicy
from kvgen.measure.power import Power
from kvgen.spec import AnyWorkload

Stage = Callable[[str], None]
"""Called with the name of the stage that begins: load, reference, verify, time."""


class Inputs(Protocol):
    """What a call at a workload reads and writes."""

    nbytes: int
    """Bytes that the roofline moves for one call."""
    power: Power
    """Of the GPU during the last sustained timing."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory."""
        ...


class WorkloadCheck(Protocol):
    """Verification of a candidate at one workload, on the inputs that are timed."""

    def prepare(self) -> None:
        """Compute what is expected."""
        ...

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        ...

    def again(self) -> None:
        """The same after timing."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class Verification(Protocol):
    """Verification of one candidate."""

    @property
    def accuracy(self) -> dict[str, float]:
        """The largest errors so far."""
        ...

    def run(self, stage: Stage, settle: Callable[[], None]) -> None:
        """The checks that do not depend on a workload; `settle` waits for the device. Raises CheckError."""
        ...

    def at(self, inputs: Any) -> WorkloadCheck:
        """The check at the workload of these inputs."""
        ...

    def again(self) -> None:
        """Raises CheckError if the last call of `run` now gives other bits."""
        ...


class Candidate(Protocol):
    """A loaded module, verified and timed."""

    @property
    def shared_by(self) -> Hashable:
        """Candidates for which this is equal share inputs."""
        ...

    def inputs(self, workload: Any, cold: int | None) -> Inputs:
        """Inputs of a workload, in as many copies as exceed `cold` bytes."""
        ...

    def time(self, inputs: Any, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call."""
        ...

    def roofline(self, inputs: Any, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs of what no call over the inputs can be faster than: a pure read, or a copy, of as many bytes."""
        ...

    def verification(self, policy: CheckPolicy) -> Verification:
        """A verification of this candidate."""
        ...


Key = tuple[Hashable, AnyWorkload, str, int | None]
"""What the inputs of a workload depend on."""
