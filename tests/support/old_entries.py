"""Entries with other contents under right digests, as schema 2 had them for example, and the same launch under the names of today."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgen.lower.backends import get_backend
from kvgen.registry.entry import Entry
from kvgen.registry.store import ENTRY, Store, _json, _revision, entry_files
from kvgen.spec import KernelSpec
from kvgen.spec.timing import Timing

OLD_LAUNCH = {"unit": 4, "depth": 1, "ctas": 1, "copy": "async", "combine": "last", "warps": 8, "exact_q": True}
NEW_LAUNCH = {
    "kv_tile": 128, "tiles_in_flight": 1, "ctas_per_sm": 1, "copy": "cp_async", "reduction": "last_cta", "warps": 8, "exact_q": True,
}  # fmt: skip
Change = Callable[[dict[str, Any]], Any]


def tuned(spec: KernelSpec) -> Entry:
    backend = get_backend("cuda")
    schedule = backend.plain(spec, "sm90")
    source = backend.lower(spec, schedule, "sm90")
    rival = {"backend": "cuda", "launch": dict(schedule.launch), "us": 11.0}
    return Entry.of(
        spec, "sm90", [(work, schedule, source, None) for work in spec.workloads],
        device={"name": "Some GPU"}, provenance={"date": "2026-01-01", "tuned": True},
        timings=tuple(Timing(work, 10.0) for work in spec.workloads),
        runner_up={"launches": {"1x4096": rival}, "layout": {"layout": {"block": 256, "order": "mma"}, "launches": {"8x32768": rival}}},
    )  # fmt: skip


def put_old(store: Store, entry: Entry, change: Change = lambda data: None) -> Path:
    """Write an entry as schema 2 had it; `change` makes it another one."""

    def older(data: dict[str, Any]) -> None:
        data["schema"] = 2
        for name in ("dispatch", "quality", "cache"):
            del data[name]
        described = [*data["runner_up"]["launches"].values(), *data["runner_up"]["layout"]["launches"].values()]
        for item in [*data["schedule"]["launches"], *described]:
            item["launch"] = dict(OLD_LAUNCH)
        change(data)

    return put_changed(store, entry, older)


def put_changed(store: Store, entry: Entry, change: Change) -> Path:
    """Write an entry whose `entry.json` is changed, in a folder of the right revision."""
    data = json.loads(entry_files(entry)[ENTRY])
    change(data)
    raw = _json(data)
    place = store.put(entry)
    folder = place.rename(place.with_name(f"{entry.key}.{_revision(raw)}"))
    (folder / ENTRY).write_bytes(raw)
    return folder
