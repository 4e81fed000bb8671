"""What the registry has for the key of a run: launches, which stay unless others are clearly faster, and a dispatch table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvgen.errors import KvgenError
from kvgen.lower.schedule import Schedule
from kvgen.lower.sources import Sources
from kvgen.registry.dispatch import Launch
from kvgen.registry.entry import Code, Entry
from kvgen.registry.store import Found, Store
from kvgen.spec import AnySpec, AnyWorkload, Workload
from kvgen.tune.contenders import Contender
from kvgen.tune.decide import Decision
from kvgen.tune.plane import Table


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


def present_table(entry: Entry, decision: Decision, sources: Sources) -> Table | None:
    """The dispatch table of an entry with the run's key, where it was measured and still holds: the decision's launches are the entry's,
    and all launches that it names render to the sources that were measured. None otherwise.
    """
    won = {key: record.candidate.schedule for key, record in decision.launches.items()}
    if (
        entry.dispatch is None
        or not entry.dispatch.cells
        or won != {launch.workload.key: entry.schedule(launch) for launch in entry.launches}
    ):
        return None
    if not all(_renders_alike(entry, launch, sources) for launch in entry.every_launch):
        return None
    more = tuple((launch.workload, entry.schedule(launch)) for launch in entry.dispatch.launches if isinstance(launch.workload, Workload))
    return Table(decision, replace(entry.dispatch, launches=()), more, entry.provenance.get("grid", {}), ())


def _renders_alike(entry: Entry, launch: Launch, sources: Sources) -> bool:
    """Whether a launch renders to the entry's own source; False where its back end takes no part in the run, or cannot lower it now."""
    if launch.backend not in sources.backends:
        return False
    try:
        return Code.of(sources.of(entry.schedule(launch))).file == launch.file
    except KvgenError:
        return False
