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
        return Serving(work, index, launch, None, "the default: no workload within a doubling of it was measured")
    near = entry.measured()[place].workload
    away = distance(near, work)
    where = (
        f"measured at {near.key}" if not away else f"by what was measured around it; the nearest is {near.key}, {away:.1f} doublings away"
    )
    cell = next((cell for cell in table.cells if cell.workload == near.key), None)
    if cell is None:
        timing = entry.timing(near)
        us, read, default = (timing.us, timing.read_fraction, timing.default_us) if timing else (None, None, None)
        return Serving(work, index, launch, near, where, us, read, None, default)
    us = table.time(cell, index)
    read = cell.read_us / us if us is not None and cell.read_us is not None else None
    regret = us / cell.best_us if us is not None else None
    return Serving(work, index, launch, near, where, us, read, regret, table.time(cell, table.default))


def shares(entry: Entry) -> Counter[int]:
    """By index of launch, how many measured workloads it serves."""
    return Counter(cell.launch for cell in entry.dispatch.cells) if entry.dispatch else Counter()
