"""The schedules of a back end that nothing was measured for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.arch import Target
from kvgen.lower.base import Backend
from kvgen.lower.schedule import Schedule
from kvgen.spec import AnySpec, KernelSpec
from kvgen.spec.grid import grid_of, q_len_of
from kvgen.spec.waves import Waves


@dataclass(frozen=True)
class Defaults:
    """What a kernel that nothing is tuned for consists of. All schedules have the same layout."""

    workloads: Mapping[str, Schedule]
    """The defaults at the spec's workloads, by workload key."""
    grid: Mapping[str, Schedule]
    """The defaults at the workloads of the grid, by workload key."""
    plain: Schedule
    """For calls far from all workloads."""
    waves: Mapping[Schedule, Waves | None]
    """How the CTAs of each of them fill the GPU; None where they do not run in waves."""

    def schedules(self) -> list[Schedule]:
        """All of them, each once."""
        return list(self.waves)


def defaults_of(backend: Backend, spec: AnySpec, target: Target) -> Defaults:
    """The defaults of a back end, which must not refuse the spec."""
    workloads, grid, plain = workload_defaults(backend, spec, target), _grid_defaults(backend, spec, target), backend.plain(spec, target)
    every = dict.fromkeys([*workloads.values(), *grid.values(), plain])
    return Defaults(workloads, grid, plain, {schedule: backend.waves(spec, schedule, target) for schedule in every})


def workload_defaults(backend: Backend, spec: AnySpec, target: Target) -> dict[str, Schedule]:
    """A back end's default at each workload of a spec, by workload key."""
    return {work.key: backend.default(spec, target, work) for work in spec.workloads}


def _grid_defaults(backend: Backend, spec: AnySpec, target: Target) -> dict[str, Schedule]:
    """A back end's default at each workload of the grid, by workload key, with one query token and with those of `q_len_of`; none for an
    operation on a matrix, which has no grid. A default does not depend on the load, so sustained workloads are left out.
    """
    if not isinstance(spec, KernelSpec):
        return {}
    cells = [cell for q_len in sorted({1, q_len_of(spec)}) for cell in grid_of(target).cells(q_len)]
    return {work.key: backend.default(spec, target, work) for work in cells if work.load == "rested"}
