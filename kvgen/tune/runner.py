"""The interface through which the tuner measures: `IsolatedRunner` implements it, tests use a fake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvgen.plaindata import Facts
from kvgen.toolchain import Artifact
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.decide import Kind

Passed = tuple[str, str]
"""(sha256 of a compiled module, key of a workload)."""


def verified(runner: Runner, candidate: Candidate, artifact: Artifact) -> Record:
    """`Runner.verify`, unless the runner has verified this module at this workload already."""
    accuracy = runner.passed.get((artifact.sha256, candidate.workload.key))
    if accuracy is None:
        return runner.verify(candidate, artifact)
    return Record(candidate, "ok", accuracy=accuracy, resources=artifact.resources.to_json(), module=artifact.sha256)


class Runner(Protocol):
    """Verifies and times compiled candidates, each in a process that can be killed."""

    devices: int
    """Candidates that can be measured at the same time."""
    exclusive: bool
    """Compilers must rest while something is measured."""
    policy: Mapping[str, Any]
    """Device, timing and verification policies: part of every study's name."""

    @property
    def passed(self) -> Mapping[Passed, Facts]:
        """What this runner has verified, with its errors; no record of another run is in it."""
        ...

    def ready(self) -> None:
        """Start workers and compile the read roofline. Optional: it only saves the first measurement that time. Thread-safe."""
        ...

    def shortest_final(self, entrants: int) -> float:
        """Least seconds that the final takes for `entrants` candidates."""
        ...

    def measure(self, candidate: Candidate, artifact: Artifact, device: int) -> Record:
        """Verify, then time. A crash, a hang or a wrong result of the candidate becomes its record."""
        ...

    def final(self, entrants: Sequence[tuple[Candidate, Artifact]], seconds: float | None) -> list[Record]:
        """Measure the finalists again, interleaved A B C A B C …, so that drift of the machine affects all alike. Takes about
        `seconds` where given, but at least the shortest final: every finalist and the read roofline, LEAST_ROUNDS times.
        """
        ...

    def verify(self, candidate: Candidate, artifact: Artifact) -> Record:
        """Verify a candidate at its workload, without timing it: `Record.right` says whether it is. Checks that do not depend on a workload
        run only if the module has not passed them.
        """
        ...

    def compare(self, new: Record, old: Record) -> Kind:
        """How `new` compares with `old`, beyond noise."""
        ...

    def close(self) -> None:
        """Kill all workers."""
        ...
