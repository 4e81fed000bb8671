"""Chooses the entry for a spec: exact, then nearest workloads, then a back end's default, if one gives any; with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvgen.arch import Target
from kvgen.errors import HostError, KvgenError
from kvgen.lower.schedule import layout_id
from kvgen.registry.device import here
from kvgen.registry.entry import Entry
from kvgen.registry.store import Found, Store
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.spec.workloads import Coordinates, apart, coordinates_of, nearest

How = Literal["exact", "nearest", "default", "none"]


class Selection(NamedTuple):
    """The chosen entry. `entry` is None if and only if `how` is default or none."""

    entry: Entry | None
    how: How
    why: tuple[str, ...]
    """Every entry that was considered, and why it was chosen or not."""
    cautions: tuple[str, ...] = ()
    """Differences between the chosen entry and this machine. Results are correct all the same, but perhaps not the fastest."""
    refusals: tuple[str, ...] = ()
    """Where `how` is none, why each back end for the target gives no default."""


class _Candidate(NamedTuple):
    found: Found
    entry: Entry
    distance: float
    further: int
    """Workloads that it was tuned for beside the requested ones."""
    other_device: bool
    place: int

    @property
    def rank(self) -> tuple[bool, bool, float, int, int]:
        """Order: what was tuned first, of that what was tuned on this device, then the nearest workloads, then the first store, then what
        was tuned for the fewest other workloads.
        """
        return not self.entry.timings, self.other_device, self.distance, self.place, self.further


def select(
    spec: AnySpec,
    target: Target,
    workload: AnyWorkload | None = None,
    *,
    stores: Iterable[Store] | None = None,
    device: Mapping[str, Any] | None = None,
) -> Selection:
    """The entry for a spec's format and target, for one workload or for all of the spec's.

    `stores` defaults to the user's, the site's and the packaged one; `device` to this machine's. Nothing is compiled. A
    damaged or outdated entry is passed over with its reason; a store that cannot be read is passed over with a caution.
    """
    if stores is None:
        from kvgen.registry import stores as all_stores

        stores = all_stores()
    device = here(target) if device is None else device
    wanted = (workload,) if workload is not None else spec.workloads
    why: list[str] = []
    unread: list[str] = []
    candidates: list[_Candidate] = []
    for place, store in enumerate(stores):
        try:
            found = store.find(spec)
        except HostError as error:
            why.append(f"{store.name}: passed over: {error}")
            unread.append(f"the {store.name} registry was passed over: {error}")
            continue
        if not found:
            why.append(f"{store.name} ({store.root}): nothing for this format")
        for one in found:
            entry, problem = one.entry, one.problem
            if entry is not None:
                problem = stale(entry, spec, target)
            if entry is None or problem is not None:
                why.append(f"{one.label}: passed over: {problem}")
            else:
                further = len({launch.workload.key for launch in entry.launches} - {work.key for work in wanted})
                candidates.append(_Candidate(one, entry, _coverage(entry, wanted), further, not _same_device(entry, device), place))
    ranked = sorted(candidates, key=lambda candidate: candidate.rank)
    selection = _choose(ranked, why, device) or _without_entry(spec, target, why)
    return selection._replace(cautions=(*selection.cautions, *unread))


def _choose(ranked: list[_Candidate], why: list[str], device: Mapping[str, Any]) -> Selection | None:
    """The first candidate that fits this machine, None if none does; adds the reasons to `why`."""
    chosen: _Candidate | None = None
    chosen_outdated = False
    for candidate in ranked:
        where = f"{candidate.found.label} ({', '.join(launch.workload.key for launch in candidate.entry.launches)})"
        if chosen is not None:
            why.append(f"{where}: not needed: {_behind(candidate, chosen)}")
        elif (reason := _unfit(candidate, outdated := _outdated(candidate.entry))) is not None:
            why.append(f"{where}: passed over: {reason}")
        else:
            chosen, chosen_outdated = candidate, outdated
            match = "exact" if candidate.distance == 0 else f"nearest workload, {candidate.distance:.1f} doublings away"
            why.append(f"{where}: taken: {match}")
    if chosen is None:
        return None
    how: How = "exact" if chosen.distance == 0 else "nearest"
    return Selection(chosen.entry, how, tuple(why), tuple(_cautions(chosen.entry, device, outdated=chosen_outdated)))


def _without_entry(spec: AnySpec, target: Target, why: Sequence[str]) -> Selection:
    """The default of the first back end that supports the format; none, with the reasons, where no back end does."""
    from kvgen.lower import backend as backends

    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        return Selection(None, "none", tuple(why), refusals=tuple(reasons))
    return Selection(None, "default", (*why, f"no entry is left: the default schedules of the {backend.name} back end"))


def _coverage(entry: Entry, wanted: Sequence[AnyWorkload]) -> float:
    """Weighted mean distance of the requested workloads to the entry's nearest; 0 if it was tuned for all of them."""
    tuned = [coordinates_of(launch.workload) for launch in entry.launches]
    total = sum(work.weight for work in wanted)
    return sum(work.weight * _to_nearest(tuned, coordinates_of(work)) for work in wanted) / total


