"""The final's entrants, the decision among them, and its entry.

The incumbent (the registered winner, or else the workload's default) stays unless another is clearly faster; a fixed order decides ties.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvgen.arch import Target
from kvgen.lower.backend import Source, Sources
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.measurement import Candidate, Measurement, VerdictKind
from kvgen.registry.entry import Entry, here
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.spec.workloads import Timing
from kvgen.toolchain import Artifact
from kvgen.tune.candidates import Contender
from kvgen.tune.search import geomean

MOST_LAUNCHES = 4
"""Of an entry, unless more workloads have winners of their own."""
LAUNCHES, RIVALS = 5, 1
"""Launches per workload that the best layout sends to the final, and other layouts that send their best launch."""

Compare = Callable[[Measurement, Measurement], VerdictKind]
"""How the first record compares with the second, beyond noise."""


@dataclass(frozen=True)
class Decision:
    """The winner: one layout, and for each workload the record of the fastest back end."""

    layout: Params
    launches: Mapping[str, Measurement]
    why: str


def finalists(
    records: Iterable[Measurement], workloads: Sequence[AnyWorkload], keep: Iterable[Candidate], launches: int = LAUNCHES
) -> list[Candidate]:
    """Candidates to measure again side by side: `keep`; per workload the best `launches` of the best layout and the best launch of the
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
            candidates |= dict.fromkeys(here[: launches if place == 0 else 1])
            candidates |= dict.fromkeys({candidate.backend: candidate for candidate in reversed(here)}.values())
    return list(candidates)


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
    won: dict[str, list[str]] = {}
    for key, record in pick.items():
        won.setdefault(record.candidate.backend, []).append(key)
    if len(won) > 1:
        why += "; " + ", ".join(f"{backend} at {' '.join(keys)}" for backend, keys in sorted(won.items()))
    return Decision(layout, pick, why)


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


# --- the entry -----------------------------------------------------------------------------------------------------------


def make_entry(
    sources: Sources,
    decision: Decision,
    more: Sequence[Schedule],
    artifact: Callable[[Schedule], Artifact],
    records: Sequence[Measurement],
    defaults: Mapping[str, Schedule],
    facts: Mapping[str, Any],
) -> Entry:
    """The entry of a tuned winner; `artifact` gives compiled schedules, `records` are the basis of the decision, `defaults` are by workload
    key, `facts` become part of its provenance, `more` are further launches for other calls.
    """
    spec, target = sources.spec, sources.target

    def compiled(work: AnyWorkload, schedule: Schedule) -> tuple[AnyWorkload, Schedule, Source, Artifact]:
        return work, schedule, sources.of(schedule), artifact(schedule)

    timings = []
    for work in spec.workloads:
        won = decision.launches[work.key]
        default_us = next((one.cost for one in records if one.timed and one.key == (defaults[work.key].id, work.key)), None)
        timings.append(Timing(work, won.cost, won.samples, won.read_us, default_us, won.watts, won.clock_mhz))
    launches = [compiled(work, decision.launches[work.key].candidate.schedule) for work in spec.workloads]
    entry = Entry.of(
        spec,
        target,
        launches,
        [compiled(spec.workloads[0], schedule) for schedule in more],
        device=dict(here(target)),
        toolchain=toolchain_of(launches[0][3]),
        provenance={**provenance(), **facts, "why": decision.why},
        accuracy={key: dict(record.accuracy) for key, record in decision.launches.items()},
        timings=tuple(timings),
    )
    return replace(entry, provenance={**entry.provenance, "tuned": not entry.disturbed, "sources": entry.sources_id})


def further(spec: AnySpec, target: Target, winners: Sequence[Schedule], first: Contender) -> list[Schedule]:
    """The defaults of a back end over the winners' layout that run another number of CTAs at once than any winner of that back end, as
    many as make MOST_LAUNCHES in all.
    """

    def shape(schedule: Schedule) -> tuple[int, int] | None:
        tiling = first.backend.tiling(spec, schedule, target)
        return None if tiling is None else (tiling.resident, tiling.ctas_per_sm)

    taken = {shape(schedule) for schedule in winners if schedule.backend == first.backend.name}
    others = [one for one in first.defaults if one.layout == winners[0].layout and shape(one) not in taken]
    return others[: max(0, MOST_LAUNCHES - len(set(winners)))]


def toolchain_of(artifact: Artifact) -> dict[str, Any]:
    """Versions that a compiled module depends on."""
    versions = {"compiler": artifact.resources.compiler, "python": platform.python_version()}
    for name, package in {"torch": "torch", "tvm_ffi": "apache-tvm-ffi", "tilelang": "tilelang"}.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(package)
    return versions


def provenance() -> dict[str, Any]:
    """Facts of every entry that is made now; `date` is UTC."""
    from kvgen import __version__

    return {"kvgen": __version__, "date": datetime.now(timezone.utc).isoformat(timespec="microseconds")}
