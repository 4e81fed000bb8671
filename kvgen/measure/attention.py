"""Candidates of attention: verified over life cycles of caches, timed on filled ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvgen.measure.allowance import Allowance
from kvgen.measure.check import Checker
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.job import CheckPolicy, Job, TimingPolicy
from kvgen.measure.protocols import Stage
from kvgen.measure.read_roofline import read_roofline
from kvgen.measure.scenario import long_prompt, scenarios
from kvgen.measure.timed import TimedCheck
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec, Workload


@dataclass(frozen=True)
class AttentionCandidate:
    """One module as two variants of one layout, which may share caches. See `kvgen.measure.protocols.Candidate`."""

    job: Job
    variant: Variant
    """For verification and to fill caches: the memory of every call counts as the candidate's, that between calls as kvgen's."""
    bare: Variant
    """For timing, inside `with allowance:`: single calls are not counted, and so not slowed down."""
    allowance: Allowance

    @property
    def shared_by(self) -> Hashable:
        """Format and layout of the caches."""
        return self.variant.spec.format_id, self.variant.layout.id

    def inputs(self, workload: Workload, cold: int | None) -> WorkloadInputs:
        """Filled caches."""
        return WorkloadInputs(self.variant, workload, self.job.device, cold)

    def time(self, inputs: WorkloadInputs, policy: TimingPolicy) -> tuple[float, ...]:
        """See `WorkloadInputs.time`."""
        with self.allowance:
            return inputs.time(self.bare, policy)

    def roofline(self, inputs: WorkloadInputs, policy: TimingPolicy) -> tuple[float, ...]:
        """A pure read under the workload's load."""
        return read_roofline(self.job.target).samples(inputs.nbytes, policy.under(inputs.workload.load))

    def verification(self, policy: CheckPolicy) -> AttentionVerification:
        """See `AttentionVerification`."""
        return AttentionVerification(Checker(self.variant, self.job.device, policy, exact=self.job.schedule.exact))


@dataclass(frozen=True)
class AttentionVerification:
    """Life cycles of small caches, long reads, and the caches that are timed. See `kvgen.measure.protocols.Verification`."""

    checker: Checker

    @property
    def accuracy(self) -> dict[str, float]:
        """The largest errors so far."""
        return self.checker.comparison.accuracy

    def run(self, stage: Stage, settle: Callable[[], None]) -> None:
        """The checks that do not depend on a workload."""
        checker = self.checker
        stage("reference")
        scenarios(checker.variant.spec, checker.variant.layout, checker.policy, checker.device.type)
        long_prompt(checker.variant.spec, checker.variant.layout, checker.device.type)
        stage("verify")
        checker.run()
        settle()
        stage("reference")
        checker.reads.prepare()
        stage("verify")
        checker.reads.run()
        settle()

    def at(self, inputs: WorkloadInputs) -> TimedCheck:
        """The caches that are timed."""
        return TimedCheck(inputs, self.checker.variant, self.checker.comparison)

    def again(self) -> None:
        """See `Checker.again`."""
        self.checker.again()


def load_attention_candidate(job: Job, spec: KernelSpec, allowance: Allowance) -> AttentionCandidate:
    """Load a job's module. Raises KvgenError where it cannot be loaded or lacks a function."""
    layout = job.layout()
    with allowance:
        module = load(job.artifact)
    return AttentionCandidate(job, Variant(spec, layout, allowance.guard(module)), Variant(spec, layout, module), allowance)
