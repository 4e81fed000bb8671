"""`kvgen migrate`: entries of schema 2 under the names of today, in place, and none of them lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.errors import HostError
from kvgen.lower.backends import get_backend
from kvgen.registry import store as store_module
from kvgen.registry.entry import Entry
from kvgen.registry.migrate import migrate, renamed
from kvgen.registry.select import select
from kvgen.registry.store import ENTRY, Store
from kvgen.spec import KernelSpec
from tests.support.old_entries import NEW_LAUNCH, Change, put_old, tuned


@pytest.fixture
def spec() -> KernelSpec:
    return spec_of("k4v4", "sm90", [workload_of("1x4096"), workload_of("8x32768")])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "registry", "user")


def only(store: Store) -> Entry:
    [found] = store.all()
    assert found.entry is not None, found.problem
    return found.entry


def folders(store: Store) -> list[Path]:
    return sorted(store.root.glob("*/*/*"))


def first_launch(data: dict[str, Any]) -> dict[str, Any]:
    launch: dict[str, Any] = data["schedule"]["launches"][0]["launch"]
    return launch


# --- what is done ------------------------------------------------------------------------------------------------------


def test_an_entry_of_the_old_schema_is_a_miss_that_says_what_to_do(store: Store, spec: KernelSpec) -> None:
    entry = tuned(spec)
    put_old(store, entry)
    selection = select(spec, "sm90", stores=[store], device={})
    assert selection.entry is None
    assert f"user {entry.key}: passed over: schema 2: run `kvgen migrate`" in selection.why


def test_entries_get_the_names_of_today_and_keep_everything_else(store: Store, spec: KernelSpec) -> None:
    entry = tuned(spec)
    old = put_old(store, entry)
    [done] = migrate(store)
    assert (done.key, done.spec, done.problem) == (entry.key, spec.name, None)
    assert done.changes == ("renamed combine → reduction, ctas → ctas_per_sm, depth → tiles_in_flight, unit → kv_tile",)
    found = only(store)
    assert [dict(launch.params) for launch in found.launches] == [NEW_LAUNCH, NEW_LAUNCH]
    assert (found.codes, found.timings, found.key, found.layout) == (entry.codes, entry.timings, entry.key, entry.layout)
    assert found.runner_up == entry.runner_up
    assert found.provenance["migrated"] == {"from_schema": 2, "changes": list(done.changes)}
    assert folders(store) == [done.path] != [old]
    assert select(spec, "sm90", stores=[store], device={"name": "Some GPU"}).entry == found


def test_shares_become_the_last_cta_and_are_rendered_anew(store: Store, spec: KernelSpec) -> None:
    """The other launch keeps its text, and the time is said to be of another kernel."""
    entry = tuned(spec)

    def share(data: dict[str, Any]) -> None:
        first_launch(data).update(combine="shares", unit=2)

    put_old(store, entry, share)
    [done] = migrate(store)
    assert done.changes[1] == "1x4096: combine shares → reduction last_cta, rendered anew; its times are those of shares"
    found = only(store)
    first, second = found.launches
    assert (first.params["reduction"], first.params["kv_tile"]) == ("last_cta", 64)
    assert found.codes[first.file].text == get_backend("cuda").lower(spec, found.schedule(first), "sm90").text
    assert found.codes[second.file] == entry.codes[entry.launches[1].file]
    assert found.codes[first.file].artifact is None


@pytest.mark.parametrize(
    ("backend", "old", "new"),
    [
        ("cuda", {"copy": "bulk_unit", "combine": "two_level"}, {"copy": "bulk_tile", "reduction": "two_level"}),
        ("cuda", {"copy": "bulk", "combine": "cluster8"}, {"copy": "bulk_stage", "reduction": "cluster8"}),
        ("tilelang", {"unit": 2, "column_tiles": 2, "ctas": 2, "combine": "cluster", "stages": 4},
         {"kv_tile": 64, "q_tiles": 2, "ctas_per_sm": 2, "reduction": "cluster", "stages": 4}),
        ("cpu", {"share": 4096, "rows": 4}, {"split_tokens": 4096, "rows": 4}),
    ],
)  # fmt: skip
def test_names_and_values_of_every_back_end(backend: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert renamed(backend, old) == new


def test_a_second_run_does_nothing_and_a_dry_run_writes_nothing(store: Store, spec: KernelSpec) -> None:
    old = put_old(store, tuned(spec))
    [would] = migrate(store, dry_run=True)
    assert would.changes
    assert folders(store) == [old]
    [done] = migrate(store)
    assert done.changes == would.changes
    before = folders(store)
    assert migrate(store) == []
    assert folders(store) == before


# --- what is not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: first_launch(data).update(unit=3), "3 is no value of its launch parameter kv_tile"),
        (lambda data: first_launch(data).update(combine="magic"), "'magic' is no value of its launch parameter reduction"),
        (lambda data: data["schedule"]["launches"][0].update(backend="triton"), "'triton' is no back end"),
        (lambda data: data.update(schema=1), "schema 1: this kvgen reads 3"),
        (lambda data: data.update(schema=99), "schema 99: this kvgen reads 3"),
        (lambda data: data.pop("timings"), "it has no timings"),
        (lambda data: first_launch(data).update(combine="shares", unit=4, warps=7), "warps = 7 is not one of"),
    ],
)
def test_what_cannot_be_migrated_stays_and_is_named(store: Store, spec: KernelSpec, change: Change, problem: str) -> None:
    old = put_old(store, tuned(spec), change)
    content = (old / ENTRY).read_bytes()
    [told] = migrate(store)
    assert told.problem is not None
    assert problem in told.problem
    assert folders(store) == [old]
    assert (old / ENTRY).read_bytes() == content


def test_a_damaged_file_is_no_entry_to_migrate(store: Store, spec: KernelSpec) -> None:
    old = put_old(store, tuned(spec))
    next(old.glob("kernel-*")).write_text("// other\n")
    [told] = migrate(store)
    assert "was changed after it was written" in str(told.problem)


@pytest.mark.parametrize("step", ["_write", "_put", "_discard"])
def test_a_migration_that_dies_loses_nothing(store: Store, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """While the new folder is written, before it is in place, and before the old one goes."""
    entry = tuned(spec)
    put_old(store, entry)

    def die(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store_module if step == "_write" else Store, step, die)
        with pytest.raises(HostError):
            migrate(store)
    migrate(store)
    assert only(store).codes == entry.codes
    assert migrate(store) == []


def test_an_entry_that_was_tuned_meanwhile_stays(store: Store, spec: KernelSpec) -> None:
    old = put_old(store, tuned(spec))
    fresh = tuned(spec)
    store.put(fresh)
    assert not old.exists()
    assert store.replace(old, fresh) == old
    assert only(store) == fresh


# --- room for later ----------------------------------------------------------------------------------------------------


def test_fields_that_nothing_reads_yet_are_kept(store: Store, spec: KernelSpec) -> None:
    entry = tuned(spec)
    assert entry.cache is None
    later = Entry(**{**entry.__dict__, "cache": {"rollback": 4}})
    store.put(later)
    assert only(store) == later
