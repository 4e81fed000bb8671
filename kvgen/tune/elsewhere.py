"""Launches that won for other formats and workloads: where a search for a new one begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from kvgen.lower.base import Target
from kvgen.lower.schedule import Schedule
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec, Workload
from kvgen.tune.plan import Contender
from kvgen.tune.point import Point

MOST = 8
"""Launches per workload and back end."""


def won_elsewhere(spec: KernelSpec, target: Target, found: Sequence[Contender], stores: Iterable[Store]) -> list[Point]:
    """Launches that tuned entries for the target have, over the default's layout of their back end, where its space holds them.

    Those of the most similar formats and workloads come first, one for every workload before a second for any.
    """
    entries = [one.entry for store in stores for one in store.all() if one.entry is not None and _counts(one.entry, target)]
    columns = [_nearest(spec, work, contender, entries) for work in spec.workloads for contender in found]
    ranks = ([column[rank] for column in columns if rank < len(column)] for rank in range(MOST))
    return list(dict.fromkeys(point for row in ranks for point in row))


def _counts(entry: Entry, target: Target) -> bool:
    return entry.arch == target and bool(entry.provenance.get("tuned"))


def _nearest(spec: KernelSpec, work: Workload, contender: Contender, entries: Sequence[Entry]) -> list[Point]:
    """The launches of one back end for one workload, each once, the nearest first."""
    distance: dict[Schedule, float] = {}
    for entry, other, schedule in _launches(entries, contender):
        away = _apart(spec, work, entry.spec, other)
        distance[schedule] = min(away, distance.get(schedule, away))
    allowed = (schedule for schedule in sorted(distance, key=lambda s: (distance[s], s.id)) if not contender.space.check(schedule, work))
    return [Point(schedule, work) for schedule, _ in zip(allowed, range(MOST), strict=False)]


def _launches(entries: Sequence[Entry], contender: Contender) -> Iterator[tuple[Entry, Workload, Schedule]]:
    for entry in entries:
        for launch in entry.launches:
            if launch.backend == contender.backend.name:
                yield entry, launch.workload, Schedule(launch.backend, contender.default.layout, launch.params)


def _apart(spec: KernelSpec, work: Workload, other: KernelSpec, there: Workload) -> float:
    """How far two workloads are apart: by heads, tokens, bytes of a token, and columns that share them, in powers of two."""
    mine, theirs = _sizes(spec, work), _sizes(other, there)
    return sum(abs(math.log2(one / two)) for one, two in zip(mine, theirs, strict=True))


def _sizes(spec: KernelSpec, work: Workload) -> tuple[int, int, int, int]:
    attention = spec.attention
    token = (spec.key.bits + spec.value.bits) * attention.head_dim
    return work.batch * attention.kv_heads, work.kv_len, token, attention.group * work.q_len
