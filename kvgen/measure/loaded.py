"""A loaded module that is not trusted yet: its code runs within its allowance only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvgen.measure.allowance import Allowance
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.job import Job, TimingPolicy
from kvgen.runtime.launch import Variant
from kvgen.runtime.module import load

Allow = Callable[[], Allowance]
"""Makes the allowance of a candidate."""


@dataclass(frozen=True)
class LoadedCandidate:
    """One module as two variants of one layout, which may share caches."""

    variant: Variant
    """Every call of it is counted, and what is done between calls is kvgen's: for verification, and to fill caches."""
    bare: Variant
    """No call of it is counted, nor slowed down by that: to be used inside `with allowance:`."""
    allowance: Allowance

    def time(self, inputs: WorkloadInputs, policy: TimingPolicy) -> tuple[float, ...]:
        """See `WorkloadInputs.time`."""
        with self.allowance:
            return inputs.time(self.bare, policy)


def load_candidate(job: Job, allow: Allow = Allowance) -> LoadedCandidate:
    """Load a job's module. Raises KvgenError where it cannot be loaded or lacks a function."""
    allowance, layout = allow(), job.layout()
    with allowance:
        module = load(job.artifact)
    return LoadedCandidate(Variant(job.spec, layout, allowance.guard(module)), Variant(job.spec, layout, module), allowance)
