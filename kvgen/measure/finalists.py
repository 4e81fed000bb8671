"""Times finalists A B C A B C …, so that drift of clocks and temperature affects all of them alike."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.measure.job import Job, Outcome
from kvgen.measure.worker import TIMEOUT_S, Worker

FATAL = ("crash", "timeout", "oom")


def interleave(
    jobs: Sequence[Job], rounds: int = 15, timeout_s: float = TIMEOUT_S, worker: Worker | None = None, *, seconds: float | None = None
) -> list[Outcome]:
    """Time verified candidates A B C A B C … in one process, `rounds` times; sample i of every timing is from round i.

    With `seconds`, each workload gets an equal part of the time, and fewer rounds if that is short, but at least LEAST_ROUNDS.
    If the process dies, each candidate runs one round by itself, which shows which one failed; the others are then timed again without
    it. Candidates that fail only together keep the sample of their single round.
    """
    owned = worker or Worker()
    try:
        outcomes = owned.interleave(jobs, rounds, timeout_s, seconds)
        if len(jobs) < 2 or not _died(outcomes):
            return outcomes
        single = [owned.interleave([job], 1, timeout_s)[0] for job in jobs]
        good = [index for index, outcome in enumerate(single) if outcome.ok]
        again = owned.interleave([jobs[index] for index in good], rounds, timeout_s, seconds)
        if not _died(again):
            for index, outcome in zip(good, again, strict=True):
                single[index] = outcome
        return single
    finally:
        if worker is None:
            owned.close()


def _died(outcomes: Sequence[Outcome]) -> bool:
    """Whether the process ended early: then all outcomes are the same."""
    return bool(outcomes) and all(outcome.kind in FATAL and outcome.detail == outcomes[0].detail for outcome in outcomes)
