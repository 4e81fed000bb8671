"""What a kernel is put through before it is trusted: the fp64 reference of its numbers, and the checks of its calls against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """How a variant is verified, besides at the workload of its job."""

    steps: int = 3
    """Least number of decode steps of a sequence of calls; there is one for every number of query tokens that the spec allows."""
    repeats: int = 3
    """Calls that must agree bit for bit."""
    long_tokens: int = 1000
    """Tokens, at least, of the long sequence of calls."""
    most_tokens: int = 1 << 16
    """Tokens, at most, of the long sequences that `attend` reads."""
    workloads_only: bool = False
    """Skip the checks that do not depend on a workload: the artifact has passed them."""


class Check:
    """A part of the verification of one variant: `prepare`, then `run`; at a workload, `again` after timing, and in the end `close`."""

    def prepare(self) -> None:
        """Compute what is expected, unless it is kept from another variant."""

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""

    def again(self) -> None:
        """Raises CheckError if a call of `run` now gives other bits."""

    def close(self) -> None:
        """Give memory back."""


class OperationCheck(Check):
    """A check of a linear layer, or of operations on a matrix, that does not depend on a workload; `accuracy` takes the largest errors."""

    def __init__(self, variant: Any, device: str, policy: CheckPolicy | None = None, accuracy: dict[str, float] | None = None) -> None:
        self.variant, self.device, self.policy = variant, device, policy or CheckPolicy()
        self.accuracy = {} if accuracy is None else accuracy
