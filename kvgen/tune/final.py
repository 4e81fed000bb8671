"""The final's entrants, and the decision among them.

The incumbent (the registered winner, or else the workload's default) stays unless another is clearly faster; a fixed order decides ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.measurement import Candidate, Measurement, VerdictKind
from kvgen.spec import AnyWorkload
from kvgen.tune.search import geomean

LAUNCHES, RIVALS = 5, 1
"""Launches per workload that the best layout sends to the final, and other layouts that send their best launch."""

Compare = Callable[[Measurement, Measurement], VerdictKind]
"""How the first record compares with the second, beyond noise."""


@dataclass(frozen=True)
class Decision:
    """The winner: one layout, and for each workload the record of the fastest back end."""

    layout: Params
    launches: Mapping[str, Measurement]
    rivals: Mapping[str, Measurement]
    """By workload, the best record of another back end over the same layout, if there is one."""
    runner_up: tuple[Params, Mapping[str, Measurement]] | None
    """The next best layout with its best records, if there is one."""
    why: str


def finalists(records: Iterable[Measurement], workloads: Sequence[AnyWorkload], keep: Iterable[Candidate]) -> list[Candidate]:
    """Candidates to measure again side by side: `keep`; per workload the best launches of the best layout and the best launch of the
    next best layouts; and of each of these layouts the best launch of every back end.
    """
    best: dict[Params, dict[str, list[Measurement]]] = {}
    for record in sorted((record for record in records if record.timed), key=lambda record: record.cost):
        works = best.setdefault(record.candidate.layout, {work.key: [] for work in workloads})
        works[record.candidate.workload.key].append(record)

    def score(layout: Params) -> float:
        return geomean((next((r.cost for r in best[layout][work.key]), math.inf), work.weight) for work in workloads)

    candidates = dict.fromkeys(keep)
    for place, layout in enumerate(sorted(best, key=score)[: 1 + RIVALS]):
        for found in best[layout].values():
            here = [record.candidate for record in found]
            candidates |= dict.fromkeys(here[: LAUNCHES if place == 0 else 1])
            candidates |= dict.fromkeys({candidate.backend: candidate for candidate in reversed(here)}.values())
    return list(candidates)


def most_finalists(workloads: int, backends: int) -> int:
    """Upper bound of the number of finalists: defaults, present winner, launches of the best and of the next best layouts."""
    return workloads * (backends + 1 + LAUNCHES + backends - 1 + RIVALS * backends)


def decide(
    records: Sequence[Measurement],
    workloads: Sequence[AnyWorkload],
    defaults: Mapping[str, Schedule],
    present: Mapping[str, Schedule],
    compare: Compare,
) -> Decision | None:
    """The winner among the finalists' records; None where no layout is right at every workload.

    Within a layout each workload takes its fastest launch, of any back end. `present` is the registered winner's launch per
    workload key, or empty. It, or else the workload's default, stays unless another is clearly faster. A layout that is clearly
    slower than the default at any workload never wins. `defaults` are by workload key, too, and have one layout.
    """
    good = [record for record in records if record.timed]
    incumbents = {workload.key: present.get(workload.key, defaults[workload.key]).id for workload in workloads}
    picks: dict[Params, dict[str, Measurement]] = {}
    for layout in dict.fromkeys(record.candidate.layout for record in records):
        here = {w.key: [r for r in good if r.candidate.layout == layout and r.candidate.workload.key == w.key] for w in workloads}
        if all(here.values()):
            picks[layout] = {key: _pick(mine, incumbents[key], compare) for key, mine in here.items()}
    if not picks:
        return None
    to_beat = {r.candidate.workload.key: r for r in good if r.candidate.schedule.id == defaults[r.candidate.workload.key].id}
    ranked = sorted(picks, key=lambda layout: geomean((picks[layout][w.key].cost, w.weight) for w in workloads))
    sound = [layout for layout in ranked if not _loses(picks[layout], to_beat, compare)] or ranked
    tied = [layout for layout in sound if layout == sound[0] or not _loses(picks[layout], picks[sound[0]], compare)]
    incumbent = next(iter((present or defaults).values())).layout
    if len(tied) == 1:
        layout, why = sound[0], "fastest layout"
    elif incumbent in tied:
        layout, why = incumbent, "the present layout stays: no other is clearly faster"
    else:
        layout = min(tied, key=lambda one: [_tie_order(record) for _, record in sorted(picks[one].items())])
        why = f"first in the fixed order among {len(tied)} layouts within noise"
    pick = picks[layout]
    rivals: dict[str, Measurement] = {}
    for record in sorted(good, key=lambda record: -record.cost):
        winner = pick[record.candidate.workload.key].candidate
        if record.candidate.layout == layout and record.candidate.backend != winner.backend:
            rivals[winner.workload.key] = record
    won: dict[str, list[str]] = {}
    for key, record in pick.items():
        won.setdefault(record.candidate.backend, []).append(key)
    if len(won) > 1:
        why += "; " + ", ".join(f"{backend} at {' '.join(keys)}" for backend, keys in sorted(won.items()))
    return Decision(layout, pick, rivals, next(((other, picks[other]) for other in ranked if other != layout), None), why)


def _loses(pick: Mapping[str, Measurement], to: Mapping[str, Measurement], compare: Compare) -> bool:
    """Whether some workload is clearly slower."""
    return any(
        compare(pick[key], other) == "slower" for key, other in to.items() if pick[key].candidate.schedule.id != other.candidate.schedule.id
    )


def _pick(records: Sequence[Measurement], incumbent: str, compare: Compare) -> Measurement:
    """The fastest record; where others are within noise of it the incumbent, else the first in the fixed order."""
    best = min(records, key=lambda record: record.cost)
    tied = [record for record in records if record is best or compare(best, record) != "faster"]
    return next((r for r in tied if r.candidate.schedule.id == incumbent), None) or min(tied, key=_tie_order)


def _tie_order(record: Measurement) -> tuple[int, int, str]:
    """The fixed order among equals: fewer registers, less shared memory, then the schedule's id."""
    kernels: list[Mapping[str, Any]] = list(record.resources.get("kernels", {}).values())
    return (
        max((int(kernel.get("registers", 0)) for kernel in kernels), default=0),
        max((int(kernel.get("shared_bytes", 0)) for kernel in kernels), default=0),
        record.candidate.schedule.id,
    )
