"""What a worker process does with a job: load, verify, time, verify again. The process is the isolation; this code has none of its own."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from statistics import median

import torch

from kvgen.errors import CheckError, UnsupportedError
from kvgen.measure.allowance import Allowance
from kvgen.measure.inputs import NoRoom
from kvgen.measure.job import LEAST_ROUNDS, Job, Kind, Outcome, TimingPolicy
from kvgen.measure.loaded import Allow, load_candidate
from kvgen.measure.power import Power
from kvgen.measure.protocols import Candidate, Inputs, Key, Stage, Verification
from kvgen.spec import AnyWorkload
from kvgen.spec.timing import Timing

_kept: dict[Key, Inputs] = {}
KEPT_SHARE = 0.3
"""Of a GPU's memory, for inputs of workloads that are kept for later candidates."""
NO_MEMORY = ("bad_alloc", "can't allocate memory", "out of memory", "cudaErrorMemoryAllocation")


def perform(job: Job, stage: Stage, allow: Allow = Allowance) -> Outcome:
    """Do a job; exceptions of the candidate become its outcome. `allow` gives each candidate its allowance of host memory."""
    clock = _Clock(stage)
    timings: list[Timing] = []
    accuracy: dict[str, float] = {}
    try:
        clock("load")
        candidate = load_candidate(job, allow)
        checker = None
        if job.check is not None:
            checker = candidate.verification(job.check)
            accuracy = checker.accuracy
            if not job.check.workloads_only:
                checker.run(clock, partial(_settle, job))
        for workload in job.workloads:
            timings += _at_workload(job, workload, candidate, checker, clock)
        if checker is not None and timings:
            clock("verify")
            checker.again()
        _settle(job)
    except Exception as error:
        return Outcome(_kind(error), _sentence(error), (), accuracy, clock.seconds)
    return Outcome("ok", "", tuple(timings), accuracy, clock.seconds)


def _at_workload(job: Job, workload: AnyWorkload, candidate: Candidate, checker: Verification | None, clock: _Clock) -> list[Timing]:
    """Verify on the inputs that are timed, time, verify again. Without `job.timing`, verify only."""
    clock("reference")
    cold = 0 if job.timing is None else job.timing.cold_bytes
    inputs = _kept_inputs(candidate, workload, job.device, cold)
    timed = None
    if checker is not None:
        timed = checker.at(inputs)
        timed.prepare()
        clock("verify")
        timed.run()
        _settle(job)
    found = []
    if job.timing is not None:
        clock("time")
        samples = candidate.time(inputs, job.timing)
        read_us = median(candidate.roofline(inputs, job.timing)) if job.timing.read else None
        found.append(Timing(workload, median(samples), samples, read_us, None, inputs.power.watts, inputs.power.clock_mhz))
    if timed is not None:
        clock("verify")
        timed.again()
        timed.close()
    return found


def perform_interleaved(
    jobs: Sequence[Job], rounds: int, stage: Stage, seconds: float | None = None, allow: Allow = Allowance
) -> list[Outcome]:
    """Time verified candidates A B C A B C …; each sample is the median of one round. A candidate that fails does not end the others.

    With `seconds`, each workload gets an equal part of the time that is left, and as many rounds as fit, but at least LEAST_ROUNDS.
    """
    clock = _Clock(stage)
    until = None if seconds is None else time.monotonic() + seconds
    candidates: dict[int, Candidate] = {}
    failed: dict[int, Outcome] = {}
    samples: dict[int, dict[AnyWorkload, list[float]]] = {index: {} for index in range(len(jobs))}
    reads: dict[int, dict[AnyWorkload, list[float]]] = {index: {} for index in range(len(jobs))}
    powers: dict[int, dict[AnyWorkload, Power]] = {index: {} for index in range(len(jobs))}
    workloads = list(dict.fromkeys(work for job in jobs for work in job.workloads))
    for place, workload in enumerate(workloads):
        shared: dict[Hashable, Inputs] = {}
        for _ in _rounds(rounds, until, len(workloads) - place):
            read_us: dict[int, float] = {}  # by bytes: one read per round serves all candidates
            for index, job in enumerate(jobs):
                policy = job.timing or TimingPolicy()
                if index in failed or workload not in job.workloads:
                    continue
                clock(f"time {index}")
                try:
                    candidate = candidates.get(index) or candidates.setdefault(index, load_candidate(job, allow))
                    inputs = _shared_inputs(shared, candidate, workload, job)
                    samples[index].setdefault(workload, []).append(median(candidate.time(inputs, policy)))
                    powers[index][workload] = inputs.power
                    if policy.read:
                        if inputs.nbytes not in read_us:
                            read_us[inputs.nbytes] = median(candidate.roofline(inputs, policy))
                        reads[index].setdefault(workload, []).append(read_us[inputs.nbytes])
                    _settle(job)
                except Exception as error:
                    failed[index] = Outcome(_kind(error), _sentence(error))
    return [failed.get(index) or Outcome("ok", "", _timings(samples[index], reads[index], powers[index])) for index in range(len(jobs))]


