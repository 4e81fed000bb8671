"""Chooses the entry for a spec, with the reasons: exact, then nearest workloads, then a back end's defaults, if one gives any. Of its
launches the one for a workload; and their compiled modules: as they were tuned if these are here, else compiled from what kvgen renders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvgen.arch import Target
from kvgen.errors import HostError, KvgenError, ToolchainMissing, UnsupportedError
from kvgen.lower import backend as backends
from kvgen.lower.backend import Backend, Source
from kvgen.lower.linear import rows_of
from kvgen.lower.schedule import layout_id
from kvgen.registry.entry import Entry, Launch, call_of, here
from kvgen.registry.store import Found, Store
from kvgen.registry.store import stores as all_stores
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec, LinearShape, Workload
from kvgen.spec.workloads import Timing, apart, coordinates_of, nearest
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compilers import machine

LOG = logging.getLogger("kvgen")
"""For information that needs no action. Without a handler, Python prints messages from WARNING on to stderr."""

Ready = Callable[[int, Artifact], object]
"""Called with the index of a launch and its module as soon as it is there."""

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
    """A whole entry of the spec's format and target. Their order is that of the rank: what was tuned on this device first, then the nearest
    workloads, then the first store, then what was tuned for the fewest workloads beside the requested ones.
    """

    untuned_here: bool
    distance: float
    place: int
    further: int
    found: Found
    entry: Entry

    @property
    def rank(self) -> tuple[bool | float, ...]:
        return self[:4]


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
    device = here(target) if device is None else device
    wanted = (workload,) if workload is not None else spec.workloads
    why: list[str] = []
    unread: list[str] = []
    candidates: list[_Candidate] = []
    for place, store in enumerate(all_stores() if stores is None else stores):
        try:
            found = store.find(spec)
        except HostError as error:
            why.append(f"{store.name}: passed over: {error}")
            unread.append(f"the {store.name} registry was passed over: {error}")
            continue
        if not found:
            why.append(f"{store.name} ({store.root}): nothing for this format")
        for one in found:
            entry = one.entry
            if entry is None or (problem := stale(entry, target) or _too_few_rows(entry, wanted)) is not None:
                why.append(f"{one.label}: passed over: {one.problem if entry is None else problem}")
                continue
            further = len({work.key for work, _ in entry.tuned} - {work.key for work in wanted})
            elsewhere = not entry.timings or entry.device.get("name") != device.get("name")
            candidates.append(_Candidate(elsewhere, _coverage(entry, wanted), place, further, one, entry))
    chosen: _Candidate | None = None
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        where = f"{candidate.found.label} ({', '.join(work.key for work, _ in candidate.entry.tuned)})"
        if chosen is not None:
            why.append(f"{where}: not needed: {_behind(candidate, chosen)}")
        elif (reason := _unfit(candidate)) is not None:
            why.append(f"{where}: passed over: {reason}")
        else:
            chosen = candidate
            match = "exact" if candidate.distance == 0 else f"nearest workload, {candidate.distance:.1f} doublings away"
            why.append(f"{where}: taken: {match}")
            why += [f"{key}: its samples differ by {much:.0%}: something disturbed them" for key, much in candidate.entry.disturbed.items()]
    if chosen is not None:
        cautions = (*_cautions(chosen.entry, device), *unread)
        return Selection(chosen.entry, "exact" if chosen.distance == 0 else "nearest", tuple(why), cautions)
    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        return Selection(None, "none", tuple(why), tuple(unread), tuple(reasons))
    return Selection(None, "default", (*why, f"no entry is left: the default schedules of the {backend.name} back end"), tuple(unread))


def _coverage(entry: Entry, wanted: Sequence[AnyWorkload]) -> float:
    """Weighted mean distance of the requested workloads to the entry's nearest; 0 if it was tuned for all of them."""
    tuned = [coordinates_of(work) for work, _ in entry.tuned]
    away = [(work.weight, coordinates_of(work)) for work in wanted]
    return sum(weight * apart(tuned[nearest(tuned, one)], one) for weight, one in away) / sum(weight for weight, _ in away)


def stale(entry: Entry, target: Target) -> str | None:
    """The reason why an entry of the spec's format cannot be used on any machine, or None."""
    if entry.arch != target:
        return f"it is for {entry.arch}, not {target}"
    if not entry.tuned:
        return "it has no launch"
    try:
        layout = layout_id(entry.spec, entry.layout)
    except (KeyError, TypeError, ValueError) as error:
        return f"its layout is none: {error}"
    if layout != entry.layout_id:
        return "it was made for another version of the packed layout"
    return None


