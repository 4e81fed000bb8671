"""What a worker process does with a job: load, verify, time, verify again. The process is the isolation; this code has none of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from kvgen.errors import CheckError, UnsupportedError
from kvgen.lower.schedule import layout_of
from kvgen.measure.device import Power, metered
from kvgen.measure.inputs import MatrixInputs, NoRoom, WorkloadInputs
from kvgen.measure.measurement import LEAST_ROUNDS, Job, Kind, Measurement, TimingPolicy
from kvgen.measure.memory import Allowance
from kvgen.measure.read_roofline import read_roofline
from kvgen.runtime.matrix import MatrixVariant
from kvgen.runtime.module import MatrixModule, load, load_as
from kvgen.runtime.variant import Variant
from kvgen.spec import MatrixSpec
from kvgen.verify import Check, CheckPolicy
from kvgen.verify.check import WorkloadCheck, checks_of
from kvgen.verify.matrix import MatrixCheck, MatrixWorkloadCheck
from kvgen.verify.tolerance import Comparison

Stage = Callable[[str], None]
"""Called with the name of the stage that begins: load, reference, verify, time."""
KEPT_SHARE = 0.3
"""Of a GPU's memory, for inputs of workloads that are kept for later candidates."""
NO_MEMORY = ("bad_alloc", "can't allocate memory", "out of memory", "cudaErrorMemoryAllocation")

_kept: dict[Hashable, Any] = {}


def perform(job: Job, stage: Stage, memory_bytes: int | None = None) -> Measurement:
    """Do a job; exceptions of the candidate become its measurement. The candidate may allocate `memory_bytes` on the host."""
    accuracy: dict[str, float] = {}
    checks: list[Check] = []

    def verify(check: Check) -> None:
        stage("reference")
        check.prepare()
        stage("verify")
        check.run()
        _settle(job)
        checks.append(check)

    found = Measurement("ok", accuracy=accuracy)
    try:
        stage("load")
        candidate = load_candidate(job, memory_bytes)
        if job.check is not None and not job.check.workloads_only:
            for check in candidate.checks(job.check, accuracy):
                verify(check)
        if job.workload is not None:
            stage("reference")
            inputs = _kept_inputs(candidate, job)
            if job.check is not None:
                verify(candidate.check_at(inputs, accuracy))
            if job.timing is not None:
                stage("time")
                samples, power = candidate.time(inputs, job.timing)
                read_us = candidate.read_us(inputs, job.timing) if job.timing.read else None
                found = replace(found, samples=samples, read_us=read_us, watts=power.watts, clock_mhz=power.clock_mhz)
                stage("verify")
                for check in checks:
                    check.again()
        _settle(job)
    except Exception as error:
        return _failed(error, accuracy)
    finally:
        for check in checks:
            check.close()
    return found


def perform_interleaved(
    jobs: Sequence[Job], rounds: int, stage: Stage, seconds: float | None = None, memory_bytes: int | None = None
) -> list[Measurement]:
    """Time verified candidates A B C A B C …; each sample is the median of one round. A candidate that fails does not end the others.

    With `seconds`, each workload gets an equal part of the time that is left, and as many rounds as fit, but at least LEAST_ROUNDS.
    """
    until = None if seconds is None else time.monotonic() + seconds
    candidates: dict[int, _Candidate] = {}
    found = [Measurement("ok") for _ in jobs]
    reads: list[list[float]] = [[] for _ in jobs]
    workloads = list(dict.fromkeys(job.workload for job in jobs))
    for place, workload in enumerate(workloads):
        shared: dict[Hashable, Any] = {}
        for _ in rounds_within(rounds, until, len(workloads) - place):
            read_us: dict[int, float] = {}  # by bytes: one read per round serves all candidates
            for index, job in enumerate(jobs):
                if job.workload != workload or not found[index].ok:
                    continue
                policy = job.timing or TimingPolicy()
                stage(f"time {index}")
                try:
                    candidate = candidates.get(index) or candidates.setdefault(index, load_candidate(job, memory_bytes))
                    inputs = shared.get(candidate.shared_by) or shared.setdefault(candidate.shared_by, _kept_inputs(candidate, job))
                    samples, power = candidate.time(inputs, policy)
                    if policy.read:
                        if inputs.nbytes not in read_us:
                            read_us[inputs.nbytes] = candidate.read_us(inputs, policy)
                        reads[index].append(read_us[inputs.nbytes])
                    samples = (*found[index].samples, median(samples))
                    found[index] = replace(found[index], samples=samples, watts=power.watts, clock_mhz=power.clock_mhz)
                    _settle(job)
                except Exception as error:
                    found[index] = _failed(error, {})
    return [replace(one, read_us=median(us)) if one.ok and us else one for one, us in zip(found, reads, strict=True)]


def rounds_within(most: int, until: float | None, parts: int) -> Iterator[int]:
    """Numbers of rounds of one workload, until its part (1 / `parts`) of the time is used up, judged by the rounds so far."""
    began = time.monotonic()
    seconds = 0.0 if until is None else (until - began) / parts
    for number in range(most):
        spent = time.monotonic() - began
        if until is not None and number >= LEAST_ROUNDS and spent * (number + 1) / number > seconds:
            return
        yield number


def load_candidate(job: Job, memory_bytes: int | None = None) -> _Candidate:
    """Load the module of a candidate that is not trusted yet. Raises KvgenError where it cannot be loaded or lacks a function."""
    allowance = Allowance(memory_bytes)
    if isinstance(job.spec, MatrixSpec):
        with allowance:
            matrix = load_as(job.artifact, MatrixModule)
        return MatrixCandidate(job, allowance, MatrixVariant(job.spec, allowance.guard(matrix)), MatrixVariant(job.spec, matrix))
    layout = layout_of(job.spec, job.schedule.layout)
    with allowance:
        module = load(job.artifact)
    return AttentionCandidate(job, allowance, Variant(job.spec, layout, allowance.guard(module)), Variant(job.spec, layout, module))


