"""Chooses the finalists and the winner: the incumbent stays unless another is clearly faster; a fixed order decides ties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import AnyWorkload
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.search import geomean

Kind = Literal["faster", "same", "slower", "unclear"]
Compare = Callable[[Record, Record], Kind]
"""How the first record compares with the second, beyond noise."""

LAUNCHES = 5
"""Launches per workload that the best layout sends to the final."""
RIVALS = 1
"""Other layouts that send their best launch."""


@dataclass(frozen=True)
class Decision:
    """The winner: one layout, and for each workload the record of the fastest back end."""

    layout: Params
    launches: Mapping[str, Record]
    rivals: Mapping[str, Record]
    """By workload, the best record of another back end over the same layout, if there is one."""
    runners_up: tuple[tuple[Params, Mapping[str, Record]], ...]
    """The best records of every other layout, the best layout first."""
    why: str


def finalists(records: Iterable[Record], workloads: Sequence[AnyWorkload], keep: Iterable[Candidate]) -> list[Candidate]:
    """Candidates to measure again side by side: `keep`; per workload the best launches of the best layout and the best launch of the
    next best layouts; and of each of these layouts the best launch of every back end.
    """
    good = sorted((record for record in records if record.ok), key=lambda record: record.cost)
    ranked = sorted(dict.fromkeys(record.candidate.layout for record in good), key=lambda layout: _score(layout, good, workloads))
    candidates = dict.fromkeys(keep)
    for place, layout in enumerate(ranked[: 1 + RIVALS]):
        for workload in workloads:
            here = [r.candidate for r in good if r.candidate.layout == layout and r.candidate.workload.key == workload.key]
            candidates.update(dict.fromkeys(here[: LAUNCHES if place == 0 else 1]))
            candidates.update(dict.fromkeys({candidate.backend: candidate for candidate in reversed(here)}.values()))
    return list(candidates)


def unclear(
    records: Iterable[Record],
    workloads: Sequence[AnyWorkload],
    defaults: Mapping[str, Schedule],
    present: Mapping[str, Schedule],
    compare: Compare,
) -> list[AnyWorkload]:
    """The workloads at which it is unclear whether the fastest launch of the incumbent's layout is faster than the incumbent."""
    good = [record for record in records if record.ok]
    found: list[AnyWorkload] = []
    for workload in workloads:
        incumbent = present.get(workload.key, defaults[workload.key])
        here = [r for r in good if r.candidate.workload.key == workload.key and r.candidate.layout == incumbent.layout]
        old = next((r for r in here if r.candidate.schedule.id == incumbent.id), None)
        best = min(here, key=lambda r: r.cost, default=None)
        if old is not None and best is not None and best is not old and compare(best, old) == "unclear":
            found.append(workload)
    return found


def most_finalists(workloads: int, backends: int) -> int:
    """Upper bound of the number of finalists: defaults, present winner, launches of the best and of the next best layouts."""
    return workloads * (backends + 1 + LAUNCHES + backends - 1 + RIVALS * backends)


def _score(layout: Params, good: Iterable[Record], workloads: Sequence[AnyWorkload]) -> float:
    mine = [record for record in good if record.candidate.layout == layout]
    return geomean((_fastest(mine, workload), workload.weight) for workload in workloads)


def _fastest(records: Iterable[Record], workload: AnyWorkload) -> float:
    return min((record.cost for record in records if record.candidate.workload.key == workload.key), default=float("inf"))


def decide(
    records: Sequence[Record],
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
    incumbents = {workload.key: present.get(workload.key, defaults[workload.key]).id for workload in workloads}
    picks: dict[Params, dict[str, Record]] = {}
    for layout in dict.fromkeys(record.candidate.layout for record in records):
        mine = [record for record in records if record.ok and record.candidate.layout == layout]
        chosen = {w.key: _pick([r for r in mine if r.candidate.workload.key == w.key], incumbents[w.key], compare) for w in workloads}
        if all(chosen.values()):
            picks[layout] = {key: record for key, record in chosen.items() if record is not None}
    if not picks:
        return None
    to_beat = {r.candidate.workload.key: r for r in records if r.ok and r.candidate.schedule.id == defaults[r.candidate.workload.key].id}
    sound = [layout for layout, pick in picks.items() if not _loses(pick, to_beat, compare)] or list(picks)
    ranked = sorted(picks, key=lambda layout: geomean((picks[layout][w.key].cost, w.weight) for w in workloads))
    incumbent = next(iter((present or defaults).values())).layout
    winner, why = _settle([layout for layout in ranked if layout in sound], picks, incumbent, compare)
    others = tuple((layout, picks[layout]) for layout in ranked if layout != winner)
    return Decision(winner, picks[winner], _rivals(picks[winner], records), others, f"{why}{_winners(picks[winner])}")


def _settle(
    ranked: Sequence[Params], picks: Mapping[Params, Mapping[str, Record]], incumbent: Params, compare: Compare
) -> tuple[Params, str]:
    """The best layout, or among those that are not clearly slower: the incumbent, else the first in the fixed order."""
    best = ranked[0]
    tied = [layout for layout in ranked if layout == best or not _loses(picks[layout], picks[best], compare)]
    if len(tied) == 1:
        return best, "fastest layout"
    if incumbent in tied:
        return incumbent, "the present layout stays: no other is clearly faster"
    first = min(tied, key=lambda layout: [tie_order(record) for _, record in sorted(picks[layout].items())])
    return first, f"first in the fixed order among {len(tied)} layouts within noise"


def _rivals(pick: Mapping[str, Record], records: Iterable[Record]) -> dict[str, Record]:
    """By workload, the best record of another back end over the layout of `pick`."""
    rivals: dict[str, Record] = {}
    for record in sorted((record for record in records if record.ok), key=lambda record: record.cost):
        winner = pick[record.candidate.workload.key].candidate
        if record.candidate.layout == winner.layout and record.candidate.backend != winner.backend:
            rivals.setdefault(winner.workload.key, record)
    return rivals


def _winners(pick: Mapping[str, Record]) -> str:
    """A clause that names the back end of each workload, if several back ends won."""
    won: dict[str, list[str]] = {}
    for key, record in pick.items():
        won.setdefault(record.candidate.backend, []).append(key)
    return "; " + ", ".join(f"{backend} at {' '.join(keys)}" for backend, keys in sorted(won.items())) if len(won) > 1 else ""


def _loses(pick: Mapping[str, Record], to: Mapping[str, Record], compare: Compare) -> bool:
    """Whether some workload is clearly slower."""
    return any(
        compare(pick[key], other) == "slower" for key, other in to.items() if pick[key].candidate.schedule.id != other.candidate.schedule.id
    )


def _pick(records: Sequence[Record], incumbent: str, compare: Compare) -> Record | None:
    """The fastest record; where others are within noise of it the incumbent, else the first in the fixed order."""
    if not records:
        return None
    best = min(records, key=lambda record: record.cost)
    tied = [record for record in records if record is best or compare(best, record) != "faster"]
    return next((r for r in tied if r.candidate.schedule.id == incumbent), None) or min(tied, key=tie_order)


def tie_order(record: Record) -> tuple[int, int, str]:
    """The fixed order among equals: fewer registers, less shared memory, then the schedule's id."""
    kernels: list[Mapping[str, Any]] = list(record.resources.get("kernels", {}).values())
    return (
        max((int(kernel.get("registers", 0)) for kernel in kernels), default=0),
        max((int(kernel.get("shared_bytes", 0)) for kernel in kernels), default=0),
        record.candidate.schedule.id,
    )
