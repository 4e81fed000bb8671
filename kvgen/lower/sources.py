"""Sources of the schedules of one spec: what compiles a schedule, names its measurements and registers it reads the same text."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.arch import Target
from kvgen.lower.base import Backend, Source
from kvgen.lower.schedule import Schedule
from kvgen.spec import AnySpec


class Sources:
    """Sources for one spec and target; `backends` by name. Each schedule is lowered once, which may take seconds."""

    def __init__(self, spec: AnySpec, target: Target, backends: Mapping[str, Backend]) -> None:
        self.spec, self.target, self.backends = spec, target, backends
        self._sources: dict[str, Source] = {}

    def of(self, schedule: Schedule) -> Source:
        """The source of a schedule. Raises as `Backend.lower` does, and tries again at the next call then."""
        source = self._sources.get(schedule.id)
        if source is None:
            source = self._sources[schedule.id] = self.backends[schedule.backend].lower(self.spec, schedule, self.target)
        return source
