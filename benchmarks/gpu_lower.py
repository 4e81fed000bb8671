"""Schedules of any back end to sources, many at once: TileLang takes seconds for each, in a process of its own."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvgen.arch import Target
from kvgen.digest import canonical_json
from kvgen.errors import KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule
from kvgen.spec import KernelSpec

Point = tuple[KernelSpec, Schedule]


def lower_all(points: Sequence[Point], target: Target, workers: int) -> list[Source | KvgenError]:
    """Source of each point, or why there is none; points that differ in name and workloads alone are lowered one after the other.

    So the second finds what TileLang gave for the first, which kvgen keeps below KVGEN_CACHE_DIR.
    """
    locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
    keys = [canonical_json({"spec": spec.format(), "schedule": schedule.to_json()}) for spec, schedule in points]
    held = [locks[key] for key in keys]

    def lower(point: Point, lock: threading.Lock) -> Source | KvgenError:
        spec, schedule = point
        try:
            with lock:
                return get_backend(schedule.backend).lower(spec, schedule, target)
        except KvgenError as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lower, points, held))
