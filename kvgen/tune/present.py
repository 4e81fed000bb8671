"""What the registry has for the key of a run: launches, which stay unless others are clearly faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvgen.lower.schedule import Schedule
from kvgen.registry.store import Found, Store
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.tune.contenders import Contender


def present_launches(spec: AnySpec, key: str, found: Sequence[Contender], stores: Iterable[Store]) -> dict[str, Schedule]:
    """The launches, by workload key, of the first entry with this key whose schedules are all in the space; empty without one."""
    spaces = {c.backend.name: c.space for c in found}
    for store in stores:
        for one in store.find(spec):
            launches = _launches(one, key)
            if launches and all(s.backend in spaces and not spaces[s.backend].check(s, work) for work, s in launches):
                return {work.key: schedule for work, schedule in launches}
    return {}


def _launches(one: Found, key: str) -> list[tuple[AnyWorkload, Schedule]]:
    """The launches of an entry by workload; empty for an entry with another key."""
    entry = one.entry
    if entry is None or entry.key != key:
        return []
    return [(launch.workload, entry.schedule(launch)) for launch in entry.launches]