def _too_few_rows(entry: Entry, wanted: Sequence[AnyWorkload]) -> str | None:
    """The reason why the launches of a linear layer do not take the rows of these workloads, or None."""
    most = max((work.rows for work in wanted if isinstance(work, LinearShape)), default=0)
    compiled = max(rows_of(launch.params) for launch in entry.launches) if most else 0
    return f"its launches take {compiled} rows, and {most} are asked for" if compiled < most else None


def _unfit(candidate: _Candidate) -> str | None:
    """The reason why a good entry cannot be used on this machine, or None. An entry that was tuned here and renders to the same tokens as
    then needs no check.
    """
    entry, failed = candidate.entry, None
    try:
        outdated = entry.outdated
    except KvgenError as error:
        outdated, failed = True, str(error)
    if not (outdated or candidate.untuned_here):
        return None
    try:
        reason = next(iter(misfits(entry)), failed)
    except KvgenError as error:
        reason = str(error)
    if reason is None or failed:
        return reason and f"its schedule is gone: {reason}"
    changed = "kvgen's sources have changed since, and its schedule is gone"
    return f"{changed if outdated else 'its schedule is not for this machine'}: {reason}"


def misfits(entry: Entry) -> list[str]:
    """Why back ends cannot lower the entry's schedules any more: refusals, and constraints of their search spaces.

    Raises KvgenError if a back end cannot be loaded or its search space cannot be read.
    """
    reasons: list[str] = []
    works = {work.key: work for work in entry.spec.workloads}
    for name in sorted({launch.backend for launch in entry.launches}):
        backend = backends.get_backend(name)
        refused = backend.unsupported(entry.spec, entry.arch)
        if refused is not None:
            reasons.append(f"the {name} back end does not support it: {refused}")
            continue
        space = backend.space(entry.spec, entry.arch)
        for launch in (launch for launch in entry.launches if launch.backend == name):
            for key in launch.workloads or (None,):
                reasons += space.check(entry.schedule(launch), works[key] if key else None)
    return reasons


def _cautions(entry: Entry, device: Mapping[str, Any]) -> list[str]:
    """Facts of the device that differ from those the entry was made with."""
    labels = {"name": "on {then}, and this is {now}", "driver": "with driver {then}, and this is {now}"}
    labels["threads"] = "with {then} threads, and there are {now}"
    changed = "kvgen's sources have changed since: its schedules are rendered anew, its times are of the past"
    differing = [changed] if entry.outdated else []
    if not entry.timings:
        differing.append("its schedules were compiled and never measured")
    for name, text in labels.items():
        then, now = entry.device.get(name), device.get(name)
        if then and now and then != now:
            differing.append(f"{entry.made} {text.format(then=then, now=now)}")
    return differing


def _behind(candidate: _Candidate, chosen: _Candidate) -> str:
    if candidate.untuned_here and not chosen.untuned_here:
        return f"{candidate.entry.made} on {candidate.entry.device.get('name')}"
    if candidate.distance > chosen.distance:
        return f"its workloads are {candidate.distance:.1f} doublings away"
    if candidate.place > chosen.place:
        return f"the {chosen.found.store} registry goes first"
    return "it was tuned for more other workloads" if candidate.further > chosen.further else "its file's name comes later"


# --- what serves calls ---------------------------------------------------------------------------------------------------


def serving_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """The entry whose launches serve calls: that of a selection, else one of defaults that is in no store, with a caution that says so.

    Raises UnsupportedError where no back end supports the spec.
    """
    if selection.entry is not None:
        return selection.entry, selection
    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        raise UnsupportedError(f"no kernel for {spec.name} on {target}", "; ".join((*reasons, *selection.why)), is_backend=False)
    caution = f"nothing is tuned for this format on {target}; using {backend.name}'s default schedules"
    return default_entry(spec, target, backend), selection._replace(cautions=(caution, *selection.cautions))


def default_entry(spec: AnySpec, target: Target, backend: Backend) -> Entry:
    """The entry of a back end's default schedules."""
    sources = {schedule: backend.lower(spec, schedule, target) for schedule in backend.defaults(spec, target)}
    chosen = [(work, backend.default(spec, target, work)) for work in spec.workloads]
    further = [schedule for schedule in sources if schedule not in dict(chosen).values()]
    launches = [(work, schedule, sources[schedule], None) for work, schedule in chosen]
    return Entry.of(spec, target, launches, [(spec.workloads[0], one, sources[one], None) for one in further], device={})


@dataclass(frozen=True)
class Serving:
    """The launch that calls of a workload take."""

    workload: AnyWorkload
    index: int
    launch: Launch
    why: str
    modelled_us: float | None
    """Of the launch, by the model that chose it; None where the launch was tuned for the workload."""
    timing: Timing | None
    """What was measured at the workload; None where nothing was."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in µs, None where they were not measured."""
        launch = {"launch": self.index, "backend": self.launch.backend, "params": dict(self.launch.params)}
        measured = {name: getattr(self.timing, name, None) for name in ("us", "read_fraction", "default_us", "watts", "clock_mhz")}
        return {"workload": self.workload.key, **launch, "why": self.why, "modelled_us": self.modelled_us, **measured}