@dataclass(frozen=True)
class AttentionCandidate:
    """One module as two variants of one layout, which may share caches."""

    job: Job
    allowance: Allowance
    variant: Variant
    """For verification and to fill caches: the memory of every call counts as the candidate's, that between calls as kvgen's."""
    bare: Variant
    """For timing, inside `with allowance:`: single calls are not counted, and so not slowed down."""

    @property
    def shared_by(self) -> Hashable:
        """Candidates for which this is equal share inputs."""
        return self.variant.spec.format_id, self.variant.layout.id

    def checks(self, policy: CheckPolicy, accuracy: dict[str, float]) -> list[Check]:
        """The checks that do not depend on a workload; the largest errors go to `accuracy`."""
        return checks_of(self.variant, self.job.device, policy, self._comparison(accuracy))

    def inputs(self, workload: Any, cold: int | None) -> WorkloadInputs:
        """Caches of a workload, in as many copies as exceed `cold` bytes."""
        return WorkloadInputs(self.variant, workload, self.job.device, cold)

    def check_at(self, inputs: WorkloadInputs, accuracy: dict[str, float]) -> Check:
        """The check on the caches that are timed."""
        return WorkloadCheck(self.variant, inputs, self.job.check, self._comparison(accuracy))

    def time(self, inputs: WorkloadInputs, policy: TimingPolicy) -> tuple[tuple[float, ...], Power]:
        """Samples in µs per call; power and clock under a sustained load of a GPU."""
        sustained = self.job.device == "cuda" and policy.under(inputs.workload.load).sustained_seconds
        with self.allowance, metered() if sustained else nullcontext(Power()) as power:
            samples = inputs.time(self.bare, policy)
        return samples, power

    def read_us(self, inputs: WorkloadInputs, policy: TimingPolicy) -> float:
        """µs of what no call over the inputs can be faster than: a pure read of as many bytes, under the workload's load."""
        return median(read_roofline(self.job.target).samples(inputs.nbytes, policy.under(inputs.workload.load)))

    def _comparison(self, accuracy: dict[str, float]) -> Comparison:
        return Comparison(self.variant.spec, torch.device(self.job.device), accuracy, exact=self.job.schedule.exact)


@dataclass(frozen=True)
class MatrixCandidate:
    """One module of an operation on a matrix; see `AttentionCandidate`."""

    job: Job
    allowance: Allowance
    variant: MatrixVariant
    bare: MatrixVariant

    @property
    def shared_by(self) -> Hashable:
        """The format."""
        return self.variant.spec.format_id

    def checks(self, policy: CheckPolicy, accuracy: dict[str, float]) -> list[Check]:
        """Ragged shapes, strides, ties, constant channels."""
        return [MatrixCheck(self.variant, self.job.device, policy, accuracy)]

    def inputs(self, workload: Any, cold: int | None) -> MatrixInputs:
        """Matrices."""
        return MatrixInputs(self.variant, workload, self.job.device, cold)

    def check_at(self, inputs: MatrixInputs, accuracy: dict[str, float]) -> Check:
        """The matrices that are timed."""
        return MatrixWorkloadCheck(self.variant, inputs.shape.key, inputs.matrices[0], inputs.codes[0], inputs.outs[0], accuracy)

    def time(self, inputs: MatrixInputs, policy: TimingPolicy) -> tuple[tuple[float, ...], Power]:
        """Samples in µs of the spec's operation."""
        with self.allowance:
            return inputs.time(self.bare, policy), Power()

    def read_us(self, inputs: MatrixInputs, policy: TimingPolicy) -> float:
        """µs of a copy that moves as many bytes."""
        return median(read_roofline(self.job.target).copies(inputs.nbytes, policy))


_Candidate = AttentionCandidate | MatrixCandidate


def _kept_inputs(candidate: Any, job: Job) -> Any:
    """Inputs, shared by all candidates that can. A GPU keeps those of several layouts and workloads; the oldest are evicted first.

    A candidate that fails ends the process, so its inputs are never reused.
    """
    cold = 0 if job.timing is None else job.timing.cold_bytes
    key = (candidate.shared_by, job.workload, job.device, cold)
    inputs = _kept.pop(key, None)
    if inputs is None:
        room = KEPT_SHARE * torch.cuda.get_device_properties(0).total_memory if job.device == "cuda" else 0
        while _kept and sum(kept.held_bytes for kept in _kept.values()) > room:
            del _kept[next(iter(_kept))]
        inputs = candidate.inputs(job.workload, cold)
    _kept[key] = inputs
    return inputs


def _settle(job: Job) -> None:
    """Wait for the GPU, so that its asynchronous errors are raised here and not in the next job."""
    if job.device == "cuda":
        torch.cuda.synchronize()


def _failed(error: Exception, accuracy: dict[str, float]) -> Measurement:
    """The measurement of a candidate that raised. The last line of a C++ error has the message, the lines above the location."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = (lines[-1] if lines else type(error).__name__)[:500]
    kind: Kind = "crash"
    if isinstance(error, (UnsupportedError, NoRoom)):
        kind = "unsupported"
    elif isinstance(error, CheckError):
        kind = "wrong"
    elif isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY):
        kind, last = "oom", f"it ran out of memory ({last})"
    return Measurement(kind, last, accuracy=accuracy)