def _kept_inputs(candidate: Candidate, workload: AnyWorkload, device: str, cold: int | None) -> Inputs:
    """Inputs, shared by all candidates that can. A GPU keeps those of several layouts and workloads; the oldest are evicted first.

    A candidate that fails ends the process, so its inputs are never reused.
    """
    key = (candidate.shared_by, workload, device, cold)
    inputs = _kept.pop(key, None)
    if inputs is None:
        room = KEPT_SHARE * torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
        while _kept and sum(kept.held_bytes for kept in _kept.values()) > room:
            del _kept[next(iter(_kept))]
        inputs = candidate.inputs(workload, cold)
    _kept[key] = inputs
    return inputs


def _rounds(most: int, until: float | None, parts: int) -> Iterator[int]:
    """Numbers of rounds of one workload, until its part (1 / `parts`) of the time is used up, judged by the rounds so far."""
    began = time.monotonic()
    seconds = 0.0 if until is None else (until - began) / parts
    for number in range(most):
        spent = time.monotonic() - began
        if until is not None and number >= LEAST_ROUNDS and spent * (number + 1) / number > seconds:
            return
        yield number


def _shared_inputs(shared: dict[Hashable, Inputs], candidate: Candidate, workload: AnyWorkload, job: Job) -> Inputs:
    """Inputs for all finalists that share them: those of the search, if they are still kept."""
    inputs = shared.get(candidate.shared_by)
    if inputs is None:
        cold = job.timing.cold_bytes if job.timing else None
        inputs = shared[candidate.shared_by] = _kept_inputs(candidate, workload, job.device, cold)
    return inputs


def _timings(
    samples: dict[AnyWorkload, list[float]], reads: dict[AnyWorkload, list[float]], powers: dict[AnyWorkload, Power]
) -> tuple[Timing, ...]:
    return tuple(
        Timing(
            work, median(times), tuple(times), median(reads[work]) if work in reads else None, None,
            powers[work].watts, powers[work].clock_mhz,
        )
        for work, times in samples.items()
    )  # fmt: skip


def _settle(job: Job) -> None:
    """Wait for the GPU, so that its asynchronous errors are raised here and not in the next job."""
    if job.device == "cuda":
        torch.cuda.synchronize()


def _kind(error: Exception) -> Kind:
    if isinstance(error, (UnsupportedError, NoRoom)):
        return "unsupported"
    if isinstance(error, CheckError):
        return "wrong"
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text for sign in NO_MEMORY):
        return "oom"
    return "crash"


def _sentence(error: Exception) -> str:
    """The error in one line. The last line of a C++ error has the message, the lines above the location."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = (lines[-1] if lines else type(error).__name__)[:500]
    return f"it ran out of memory ({last})" if _kind(error) == "oom" else last


class _Clock:
    """Announces stages and counts their seconds, except those of computing references."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._name = "load"
        self._since = time.monotonic()
        self._spent = 0.0

    def __call__(self, name: str) -> None:
        self._add_elapsed()
        self._name = name
        self._stage(name)

    def _add_elapsed(self) -> None:
        now = time.monotonic()
        if self._name != "reference":
            self._spent += now - self._since
        self._since = now

    @property
    def seconds(self) -> float:
        """Seconds that the candidate took so far."""
        self._add_elapsed()
        return self._spent
