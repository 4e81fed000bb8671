"""The kernel of a format that nothing is registered for: the default schedule of the first back end that supports it."""

from __future__ import annotations

from kvgen.arch import Target
from kvgen.errors import KvgenError, RegistryMiss
from kvgen.lower import backends
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.spec import AnySpec


def default_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """An entry of one launch that is in no store, and the selection with a caution that says so.

    Raises RegistryMiss where no back end supports the spec.
    """
    reasons = []
    for name in backends.NAMES:
        try:
            backend = backends.get_backend(name)
        except KvgenError as error:
            reasons.append(str(error))
            continue
        reason = backends.refusal(backend, spec, target)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        schedule = backend.default(spec, target)
        launch = (spec.workloads[0], schedule, backend.lower(spec, schedule, target), None)
        caution = f"nothing is tuned for this format on {target}; using {name}'s default schedule"
        return Entry.of(spec, target, [launch], device={}), selection._replace(cautions=(caution, *selection.cautions))
    raise RegistryMiss(f"no kernel for {spec.name} on {target}: {'; '.join([*selection.why, *reasons])}")
