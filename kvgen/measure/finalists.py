"""The last word between candidates: measured in turns, so that whatever drifts drifts for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from kvgen.measure.job import Job, Outcome
from kvgen.measure.worker import TIMEOUT_S, Worker
from kvgen.spec import Workload
from kvgen.spec.timing import Timing


def interleave(jobs: Sequence[Job], rounds: int = 15, timeout_s: float = TIMEOUT_S, worker: Worker | None = None) -> list[Outcome]:
    """Time verified candidates A B C A B C … in one process, `rounds` times; sample i of every timing is from round i.

    Where one of them kills the process, all are measured again in turns, each in a process of its own.
    """
    owned = worker or Worker()
    try:
        outcomes = owned.interleave(jobs, rounds, timeout_s)
        if len(jobs) > 1 and any(outcome.kind in ("crash", "timeout", "oom") for outcome in outcomes):
            return _isolated(jobs, rounds, timeout_s, owned)
        return outcomes
    finally:
        if worker is None:
            owned.close()


def _isolated(jobs: Sequence[Job], rounds: int, timeout_s: float, worker: Worker) -> list[Outcome]:
    """Round after round, every candidate in a process of its own; who fails once is out."""
    failed: dict[int, Outcome] = {}
    turns: dict[int, list[Outcome]] = {index: [] for index in range(len(jobs))}
    for _ in range(rounds):
        for index, job in enumerate(jobs):
            if index in failed:
                continue
            outcome = worker.interleave([job], 1, timeout_s)[0]
            worker.close()
            if outcome.ok:
                turns[index].append(outcome)
            else:
                failed[index] = outcome
    return [failed.get(index) or _merged(turns[index]) for index in range(len(jobs))]


def _merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Rounds of one candidate as one outcome."""
    timings = [timing for outcome in outcomes for timing in outcome.timings]
    workloads = dict.fromkeys(timing.workload for timing in timings)
    joined = (_join(workload, [timing for timing in timings if timing.workload == workload]) for workload in workloads)
    return Outcome("ok", "", tuple(joined), seconds=sum(outcome.seconds for outcome in outcomes))


def _join(workload: Workload, parts: Sequence[Timing]) -> Timing:
    samples = tuple(sample for part in parts for sample in part.samples)
    reads = [part.read_us for part in parts if part.read_us is not None]
    return Timing(workload, median(samples), samples, median(reads) if reads else None)
