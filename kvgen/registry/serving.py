"""Which launch of an entry serves a workload, and what was measured there: `kvgen why`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvgen.registry.dispatch import Launch
from kvgen.registry.entry import Entry
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.distance import coordinates_of, distance, mean_length, nearest


@dataclass(frozen=True)
class Serving:
    """The launch that calls of a workload take. Times are in µs; None where they were not measured."""

    workload: Workload
    index: int
    launch: Launch
    measured: Workload | None
    """The measured workload that decides; None where none is near, or where the entry has no dispatch table."""
    why: str
    us: float | None = None
    read_fraction: float | None = None
    regret: float | None = None
    """Time over the fastest launch that was measured there."""
    default_us: float | None = None

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
        }


def serving(entry: Entry, spec: KernelSpec, work: Workload) -> Serving:
    """The launch for a workload, given the traffic of `spec`."""
    table = entry.dispatch
    look_up, tokens = entry.look_up(spec), round(work.batch * mean_length(work))
    index = look_up.launch(work.batch, work.kv_len, work.q_len, tokens)
    launch = entry.every_launch[index]
    if table is None:
        tuned = entry.launches[nearest([coordinates_of(one.workload) for one in entry.launches], coordinates_of(work))].workload
        return Serving(work, index, launch, None, f"tuned for the nearest workload, {tuned.key}; the entry has no dispatch table")
    place = look_up.cell(work.batch, work.kv_len, work.q_len, tokens)
    if place is None:
        measured = "the default: no workload within a doubling of it was measured"
        untuned = "the plain schedule: no workload of the spec is within a doubling of it"
        return Serving(work, index, launch, None, measured if table.cells else untuned)
    served = [one for one, _ in entry.served()]
    away = distance(served[place], work)
    where = f"{'measured at' if table.cells else 'the default for'} {served[place].key}" + (f", {away:.1f} doublings away" if away else "")
    cell = next((cell for cell in table.cells if cell.workload == served[place].key), None)
    timing = entry.timing(served[place])
    us, read = (timing.us, timing.read_fraction) if timing else (None, None)
    default = table.time(cell, table.default) if cell else timing.default_us if timing else None
    return Serving(work, index, launch, served[place], where, us, read, table.regret(cell) if cell else None, default)


def shares(entry: Entry) -> Counter[int]:
    """By index of launch, how many measured workloads it serves."""
    return Counter(cell.launch for cell in entry.dispatch.cells) if entry.dispatch else Counter()
