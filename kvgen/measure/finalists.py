"""The last word between candidates: measured in turns, so that whatever drifts drifts for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.measure.job import Job, Outcome
from kvgen.measure.worker import TIMEOUT_S, Worker

FATAL = ("crash", "timeout", "oom")


def interleave(
    jobs: Sequence[Job], rounds: int = 15, timeout_s: float = TIMEOUT_S, worker: Worker | None = None, *, seconds: float | None = None
) -> list[Outcome]:
    """Time verified candidates A B C A B C … in one process, `rounds` times; sample i of every timing is from round i.

    With `seconds`, each workload has its share of the time, and fewer rounds where that is short, but LEAST_ROUNDS at least.
    Where the process dies, each candidate runs one turn by itself, which tells whose fault it was; the others then take their
    turns without it. Candidates that fail only in company keep the sample of their turn alone.
    """
    owned = worker or Worker()
    try:
        outcomes = owned.interleave(jobs, rounds, timeout_s, seconds)
        if len(jobs) < 2 or not _died(outcomes):
            return outcomes
        alone = [owned.interleave([job], 1, timeout_s)[0] for job in jobs]
        good = [index for index, outcome in enumerate(alone) if outcome.ok]
        again = owned.interleave([jobs[index] for index in good], rounds, timeout_s, seconds)
        if not _died(again):
            for index, outcome in zip(good, again, strict=True):
                alone[index] = outcome
        return alone
    finally:
        if worker is None:
            owned.close()


def _died(outcomes: Sequence[Outcome]) -> bool:
    """Whether the process ended early: then every outcome says the same."""
    return bool(outcomes) and all(outcome.kind in FATAL and outcome.detail == outcomes[0].detail for outcome in outcomes)
