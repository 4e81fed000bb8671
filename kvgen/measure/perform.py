"""What a worker process does with a job: load, verify, time, verify again. The process is the isolation; this code has none of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from kvgen.errors import CheckError, UnsupportedError
from kvgen.lower.linear import rows_of
from kvgen.lower.schedule import layout_of
from kvgen.measure.inputs import LinearInputs, MatrixInputs, NoRoom, WorkloadInputs
from kvgen.measure.measurement import LEAST_ROUNDS, Job, Kind, Measurement, TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.measure.timer import Power, metered
from kvgen.runtime.calls import Variant
from kvgen.runtime.linear import load_linear
from kvgen.runtime.matrix import load_matrix
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec, LinearSpec, MatrixSpec
from kvgen.spec.workloads import MOST_SPREAD, spread
from kvgen.verify import Check, CheckPolicy
from kvgen.verify.check import WorkloadCheck, checks_of
from kvgen.verify.linear import LinearCheck, LinearWorkloadCheck
from kvgen.verify.matrix import MatrixCheck, MatrixWorkloadCheck
from kvgen.verify.tolerance import Comparison

Stage = Callable[[str], None]
"""Called with the name of the stage that begins: load, reference, verify, time, read."""
KEPT_SHARE = 0.3
"""Of a GPU's memory, for inputs of workloads that are kept for later candidates."""
RETAKES = 2
"""How often rounds that were disturbed are repeated."""
NO_MEMORY = ("bad_alloc", "can't allocate memory", "Cannot allocate memory", "out of memory", "cudaErrorMemoryAllocation")

_kept: dict[Hashable, Any] = {}


def perform(job: Job, stage: Stage) -> Measurement:
    """Do a job; exceptions of the candidate become its measurement."""
    accuracy: dict[str, float] = {}
    at_workload: Check | None = None

    def verify(check: Check) -> None:
        stage("reference")
        check.prepare()
        stage("verify")
        check.run()
        _settle(job)

    found = Measurement("ok", accuracy=accuracy)
    try:
        stage("load")
        candidate = load_job(job)
        if job.check is not None and not job.check.workloads_only:
            for check in candidate.checks(job.check, accuracy):
                verify(check)
        if job.workload is not None:
            stage("reference")
            inputs = _kept_inputs(candidate, job)
            if job.check is not None:
                at_workload = candidate.check_at(inputs, accuracy)
                verify(at_workload)
            if job.timing is not None:
                stage("time")
                samples, power = candidate.time(inputs, job.timing)
                if spread(samples) > MOST_SPREAD:
                    samples, power = min((samples, power), candidate.time(inputs, job.timing), key=lambda one: spread(one[0]))
                found = replace(found, samples=samples, watts=power.watts, clock_mhz=power.clock_mhz)
                if job.timing.read:
                    stage("read")
                    found = replace(found, read_us=candidate.read_us(inputs, job.timing))
                if at_workload is not None:
                    stage("verify")
                    at_workload.again()
        _settle(job)
    except Exception as error:
        return _failed(error, accuracy)
    finally:
        if at_workload is not None:
            at_workload.close()
    return found


def perform_interleaved(jobs: Sequence[Job], rounds: int, stage: Stage, seconds: float | None = None) -> list[Measurement]:
    """Time verified candidates A B C A B C …; each sample is the median of one round. A candidate that fails does not end the others.

    With `seconds`, each workload gets an equal part of the time that is left, and as many rounds as fit, but at least LEAST_ROUNDS. Rounds
    whose samples differ by more than MOST_SPREAD are repeated, as far as there is time; the steadiest count.
    """
    until = None if seconds is None else time.monotonic() + seconds
    loaded: dict[int, Loaded] = {}
    found = [Measurement("ok") for _ in jobs]
    workloads = list(dict.fromkeys(job.workload for job in jobs))
    for place, workload in enumerate(workloads):
        end = None if until is None else time.monotonic() + (until - time.monotonic()) / (len(workloads) - place)
        here = {index: job for index, job in enumerate(jobs) if job.workload == workload}
        shared: dict[Hashable, Any] = {}
        began, takes = time.monotonic(), [_turns(here, rounds, end, loaded, shared, stage)]
        while _worst(takes[-1]) > MOST_SPREAD and len(takes) <= RETAKES:
            if end is not None and time.monotonic() + (time.monotonic() - began) / len(takes) > end:
                break
            takes.append(_turns(here, rounds, end, loaded, shared, stage))
        for index, one in min(takes, key=_worst).items():
            found[index] = next((take[index] for take in takes if not take[index].ok), one)
    return found


def _worst(take: Mapping[int, Measurement]) -> float:
    """The largest spread of what was right."""
    return max((spread(one.samples) for one in take.values() if one.ok), default=0.0)


def _turns(
    jobs: Mapping[int, Job], rounds: int, end: float | None, candidates: dict[int, Loaded], shared: dict[Hashable, Any], stage: Stage
) -> dict[int, Measurement]:
    """Rounds of the jobs of one workload, until the time `end`. Modules and inputs are kept for further rounds."""
    found = dict.fromkeys(jobs, Measurement("ok"))
    reads: dict[int, list[float]] = {index: [] for index in jobs}
    for _ in rounds_within(rounds, end):
        read_us: dict[int, float] = {}  # by bytes: one read per round serves all candidates
        for index, job in jobs.items():
            if not found[index].ok:
                continue
            policy = job.timing or TimingPolicy()
            stage("load")
            try:
                candidate = candidates.get(index) or candidates.setdefault(index, load_job(job))
                if candidate.shared_by not in shared:
                    stage("reference")
                    shared[candidate.shared_by] = _kept_inputs(candidate, job)
                inputs = shared[candidate.shared_by]
                stage(f"time {index}")
                samples, power = candidate.time(inputs, policy)
                if policy.read:
                    if inputs.nbytes not in read_us:
                        stage("read")
                        read_us[inputs.nbytes] = candidate.read_us(inputs, policy)
                    reads[index].append(read_us[inputs.nbytes])
                samples = (*found[index].samples, median(samples))
                found[index] = replace(found[index], samples=samples, watts=power.watts, clock_mhz=power.clock_mhz)
                _settle(job)
            except Exception as error:
                found[index] = _failed(error, {})
    return {index: replace(one, read_us=median(reads[index])) if one.ok and reads[index] else one for index, one in found.items()}


