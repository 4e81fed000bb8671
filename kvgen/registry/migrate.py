"""Rewrites entries of the previous schema (2) in the present one (3).

Schema 2 had other names for launch parameters, and `combine: shares` as a way of a CUDA launch to distribute its work. Work distribution is
decided at run time now, so such a launch becomes one with `reduction: last_cta`, whose source is rendered again. The source of every other
kernel does not contain these names and stays as it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvgen.construct import construct
from kvgen.errors import KvgenError
from kvgen.lower.backends import get_backend
from kvgen.plaindata import Json
from kvgen.registry.entry import SCHEMA, Code, Damaged, Entry, OtherSchema
from kvgen.registry.paths import key_of
from kvgen.registry.store import Store, damage_told, read_parts
from kvgen.spec import Workload

NAMES: dict[str, dict[str, str]] = {
    "cuda": {"unit": "kv_tile", "depth": "tiles_in_flight", "ctas": "ctas_per_sm", "combine": "reduction"},
    "tilelang": {"unit": "kv_tile", "column_tiles": "q_tiles", "ctas": "ctas_per_sm", "combine": "reduction"},
    "cpu": {"share": "split_tokens"},
}
"""New names of launch parameters, by back end."""
VALUES: dict[str, dict[Any, Any]] = {
    "kv_tile": {1: 32, 2: 64, 4: 128},
    "copy": {"async": "cp_async", "bulk": "bulk_stage", "bulk_unit": "bulk_tile"},
    "reduction": {
        "last": "last_cta", "shares": "last_cta",
        **{name: name for name in ("two_level", "cluster", "cluster2", "cluster4", "cluster8")},
    },
}  # fmt: skip
"""New values by the new name of the parameter; all other values stay."""


@dataclass(frozen=True)
class Migration(Json):
    """The changes of an entry (made, or with a dry run planned). `problem`: why the entry cannot be migrated; None if it can."""

    key: str
    path: Path
    spec: str
    changes: tuple[str, ...] = ()
    problem: str | None = None


def migrate(store: Store, *, dry_run: bool = False) -> list[Migration]:
    """Rewrite a store's entries of the older schema in place, one at a time. Returns the changes or the problem of each.

    An entry is never lost: the new folder exists before the old one is removed, and a killed run leaves one of them. Entries of the present
    schema are not changed, so a second run does nothing. Raises HostError if the store cannot be read or written.
    """
    return [_migrate(store, one.path, one.problem, dry_run=dry_run) for one in store.all() if one.problem is not None]


def _migrate(store: Store, path: Path, problem: str, *, dry_run: bool) -> Migration:
    key, spec = key_of(path.name), ""
    try:
        with damage_told():
            data, texts, resources = read_parts(path)
            if not (isinstance(data["schema"], int) and OtherSchema(data["schema"]).migratable):
                return Migration(key, path, spec, problem=problem)
            spec = str(data["spec"]["name"])
            renewed, changes = upgraded(data)
            entry = _rendered(Entry.from_parts(renewed, texts, resources), _with_shares(data))
    except (Damaged, KvgenError) as error:
        return Migration(key, path, spec, problem=str(error))
    placed = path if dry_run else store.replace(path, entry)
    return Migration(key, placed, spec, changes)


def upgraded(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The contents of an `entry.json` of schema 2 in the present schema, and the changes as text. Raises Damaged."""
    schedule = data["schedule"]
    launches = [{**item, "launch": renamed(item["backend"], item["launch"])} for item in schedule["launches"]]
    names = sorted({f"{old} → {new}" for item in launches for old, new in NAMES[item["backend"]].items() if new in item["launch"]})
    changes = [f"renamed {', '.join(names)}"] if names else ["schema alone"]
    changes += [
        f"{construct(Workload, item['workload']).key}: combine shares → reduction last_cta, rendered anew; its times are those of shares"
        for item in (schedule["launches"][index] for index in _with_shares(data))
    ]
    renewed = {
        **data,
        "schema": SCHEMA,
        "schedule": {**schedule, "launches": launches},
        "runner_up": _runner_up(data["runner_up"]),
        "provenance": {**data["provenance"], "migrated": {"from_schema": data["schema"], "changes": changes}},
    }
    return renewed, tuple(changes)


def renamed(backend: str, launch: Mapping[str, Any]) -> dict[str, Any]:
    """A launch with the present names. Raises Damaged for a back end or a value that schema 2 did not have."""
    if backend not in NAMES:
        raise Damaged(f"{backend!r:.60} is no back end of kvgen")
    named = {NAMES[backend].get(name, name): value for name, value in launch.items()}
    for name, known in VALUES.items():
        if name in named and named[name] not in known:
            raise Damaged(f"{named[name]!r:.60} is no value of its launch parameter {name}")
    return {name: VALUES[name][value] if name in VALUES else value for name, value in named.items()}


def _runner_up(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if data is None:
        return None
    other = data.get("layout")
    layout = None if other is None else {**other, "launches": _described(other["launches"])}
    return {**data, "launches": _described(data.get("launches") or {}), "layout": layout}


def _described(launches: Mapping[str, Any]) -> dict[str, Any]:
    return {key: {**one, "launch": renamed(one["backend"], one["launch"])} for key, one in launches.items()}


def _with_shares(data: Mapping[str, Any]) -> list[int]:
    """Indices of the launches whose source depends on a parameter that no longer exists."""
    launches = data["schedule"]["launches"]
    return [index for index, item in enumerate(launches) if item["launch"].get("combine") == "shares"]


def _rendered(entry: Entry, indices: list[int]) -> Entry:
    """The entry with the sources of some launches rendered from their schedules. Raises KvgenError if a back end refuses."""
    launches, codes = list(entry.launches), dict(entry.codes)
    for index in indices:
        launch = launches[index]
        code = Code.of(get_backend(launch.backend).lower(entry.spec, entry.schedule(launch), entry.arch))
        codes.setdefault(code.file, code)
        launches[index] = replace(launch, file=code.file)
    entry = replace(entry, launches=tuple(launches))
    used = {launch.file for launch in entry.every_launch}
    return replace(entry, codes={file: code for file, code in codes.items() if file in used})
