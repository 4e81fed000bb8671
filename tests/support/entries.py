"""Entries that no GPU tuned, and entries with other contents under right digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgen.lower.backend import get_backend
from kvgen.registry.entry import Entry
from kvgen.registry.store import ENTRY, Store, _json, _revision, entry_files
from kvgen.spec import KernelSpec
from kvgen.spec.timing import Timing

Change = Callable[[dict[str, Any]], Any]


def tuned(spec: KernelSpec) -> Entry:
    backend = get_backend("cuda")
    schedule = backend.defaults(spec, "sm90")[0]
    source = backend.lower(spec, schedule, "sm90")
    rival = {"backend": "cuda", "launch": dict(schedule.launch), "us": 11.0}
    return Entry.of(
        spec, "sm90", [(work, schedule, source, None) for work in spec.workloads],
        device={"name": "Some GPU"}, provenance={"date": "2026-01-01", "tuned": True},
        timings=tuple(Timing(work, 10.0) for work in spec.workloads),
        runner_up={"launches": {"1x4096": rival}, "layout": {"layout": {"block": 256, "order": "mma"}, "launches": {"8x32768": rival}}},
    )  # fmt: skip


def put_changed(store: Store, entry: Entry, change: Change) -> Path:
    """Write an entry whose `entry.json` is changed, in a folder of the right revision."""
    data = json.loads(entry_files(entry)[ENTRY])
    change(data)
    raw = _json(data)
    place = store.put(entry)
    folder = place.rename(place.with_name(f"{entry.key}.{_revision(raw)}"))
    (folder / ENTRY).write_bytes(raw)
    return folder