def rounds_within(most: int, end: float | None) -> Iterator[int]:
    """Numbers of rounds, until the time `end`, judged by the rounds so far."""
    began = time.monotonic()
    for number in range(most):
        spent = time.monotonic() - began
        if end is not None and number >= LEAST_ROUNDS and began + spent * (number + 1) / number > end:
            return
        yield number


class Loaded:
    """The module of a job, which is not trusted yet. Loading it raises KvgenError where it cannot be loaded or lacks a function."""

    def __init__(self, job: Job) -> None:
        spec: Any = job.spec
        self.job = job
        layout = layout_of(spec, job.schedule.layout)
        self._variant: Any = Variant(spec, layout, load(job.artifact))
        self.shared_by: Hashable = (job.spec.format_id, layout.id)
        """Candidates for which this is equal share inputs."""

    def checks(self, policy: CheckPolicy, accuracy: dict[str, float]) -> list[Check]:
        """The checks that do not depend on a workload; the largest errors go to `accuracy`."""
        return checks_of(self._variant, self.job.device, policy, self._comparison(accuracy))

    def inputs(self, cold: int | None) -> Any:
        """Inputs of the job's workload, in as many copies as exceed `cold` bytes."""
        workload: Any = self.job.workload
        return WorkloadInputs(self._variant, workload, self.job.device, cold)

    def check_at(self, inputs: Any, accuracy: dict[str, float]) -> Check:
        """The check on the inputs that are timed."""
        return WorkloadCheck(self._variant, inputs, self.job.check, self._comparison(accuracy))

    def time(self, inputs: Any, policy: TimingPolicy) -> tuple[tuple[float, ...], Power]:
        """Samples in µs per call; power and clock under a sustained load of a GPU."""
        sustained = self.job.device == "cuda" and policy.under(inputs.load).sustained_seconds
        with metered() if sustained else nullcontext(Power()) as power:
            samples = inputs.time(self._variant, policy)
        return samples, power

    def read_us(self, inputs: Any, policy: TimingPolicy) -> float:
        """µs of what no call over the inputs can be faster than, under the workload's load: a pure read of as many bytes, or a copy."""
        return median(self._roofline(inputs.nbytes, policy.under(inputs.load)))

    @property
    def _roofline(self) -> Callable[[int, TimingPolicy], tuple[float, ...]]:
        return read_roofline(self.job.target).samples

    def _comparison(self, accuracy: dict[str, float]) -> Comparison:
        return Comparison(self._variant.spec, torch.device(self.job.device), accuracy, exact=self.job.schedule.exact)


class LoadedMatrix(Loaded):
    """Of an operation on a matrix."""

    def __init__(self, job: Job) -> None:
        spec: Any = job.spec
        self.job, self.shared_by = job, spec.format_id
        self._variant = load_matrix(spec, job.artifact)

    def checks(self, policy: CheckPolicy, accuracy: dict[str, float]) -> list[Check]:
        return [MatrixCheck(self._variant, self.job.device, policy, accuracy)]

    def inputs(self, cold: int | None) -> MatrixInputs:
        workload: Any = self.job.workload
        return MatrixInputs(self._variant, workload, self.job.device, cold)

    def check_at(self, inputs: Any, accuracy: dict[str, float]) -> Check:
        return MatrixWorkloadCheck(self._variant, inputs.shape.key, inputs.matrices[0], inputs.codes[0], inputs.outs[0], accuracy)

    @property
    def _roofline(self) -> Callable[[int, TimingPolicy], tuple[float, ...]]:
        return read_roofline(self.job.target).copies


class LoadedLinear(Loaded):
    """Of a linear layer."""

    def __init__(self, job: Job) -> None:
        spec: Any = job.spec
        self.job, self.shared_by = job, spec.format_id
        self._variant = load_linear(spec, job.artifact, job.target, rows_of(job.schedule.launch))

    def checks(self, policy: CheckPolicy, accuracy: dict[str, float]) -> list[Check]:
        return [LinearCheck(self._variant, self.job.device, policy, accuracy)]

    def inputs(self, cold: int | None) -> LinearInputs:
        workload: Any = self.job.workload
        return LinearInputs(self._variant, workload, self.job.device, cold)

    def check_at(self, inputs: Any, accuracy: dict[str, float]) -> Check:
        return LinearWorkloadCheck(self._variant, inputs.shape.key, inputs.case, accuracy)


KINDS: dict[type, Callable[[Job], Loaded]] = {KernelSpec: Loaded, MatrixSpec: LoadedMatrix, LinearSpec: LoadedLinear}


def load_job(job: Job) -> Loaded:
    """The module of a job of any operation; raises as `Loaded` does."""
    return KINDS[type(job.spec)](job)


def _kept_inputs(candidate: Loaded, job: Job) -> Any:
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
        inputs = candidate.inputs(cold)
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
