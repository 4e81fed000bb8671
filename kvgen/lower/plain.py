"""The choice of a plain schedule: the first one that every workload of a spec allows, for each GPU back end from launches of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvgen.arch import Target
from kvgen.errors import UnsupportedError
from kvgen.lower.gpu_facts import preferred_block
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import SearchSpace
from kvgen.spec import KernelSpec


def plain_schedule(name: str, spec: KernelSpec, target: Target, hinted: SearchSpace, launches: Iterable[Params]) -> Schedule:
    """The first of these launches, the best first, that all workloads allow, with the block nearest to the preferred one; against the hints
    of the space if none is within them. Raises UnsupportedError for the back end `name`.
    """
    tried: list[list[str]] = []
    ranked = list(launches)
    for space in (hinted, hinted.without_hints()):
        for layout in sorted(space.layouts(), key=lambda point: abs(point.integer("block") - preferred_block(spec))):
            for launch in ranked:
                schedule = Schedule(name, layout, launch)
                tried.append([problem for workload in spec.workloads for problem in space.doubts(schedule, workload)])
                if not tried[-1]:
                    return schedule
    reason = _blocking(tried) if tried else "no block fits"
    raise UnsupportedError(name, f"no plain schedule suits {target} and every workload: {reason}")


def _blocking(tried: Sequence[Sequence[str]]) -> str:
    """The problem that all schedules have, of those that were tried with their problems; else the first problem of the first one."""
    common = (problem for problem in tried[0] if all(problem in problems for problems in tried))
    return next(common, tried[0][0])
