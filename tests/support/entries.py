"""Entries that no GPU tuned, and entries with other contents under right digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgen.digest import digest
from kvgen.lower.backend import get_backend
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec
from kvgen.spec.workloads import Timing

Change = Callable[[dict[str, Any]], Any]


def tuned(spec: KernelSpec) -> Entry:
    backend = get_backend("cuda")
    schedule = backend.defaults(spec, "sm90")[0]
    source = backend.lower(spec, schedule, "sm90")
    return Entry.of(
        spec, "sm90", [(work, schedule, source, None) for work in spec.workloads],
        device={"name": "Some GPU"}, provenance={"date": "2026-01-01", "tuned": True},
        timings=tuple(Timing(work, 10.0) for work in spec.workloads),
    )  # fmt: skip


def signed(entry: Entry, change: Change) -> bytes:
    """An entry's file with other contents, under a right digest."""
    data = json.loads(entry.text())
    del data["digest"]
    change(data)
    return json.dumps({"digest": digest(data), **data}).encode()


def put_changed(store: Store, entry: Entry, change: Change) -> Path:
    """Write an entry with other contents, under a right digest."""
    place = store.put(entry)
    place.write_bytes(signed(entry, change))
    return place
