"""Who goes to the final, and who wins it: a clear win or the incumbent stays, ties by a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvgen.lower.schedule import Schedule
from kvgen.spec import Workload
from kvgen.tune.point import Arm, Point, Record
from kvgen.tune.search import geomean

Kind = Literal["faster", "same", "slower", "unclear"]
Compare = Callable[[Record, Record], Kind]
"""How the first compares with the second, beyond noise."""

LAUNCHES = 3
"""Launches per workload that the best layout sends to the final."""
RIVALS = 1
"""Other layouts that send their best launch."""


@dataclass(frozen=True)
class Decision:
    """The winner: one layout and a record per workload; `runners_up` are the best of every other layout, best first."""

    arm: Arm
    launches: Mapping[str, Record]
    runners_up: tuple[tuple[Arm, Mapping[str, Record]], ...]
    why: str


def finalists(records: Iterable[Record], workloads: Sequence[Workload], keep: Iterable[Point]) -> list[Point]:
    """Points to measure again side by side: `keep`, the best launches of the best layout, the best of its rivals and of
    every other back end.
    """
    good = sorted((record for record in records if record.ok), key=lambda record: record.cost)
    ranked = sorted(dict.fromkeys(record.point.arm for record in good), key=lambda arm: _score(arm, good, workloads))
    sent = ranked[: 1 + RIVALS]
    sent += [arm for arm in ranked if arm.backend not in {other.backend for other in sent}]
    points = dict.fromkeys(keep)
    for arm in sent:
        for workload in workloads:
            lane = [r.point for r in good if r.point.arm == arm and r.point.workload.key == workload.key]
            points.update(dict.fromkeys(lane[: LAUNCHES if arm == ranked[0] else 1]))
    return list(points)


def _score(arm: Arm, good: Iterable[Record], workloads: Sequence[Workload]) -> float:
    mine = [record for record in good if record.point.arm == arm]
    return geomean((_fastest(mine, workload), workload.weight) for workload in workloads)


def _fastest(records: Iterable[Record], workload: Workload) -> float:
    return min((record.cost for record in records if record.point.workload.key == workload.key), default=float("inf"))


def decide(
    records: Sequence[Record], workloads: Sequence[Workload], default: Schedule, present: Mapping[str, Schedule], compare: Compare
) -> Decision | None:
    """The winner among the finalists' records; None where no layout is right at every workload.

    `present` is the registered winner's launch per workload key, or empty. It, or else the default, stays unless another is
    clearly faster; what is clearly slower than the default anywhere never wins.
    """
    incumbents = {workload.key: present.get(workload.key, default).id for workload in workloads}
    picks: dict[Arm, dict[str, Record]] = {}
    for arm in dict.fromkeys(record.point.arm for record in records):
        mine = [record for record in records if record.ok and record.point.arm == arm]
        chosen = {w.key: _pick([r for r in mine if r.point.workload.key == w.key], incumbents[w.key], compare) for w in workloads}
        if all(chosen.values()):
            picks[arm] = {key: record for key, record in chosen.items() if record is not None}
    if not picks:
        return None
    defaults = {r.point.workload.key: r for r in records if r.ok and r.point.schedule.id == default.id}
    sound = [arm for arm, pick in picks.items() if not _loses(pick, defaults, compare)] or list(picks)
    ranked = sorted(sound, key=lambda arm: geomean((picks[arm][w.key].cost, w.weight) for w in workloads))
    incumbent = Arm(default.backend, default.layout)
    if present:
        schedule = next(iter(present.values()))
        incumbent = Arm(schedule.backend, schedule.layout)
    winner, why = _settle(ranked, picks, incumbent, compare)
    others = sorted((arm for arm in picks if arm != winner), key=lambda arm: geomean((picks[arm][w.key].cost, w.weight) for w in workloads))
    return Decision(winner, picks[winner], tuple((arm, picks[arm]) for arm in others), why)


def _settle(ranked: Sequence[Arm], picks: Mapping[Arm, Mapping[str, Record]], incumbent: Arm, compare: Compare) -> tuple[Arm, str]:
    """The best layout, or among those that are not clearly slower: the incumbent, else the first in the fixed order."""
    best = ranked[0]
    tied = [arm for arm in ranked if arm == best or not _loses(picks[arm], picks[best], compare)]
    if incumbent in tied:
        return incumbent, "the present layout stays: no other is clearly faster"
    first = min(tied, key=lambda arm: [tie_order(record) for _, record in sorted(picks[arm].items())])
    return first, "fastest layout" if len(tied) == 1 else f"first in the fixed order among {len(tied)} layouts within noise"


def _loses(pick: Mapping[str, Record], to: Mapping[str, Record], compare: Compare) -> bool:
    """Whether some workload is clearly slower."""
    return any(compare(pick[key], other) == "slower" for key, other in to.items() if pick[key].point.schedule.id != other.point.schedule.id)


def _pick(records: Sequence[Record], incumbent: str, compare: Compare) -> Record | None:
    """The fastest record; where others are within noise of it the incumbent, else the first in the fixed order."""
    if not records:
        return None
    best = min(records, key=lambda record: record.cost)
    tied = [record for record in records if record is best or compare(best, record) != "faster"]
    return next((r for r in tied if r.point.schedule.id == incumbent), None) or min(tied, key=tie_order)


def tie_order(record: Record) -> tuple[int, int, int, str]:
    """The fixed order among equals: fewer registers, less shared memory, a smaller tile, then the schedule's id."""
    kernels: list[Mapping[str, Any]] = list(record.resources.get("kernels", {}).values())
    schedule = record.point.schedule
    tile = schedule.launch.get("tile", 0)
    return (
        max((int(kernel.get("registers", 0)) for kernel in kernels), default=0),
        max((int(kernel.get("shared_bytes", 0)) for kernel in kernels), default=0),
        tile if isinstance(tile, int) else 0,
        schedule.id,
    )
