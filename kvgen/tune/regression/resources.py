"""Compares registers, spills and shared memory of an entry with those that it recorded."""

from __future__ import annotations

from collections.abc import Mapping

from kvgen.registry.entry import Entry
from kvgen.toolchain.cache import Resources
from kvgen.tune.regression.finding import Finding

FIELDS = ("registers", "spill_bytes", "shared_bytes")


def compare_resources(entry: Entry, now: Mapping[str, Resources]) -> Finding:
    """Resources of every kernel, by source file, against those that the entry recorded."""
    worse: list[str] = []
    other: list[str] = []
    for file, resources in now.items():
        old = entry.codes[file].resources
        for name, kernel in resources.kernels.items():
            before = old.kernels.get(name) if old else None
            for field in FIELDS:
                then, value = getattr(before, field, None), getattr(kernel, field)
                if then is not None and then != value:
                    (worse if value > then else other).append(f"{name}: {field} {then} to {value}")
    if worse:
        return Finding("resources", "regressed", "; ".join(worse))
    return Finding("resources", "changed" if other else "good", "; ".join(other))
