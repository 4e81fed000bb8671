"""Warm start: a search for a new format first measures the launches that won for similar formats and workloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvgen.arch import Target
from kvgen.lower.schedule import Schedule
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.spec.workloads import apart_across_formats
from kvgen.tune.candidate import Candidate
from kvgen.tune.contenders import Contender

MOST = 8
"""Launches per workload and back end."""


def warm_starts(spec: AnySpec, target: Target, found: Sequence[Contender], stores: Iterable[Store]) -> list[Candidate]:
    """Launches of tuned entries for the target, combined with the layout of their back end's defaults, if its space contains them.

    Those of the most similar formats and workloads come first; every workload gets one before any gets a second.
    """
    entries = [one.entry for store in stores for one in store.all() if one.entry is not None and _is_tuned_for(one.entry, spec, target)]
    columns = [_nearest(spec, work, contender, entries) for work in spec.workloads for contender in found]
    ranks = ([column[rank] for column in columns if rank < len(column)] for rank in range(MOST))
    return list(dict.fromkeys(candidate for row in ranks for candidate in row))


def _is_tuned_for(entry: Entry, spec: AnySpec, target: Target) -> bool:
    """Whether it was tuned for the target, and its kernels are of the spec's kind."""
    return type(entry.spec) is type(spec) and entry.arch == target and bool(entry.provenance.get("tuned"))


def _nearest(spec: AnySpec, work: AnyWorkload, contender: Contender, entries: Sequence[Entry]) -> list[Candidate]:
    """The launches of one back end for one workload, each once, the nearest first."""
    distance: dict[Schedule, float] = {}
    for entry, other, schedule in _launches(entries, contender):
        away = apart_across_formats(spec, work, entry.spec, other)
        distance[schedule] = min(away, distance.get(schedule, away))
    allowed = (schedule for schedule in sorted(distance, key=lambda s: (distance[s], s.id)) if not contender.space.doubts(schedule, work))
    return [Candidate(schedule, work) for schedule, _ in zip(allowed, range(MOST), strict=False)]


def _launches(entries: Sequence[Entry], contender: Contender) -> Iterator[tuple[Entry, AnyWorkload, Schedule]]:
    for entry in entries:
        for launch in entry.launches:
            if launch.backend == contender.backend.name:
                yield entry, launch.workload, Schedule(launch.backend, contender.defaults[0].layout, launch.params)
