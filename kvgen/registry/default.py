"""The kernel of a format that nothing is tuned for: the defaults and the plain schedule of the first back end that supports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.arch import Target
from kvgen.errors import RegistryMiss
from kvgen.lower import backends
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule
from kvgen.registry.dispatch import DispatchTable
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.spec import AnySpec
from kvgen.toolchain import Artifact


def default_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """An entry that is in no store, and the selection with a caution that says so.

    Raises RegistryMiss where no back end supports the spec.
    """
    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        raise RegistryMiss(f"no kernel for {spec.name} on {target}: {'; '.join((*reasons, *selection.why))}")
    plain, defaults = backend.plain(spec, target), backends.defaults(backend, spec, target)
    sources = {schedule: (backend.lower(spec, schedule, target), None) for schedule in {plain, *defaults.values()}}
    entry = untuned_entry(spec, target, defaults, plain, sources, device={})
    caution = f"nothing is tuned for this format on {target}; using {backend.name}'s default schedule"
    return entry, selection._replace(cautions=(caution, *selection.cautions))


def untuned_entry(
    spec: AnySpec,
    target: Target,
    defaults: Mapping[str, Schedule],
    plain: Schedule,
    code: Mapping[Schedule, tuple[Source, Artifact | None]],
    **facts: Any,
) -> Entry:
    """An entry of the workloads' default schedules (by workload key), for calls near them, and of the plain one, for all others; `facts`
    as in `Entry.of`.
    """
    launches = [(work, defaults[work.key], *code[defaults[work.key]]) for work in spec.workloads]
    if all(default == plain for default in defaults.values()):
        return Entry.of(spec, target, launches, **facts)
    beyond = (spec.workloads[0], plain, *code[plain])
    return Entry.of(spec, target, launches, [beyond], DispatchTable((), len(launches), (), ()), **facts)
