"""The kernel of a format that nothing is tuned for: the defaults and the plain schedule of the first back end that supports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.arch import Target
from kvgen.errors import RegistryMiss
from kvgen.lower import backends
from kvgen.lower.base import Source
from kvgen.lower.defaults import Defaults, defaults_of
from kvgen.lower.schedule import Schedule
from kvgen.registry.dispatch import DispatchTable, smallest
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.spec import AnySpec
from kvgen.spec.traffic import parse
from kvgen.toolchain import Artifact


def default_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """An entry that is in no store, and the selection with a caution that says so.

    Raises RegistryMiss where no back end supports the spec.
    """
    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        raise RegistryMiss(f"no kernel for {spec.name} on {target}: {'; '.join((*reasons, *selection.why))}")
    defaults = defaults_of(backend, spec, target)
    sources = {schedule: (backend.lower(spec, schedule, target), None) for schedule in defaults.schedules()}
    entry = untuned_entry(spec, target, defaults, sources, device={})
    caution = f"nothing is tuned for this format on {target}; using {backend.name}'s default schedules"
    return entry, selection._replace(cautions=(caution, *selection.cautions))


def untuned_entry(
    spec: AnySpec,
    target: Target,
    defaults: Defaults,
    code: Mapping[Schedule, tuple[Source, Artifact | None]],
    **facts: Any,
) -> Entry:
    """An entry of the default schedules of the spec's workloads and of the grid's, for calls near them, and of the plain one, for all
    others. `code` has all of them, `facts` are those of `Entry.of`.
    """
    plain, grid = defaults.plain, defaults.grid
    order = [defaults.workloads[work.key] for work in spec.workloads]
    launches = [(work, defaults.workloads[work.key], *code[defaults.workloads[work.key]]) for work in spec.workloads]
    if all(default == plain for default in (*order, *grid.values())):
        return Entry.of(spec, target, launches, **facts)
    further = [schedule for schedule in dict.fromkeys([plain, *grid.values()]) if schedule not in order]
    served = {schedule: [parse(key) for key, default in grid.items() if default == schedule] for schedule in further}
    more = [(smallest(served[schedule]) or spec.workloads[0], schedule, *code[schedule]) for schedule in further]
    index = {schedule: number for number, schedule in reversed(list(enumerate([*order, *further])))}
    table = DispatchTable((), index[plain], (), (), defaults={key: index[schedule] for key, schedule in grid.items()})
    return Entry.of(spec, target, launches, more, table, **facts)