def require_compiled(spec: KernelSpec, work: Workload) -> None:
    """Raises ValueError for more query tokens than the launches of a spec are compiled for: another algorithm serves such calls."""
    q_len, most = work.q_len, spec.attention.q_len
    if q_len > most:
        raise ValueError(f"q_len ({q_len}) is more than attention.q_len ({most}): calls with more query tokens are extend attention")


def serving(entry: Entry, spec: AnySpec, work: AnyWorkload) -> Serving | None:
    """The launch for a workload, given the traffic of `spec`. None for an operation on a matrix: the nearest shape's serves."""
    if isinstance(work, LinearShape):
        index = by_rows(entry)[work.rows]
        launch = entry.launches[index]
        tuned = work.key in launch.workloads and entry.timings
        why = f"tuned for {work.key}" if tuned else f"compiled for {rows_of(launch.params)} rows"
        return Serving(work, index, launch, why, None, entry.timing(work))
    if not isinstance(spec, KernelSpec) or not isinstance(work, Workload):
        return None
    look_up, call = entry.look_up(spec), call_of(work)
    index = look_up.launch(*call)
    launch = entry.launches[index]
    if work.key in launch.workloads and entry.timings:
        return Serving(work, index, launch, f"tuned for {work.key}", None, entry.timing(work))
    times = look_up.times(call.batch, call.longest, call.tokens)
    others = [us for number, us in enumerate(times) if entry.launches[number].params != launch.params]
    why = f"of the least modelled time, the next one has {min(others) / times[index]:.2f} times as much" if others else "the only launch"
    return Serving(work, index, launch, why, times[index], None)


def by_rows(entry: Entry) -> tuple[int, ...]:
    """Of a linear layer, the index of the launch for calls of 0, 1, 2 … rows, up to the most that one is compiled for: of those that take
    so many rows, the one that was tuned for the fewest that are as many, else for the most.
    """
    tuned = [(work.rows, entry.launches.index(launch)) for work, launch in entry.tuned if isinstance(work, LinearShape)]
    compiled = [rows_of(launch.params) for launch in entry.launches]
    every = [*tuned, *((compiled[index], index) for index, launch in enumerate(entry.launches) if not launch.workloads)]

    def chosen(m: int) -> int:
        fitting = [one for one in every if compiled[one[1]] >= m]
        return min(fitting, key=lambda one: (one[0] < m, abs(one[0] - m)))[1]

    return tuple(chosen(m) for m in range(max(compiled) + 1))


# --- the modules of its launches -------------------------------------------------------------------------------------------


def modules(entry: Entry, ready: Ready = lambda *_: None, starting: Callable[[], object] = lambda: None) -> list[Path]:
    """Shared libraries of the launches, in their order. `starting` is called before the first compilation.

    The module that was measured is taken if the cache has it, it runs on this machine, and the launch renders to the same tokens; then no
    compiler is needed. Raises ToolchainMissing, CompileError, and as `Entry.sources` does.
    """
    cache = ArtifactCache()
    cache.require_executable()
    found: dict[int, Artifact] = {}
    missing: dict[str, tuple[Source, list[int]]] = {}
    for index, (launch, source) in enumerate(zip(entry.launches, entry.sources, strict=True)):
        if (tuned := tuned_module(launch, source, cache)) is not None:
            found[index] = tuned
            ready(index, tuned)
        else:
            missing.setdefault(source.id, (source, []))[1].append(index)

    def compiling(count: int) -> None:
        LOG.warning("kvgen: compiling %d kernel%s for %s (first use; cached afterwards)", count, "s" if count > 1 else "", entry.arch)
        starting()

    def compiled(key: str, artifact: Artifact) -> None:
        for index in missing[key][1]:
            found[index] = artifact
            ready(index, artifact)

    if missing:
        from kvgen.toolchain.compile import build_all

        try:
            build_all([source for source, _ in missing.values()], cache, compiling, compiled)
        except ToolchainMissing as error:
            raise ToolchainMissing(f"the kernel is not compiled on this machine yet, and cannot be: {error}") from error
    return [found[index].path for index in range(len(entry.launches))]


def tuned_module(launch: Launch, source: Source, cache: ArtifactCache) -> Artifact | None:
    """The module that a launch was measured as, if the cache has it, it runs here and its source has the same tokens."""
    if launch.artifact is None or launch.machine != machine(source.target) or source.fingerprint != launch.fingerprint:
        return None
    return cache.get(launch.artifact)
