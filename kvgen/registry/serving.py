"""Which launch of an entry serves a workload, and what was measured there: `kvgen why`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from kvgen.registry.dispatch import Launch
from kvgen.registry.entry import Entry
from kvgen.spec import AnyWorkload, KernelSpec, Workload
from kvgen.spec.distance import distance, mean_length
from kvgen.spec.timing import Timing

NO_TABLE = "the entry has no dispatch table"


@dataclass(frozen=True)
class Serving:
    """The launch that calls of a workload take. Times are in µs; None where they were not measured."""

    workload: Workload
    index: int
    launch: Launch
    measured: Workload | None
    """The measured workload nearest to it; None where none is near. Without a dispatch table the workload itself, if it was measured."""
    why: str
    us: float | None = None
    read_fraction: float | None = None
    regret: float | None = None
    """Time over the fastest launch that was measured there."""
    default_us: float | None = None
    """Of the plain schedule there; without a dispatch table, of the default."""
    watts: float | None = None
    """Of the GPU under this launch, if the measured workload's load is sustained."""
    clock_mhz: float | None = None
    """Of its multiprocessors then."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "workload": self.workload.key,
            "launch": self.index,
            "backend": self.launch.backend,
            "params": dict(self.launch.params),
            "measured": self.measured.key if self.measured else None,
            "why": self.why,
            "us": self.us,
            "read_fraction": self.read_fraction,
            "regret": self.regret,
            "default_us": self.default_us,
            "watts": self.watts,
            "clock_mhz": self.clock_mhz,
        }


def require_compiled(spec: KernelSpec, work: Workload) -> None:
    """Raises ValueError for more query tokens than the launches of a spec are compiled for: another algorithm serves such calls."""
    q_len, most = work.q_len, spec.attention.q_len
    if q_len > most:
        raise ValueError(f"q_len ({q_len}) is more than attention.q_len ({most}): calls with more query tokens are extend attention")


def serving(entry: Entry, spec: KernelSpec, work: Workload) -> Serving:
    """The launch for a workload, given the traffic of `spec`."""
    table = entry.dispatch
    look_up, tokens = entry.look_up(spec), round(work.batch * mean_length(work))
    index = look_up.launch(work.batch, work.kv_len, work.q_len, tokens)
    launch = entry.every_launch[index]
    if table is None:
        return _without_table(entry, work, index)
    place = look_up.cell(work.batch, work.kv_len, work.q_len, tokens)
    if place is None:
        none = "no workload within a doubling of it was measured" if table.cells else "the grid has no default within a doubling of it"
        return Serving(work, index, launch, None, f"the plain schedule: {none}")
    known = [one.workload for one in entry.measured()]
    if not table.cells:
        return _by_defaults(entry, work, index, known[place])
    # The look-up prefers the spec's load, and another may have been measured, too.
    near = next((one for one in known if one.key == work.key), known[place])
    away = distance(near, work)
    where = f"by what was measured around it; the nearest is {near.key}, {away:.1f} doublings away" if away else f"measured at {near.key}"
    cell = next((cell for cell in table.cells if cell.workload == near.key), None)
    if cell is None:
        return _tuned(Serving(work, index, launch, near, where), entry.timing(near))
    us = table.time(cell, index)
    read = cell.read_us / us if us is not None and cell.read_us is not None else None
    regret = us / cell.best_us if us is not None else None
    power = (cell.watts, cell.clock_mhz) if index == cell.launch else (None, None)
    return Serving(work, index, launch, near, where, us, read, regret, table.time(cell, table.default), *power)


def _by_defaults(entry: Entry, work: Workload, index: int, nearest: Workload) -> Serving:
    """Where the grid was not measured: the default of its nearest workload, or the launch tuned for a workload that is as near."""
    launch = entry.every_launch[index]
    served = [one.workload for one in entry.measured() if one.launch == index]
    near = nearest if nearest in served else min(served, key=lambda one: distance(one, work))
    timing = entry.timing(near)
    if timing is not None and near.key == work.key:
        return _tuned(Serving(work, index, launch, near, f"measured at {near.key}"), timing)
    told = _default_told(near, work) if timing is None else f"tuned for {near.key}, {distance(near, work):.1f} doublings away"
    fuller = "" if near is nearest else f"; it fills the GPU more evenly than that of {nearest.key}, which is nearest"
    return Serving(work, index, launch, near, told + fuller)


def _without_table(entry: Entry, work: Workload, index: int) -> Serving:
    """The launch that was tuned for the nearest workload. Its time is known if the workload is one that it was tuned for: another load's
    winner serves calls of the same size, and may be another launch.
    """
    launch = entry.launches[index]
    tuned = launch.workload
    if not entry.timings:
        return Serving(work, index, launch, None, _default_told(tuned, work))
    if any(one.workload.key == work.key and entry.schedule(one) == entry.schedule(launch) for one in entry.launches):
        return _tuned(Serving(work, index, launch, work, f"measured at {work.key}; {NO_TABLE}"), entry.timing(work))
    return Serving(work, index, launch, None, f"tuned for the nearest workload, {tuned.key}; {NO_TABLE}")


def _tuned(serving: Serving, timing: Timing | None) -> Serving:
    """With what was measured when the entry was tuned."""
    if timing is None:
        return serving
    return replace(
        serving,
        us=timing.us,
        read_fraction=timing.read_fraction,
        default_us=timing.default_us,
        watts=timing.watts,
        clock_mhz=timing.clock_mhz,
    )


def _default_told(near: AnyWorkload, work: Workload) -> str:
    away = distance(near, work)
    return f"the default for {near.key}" + (f", {away:.1f} doublings away" if away else "")


def shares(entry: Entry) -> Counter[int]:
    """By index of launch, how many workloads of the grid it serves: measured ones or, where none was, those whose default it is."""
    return Counter(one.launch for one in entry.dispatch.measured()) if entry.dispatch else Counter()
