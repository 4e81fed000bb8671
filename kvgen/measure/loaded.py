"""A loaded module of a candidate that is not trusted yet: its code runs only within its allowance of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvgen.measure.allowance import Allowance
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.job import Job, TimingPolicy
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant

Allow = Callable[[], Allowance]
"""Creates the allowance of a candidate."""


@dataclass(frozen=True)
class LoadedCandidate:
    """One module as two variants of one layout, which may share caches."""

    variant: Variant
    """For verification and to fill caches: the memory of every call counts as the candidate's, that between calls as kvgen's."""
    bare: Variant
    """For timing, inside `with allowance:`: single calls are not counted, and so not slowed down."""
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
