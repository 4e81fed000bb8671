"""Time of a step's attention by format, as registered entries have it."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.registry import stores
from kvgen.spec import KernelSpec, Workload

STEP = Workload(batch=8, kv_len=32768)
"""The workload at which formats are compared in time."""


def entry_times(specs: Mapping[str, KernelSpec]) -> dict[str, float]:
    """By name, the least time in µs at 8 x 32768 of an entry with exactly this format, heads and dtype; nothing where there is none."""
    found: dict[str, float] = {}
    for name, spec in specs.items():
        entries = [one.entry for store in stores() for one in store.find(spec) if one.entry is not None]
        times = [timing.us for entry in entries if entry.arch != "cpu" and (timing := entry.timing(STEP)) is not None]
        if times:
            found[name] = min(times)
    return found