def _to_nearest(tuned: Sequence[Coordinates], wanted: Coordinates) -> float:
    return apart(tuned[nearest(tuned, wanted)], wanted)


def stale(entry: Entry, spec: AnySpec, target: Target) -> str | None:
    """The reason why an entry in the right folder cannot be used on any machine, or None."""
    if entry.spec.format_id != spec.format_id:
        return "it is for another format than its folder's"
    if entry.arch != target:
        return f"it is for {entry.arch}, not {target}"
    if not entry.launches:
        return "it has no launch"
    try:
        layout = layout_id(entry.spec, entry.layout)
    except (KeyError, TypeError, ValueError) as error:
        return f"its layout is none: {error}"
    if layout != entry.layout_id:
        return "it was made for another version of the packed layout"
    return None


def _same_device(entry: Entry, device: Mapping[str, Any]) -> bool:
    return bool(entry.device.get("name") == device.get("name"))


def _unfit(candidate: _Candidate, outdated: bool) -> str | None:
    """The reason why a good entry cannot be used on this machine, or None. An entry tuned here with the same headers needs no check."""
    entry = candidate.entry
    if candidate.other_device and (reasons := _misfits(entry)):
        return f"its schedule is not for this machine: {reasons[0]}"
    if outdated:
        if reasons := _misfits(entry):
            return f"kvgen's headers have changed since, and its schedule is gone: {reasons[0]}"
        if absent := _absent(entry):
            return f"kvgen's headers have changed since, and its source cannot be rendered anew: {absent[0]}"
    return None


def _outdated(entry: Entry) -> bool:
    """Whether the headers that its sources include have changed."""
    return any(entry.source(code) is None for code in entry.codes.values())


def _misfits(entry: Entry) -> list[str]:
    """Why the entry's schedules are not in the search space of this machine; empty if they are."""
    try:
        return misfits(entry)
    except KvgenError as error:
        return [str(error)]


def misfits(entry: Entry) -> list[str]:
    """Why back ends cannot lower the entry's schedules any more: refusals, and constraints of their search spaces.

    Raises KvgenError if a back end cannot be loaded or its search space cannot be read.
    """
    from kvgen.lower.backend import get_backend

    reasons: list[str] = []
    for name in sorted({launch.backend for launch in entry.every_launch}):
        backend = get_backend(name)
        refused = backend.unsupported(entry.spec, entry.arch)
        if refused is not None:
            reasons.append(f"the {name} back end does not support it: {refused}")
            continue
        space = backend.space(entry.spec, entry.arch)
        for launch in (launch for launch in entry.every_launch if launch.backend == name):
            reasons += space.check(entry.schedule(launch), launch.workload if launch in entry.launches else None)
    return reasons


def _absent(entry: Entry) -> list[str]:
    """What has to be installed before the entry's back ends can render its sources anew."""
    from kvgen.lower.backend import get_backend

    backends = (get_backend(name) for name in sorted({launch.backend for launch in entry.every_launch}))
    return [reason for backend in backends if (reason := backend.missing())]


def _cautions(entry: Entry, device: Mapping[str, Any], *, outdated: bool) -> list[str]:
    """Facts of the device that differ from those the entry was made with."""
    labels = {"name": "on {then}, and this is {now}", "driver": "with driver {then}, and this is {now}"}
    labels["threads"] = "with {then} threads, and there are {now}"
    differing = [] if entry.timings else ["it was compiled and never tuned: its schedules are the back end's defaults"]
    if outdated:
        differing.append("kvgen's headers have changed since: its schedules are rendered anew, its times are of the past")
    for name, text in labels.items():
        then, now = entry.device.get(name), device.get(name)
        if then and now and then != now:
            differing.append(f"{entry.made} {text.format(then=then, now=now)}")
    return differing


def _behind(candidate: _Candidate, chosen: _Candidate) -> str:
    if chosen.entry.timings and not candidate.entry.timings:
        return "never tuned"
    if candidate.other_device and not chosen.other_device:
        return f"{candidate.entry.made} on {candidate.entry.device.get('name')}"
    if candidate.distance > chosen.distance:
        return f"its workloads are {candidate.distance:.1f} doublings away"
    if candidate.place > chosen.place:
        return f"the {chosen.found.store} registry goes first"
    return "it was tuned for more other workloads" if candidate.further > chosen.further else "its folder's name comes later"
