"""What `get_kernel` takes where nothing is registered: the defaults of the first back end that supports a format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.arch import Target
from kvgen.errors import UnsupportedError
from kvgen.lower import backend as backends
from kvgen.lower.backend import Backend, Source
from kvgen.lower.schedule import Schedule
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.spec import AnySpec
from kvgen.toolchain import Artifact


def serving_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """The entry whose launches serve calls: that of a selection, else one of defaults that is in no store, with a caution that says so.

    Raises UnsupportedError where no back end supports the spec.
    """
    if selection.entry is not None:
        return selection.entry, selection
    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        raise UnsupportedError(f"no kernel for {spec.name} on {target}", "; ".join((*reasons, *selection.why)), is_backend=False)
    code = {schedule: (backend.lower(spec, schedule, target), None) for schedule in backend.defaults(spec, target)}
    caution = f"nothing is tuned for this format on {target}; using {backend.name}'s default schedules"
    return untuned_entry(spec, target, backend, code, device={}), selection._replace(cautions=(caution, *selection.cautions))


def untuned_entry(
    spec: AnySpec, target: Target, backend: Backend, code: Mapping[Schedule, tuple[Source, Artifact | None]], **facts: Any
) -> Entry:
    """An entry of a back end's defaults, of which `code` has the sources; `facts` are those of `Entry.of`."""
    chosen = [(work, backend.default(spec, target, work)) for work in spec.workloads]
    further = [schedule for schedule in code if schedule not in dict(chosen).values()]
    launches = [(work, schedule, *code[schedule]) for work, schedule in chosen]
    return Entry.of(spec, target, launches, [(spec.workloads[0], schedule, *code[schedule]) for schedule in further], **facts)
