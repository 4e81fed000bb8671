"""Stores: what is put is found, and damage is a reason."""

from __future__ import annotations

import errno
import os

import pytest

from kvgen.errors import HostError
from kvgen.registry import store as store_module
from kvgen.registry.store import Store


def files(store: Store) -> list[str]:
    return sorted(path.relative_to(store.root).as_posix() for path in store.root.rglob("*.json"))


def test_what_is_put_is_found_in_one_file_with_a_name_for_people(store, make_entry, spec):
    store.put(make_entry(date="2025-01-01", us=5.0))
    entry = make_entry()
    path = store.put(entry)
    (found,) = store.find(spec)
    assert (found.entry, found.path, found.key) == (entry, path, entry.key)
    assert files(store) == ["test-cpu/q4kv2d64-float16-k4c32-v4t64-contiguous.json"]
    assert Store(store.root / "nowhere").all() == []


def test_other_devices_workloads_and_formats_live_side_by_side(store, make_entry, spec):
    name = "q4kv2d64-float16-k4c32-v4t64-contiguous"
    for _ in range(2):
        for entry in (make_entry(), make_entry(device="Other"), make_entry(((2, 512),)), make_entry(((2, 512), (4, 64)))):
            store.put(entry)
        store.put(make_entry(spec={"value": {"bits": 8, "axis": "token", "group": 64}}))
        store.put(make_entry(spec={"attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "window": 128}}))
    assert len(store.find(spec)) == 4
    assert files(store) == [
        f"other/{name}.json",
        f"test-cpu/{name}-window128.json",
        f"test-cpu/{name}.2x512+4x64.json",
        f"test-cpu/{name}.2x512.json",
        f"test-cpu/{name}.json",
        "test-cpu/q4kv2d64-float16-k4c32-v8t64-contiguous.json",
    ]


DAMAGES = {
    "edited": (lambda path: path.write_text(path.read_text().replace("10.0", "9.0")), "it was changed after it was written"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "it cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "it cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_a_reason_and_building_again_mends_it(store, make_entry, spec, name):
    damage, reason = DAMAGES[name]
    damage(store.put(make_entry()))
    (found,) = store.find(spec)
    assert found.entry is None
    assert reason in found.problem
    store.put(make_entry())
    assert make_entry() in [found.entry for found in store.find(spec)]
    assert len(store.find(spec)) == (1 if name in ("edited", "cut") else 2), "what says its key is replaced"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_leaves_the_old_entry(store, make_entry, spec, monkeypatch, code):
    store.put(make_entry())

    def fails(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "fsync", fails)
        with pytest.raises(HostError, match=os.strerror(code)):
            store.put(make_entry(date="2026-05-05"))
    assert [found.entry for found in store.find(spec)] == [make_entry()]
    store.require_writable()
    assert not list(store.root.rglob(".kvgen-*"))
