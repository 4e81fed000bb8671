"""Stores: what is put is found, damage is a reason, and no reader or killed writer ever does harm."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from kvgen.errors import HostError, KvgenError
from kvgen.registry import store as store_module
from kvgen.registry.store import STAGING, Store


def _leftovers(store: Store) -> list[Path]:
    return list(store.root.glob(f"{STAGING}*"))


def test_what_is_put_is_found(store, make_entry, spec):
    entry = make_entry()
    path = store.put(entry)
    (found,) = store.find(spec)
    assert found.entry == entry
    assert found.path == path
    assert sorted(file.name for file in path.iterdir()) == sorted(["entry.json", "resources.json", *entry.codes])
    assert not _leftovers(store)


def test_an_absent_store_is_empty(tmp_path, spec):
    assert Store(tmp_path / "nowhere").find(spec) == []
    assert Store(tmp_path / "nowhere").all() == []


def test_a_new_revision_takes_the_place_of_the_old(store, make_entry, spec):
    old = store.put(make_entry(date="2026-01-01"))
    new = store.put(make_entry(date="2026-01-02", us=5.0))
    assert not old.exists()
    (found,) = store.find(spec)
    assert found.path == new
    assert found.entry.timings[0].us == 5.0


def test_putting_the_same_entry_twice_changes_nothing(store, make_entry):
    first, inode = store.put(make_entry()), None
    inode = first.stat().st_ino
    assert store.put(make_entry()).stat().st_ino == inode


def test_other_devices_and_workloads_live_side_by_side(store, make_entry, spec):
    for entry in (make_entry(), make_entry(device="Other"), make_entry(((2, 512),))):
        store.put(entry)
    assert len(store.find(spec)) == 3
    assert len(store.all()) == 3


def test_other_formats_are_not_found(store, make_entry, spec):
    store.put(make_entry(spec={"value": {"bits": 8, "axis": "token", "group": 64}}))
    assert store.find(spec) == []
    assert len(store.all()) == 1


def _edit_source(path: Path) -> None:
    next(path.glob("kernel-*")).write_text("// changed by hand\n")


def _edit_entry(path: Path) -> None:
    data = json.loads((path / "entry.json").read_text())
    data["timings"][0]["us"] = 0.001
    (path / "entry.json").write_text(json.dumps(data))


DAMAGES = {
    "source edited": (_edit_source, "was changed after"),
    "entry edited": (_edit_entry, "entry.json was changed after"),
    "entry gone": (lambda path: (path / "entry.json").unlink(), "entry.json is missing"),
    "source gone": (lambda path: next(path.glob("kernel-*")).unlink(), "kernel-.* is missing"),
    "resources gone": (lambda path: (path / "resources.json").unlink(), "resources.json is missing"),
    "entry empty": (lambda path: (path / "entry.json").write_bytes(b""), "changed after"),
    "entry is a folder": (lambda path: ((path / "entry.json").unlink(), (path / "entry.json").mkdir()), "cannot be read"),
    "entry is noise": (lambda path: (path / "entry.json").write_bytes(os.urandom(512)), "changed after"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_a_reason(store, make_entry, spec, name):
    damage, reason = DAMAGES[name]
    damage(store.put(make_entry()))
    (found,) = store.find(spec)
    assert found.entry is None
    import re

    assert re.search(reason, found.problem)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b'{"files": 3}', b'{"files": {}, "schema": 1}', b"\xff\xfe"])
def test_a_whole_folder_of_nonsense_is_a_reason(store, make_entry, spec, content):
    """Even where the digest in the folder's name agrees."""
    path = store.put(make_entry())
    (path / "entry.json").write_bytes(content)
    forged = path.with_name(f"{path.name.split('.')[0]}.{store_module._revision(content)}")
    path.rename(forged)
    (found,) = store.find(spec)
    assert found.entry is None
    assert found.problem


def test_put_repairs_a_damaged_entry(store, make_entry, spec):
    entry = make_entry()
    _edit_source(store.put(entry))
    store.put(entry)
    (found,) = store.find(spec)
    assert found.entry == entry


def test_of_two_revisions_the_newest_good_one_counts(store, make_entry, spec, tmp_path):
    """What a writer leaves that was killed between bringing the new revision and taking the old one away."""
    other = Store(tmp_path / "other")
    old, new = make_entry(date="2026-01-01"), make_entry(date="2026-02-01", us=1.0)
    store.put(old)
    fresh = other.put(new)
    beside = store.root / fresh.relative_to(other.root)
    fresh.rename(beside)
    assert [found.entry for found in store.find(spec)] == [new]
    _edit_entry(beside)
    assert [found.entry for found in store.find(spec)] == [old]


def test_a_folder_that_vanishes_while_it_is_read_is_looked_for_again(store, make_entry, spec, monkeypatch):
    store.put(make_entry(date="2026-01-01"))
    real, calls = store_module.read_entry, []

    def racing(path: Path):
        if not calls:
            calls.append(path)
            store.put(make_entry(date="2026-01-02"))
        return real(path)

    monkeypatch.setattr(store_module, "read_entry", racing)
    (found,) = store.find(spec)
    assert found.entry.provenance["date"] == "2026-01-02"


def test_a_revision_that_returns_while_it_is_read_is_looked_for_again(store, make_entry, spec, monkeypatch):
    """Another writer replaces the revision that is being read, and then brings it back, in a folder of the same name."""
    first, second = make_entry(date="2026-01-01"), make_entry(date="2026-01-02")
    store.put(first)
    real, calls = store_module.read_entry, []

    def racing(path: Path):
        if calls:
            return real(path)
        calls.append(path)
        store.put(second)
        try:
            return real(path)
        finally:
            store.put(first)

    monkeypatch.setattr(store_module, "read_entry", racing)
    (found,) = store.find(spec)
    assert found.entry == first


def test_leftovers_of_dead_writers_are_swept(store, make_entry):
    store.root.mkdir()
    left = store.root / f"{STAGING}dead"
    left.mkdir()
    (left / "entry.json").write_text("half")
    store.put(make_entry())
    assert not _leftovers(store)


def test_a_store_that_cannot_be_written_says_so(tmp_path, make_entry):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(KvgenError, match="cannot write to the user registry"):
        Store(file / "registry").put(make_entry())


def _writer(root: Path, entries, ready) -> None:
    ready.set()
    store = Store(root)
    while True:
        for entry in entries:
            store.put(entry)


def test_writers_may_be_killed_at_any_time(store, make_entry, spec):
    """Readers see a good entry at every moment while writers replace it and are killed."""
    entries = [make_entry(date=f"2026-01-{day:02d}", us=float(day)) for day in range(1, 4)]
    store.put(entries[0])
    context = multiprocessing.get_context("fork")
    stop, bad, reads = threading.Event(), [], [0]

    def read() -> None:
        while not stop.is_set():
            reads[0] += 1
            found = store.find(spec)
            if len(found) != 1 or found[0].entry is None:
                bad.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for round_ in range(6):
            ready = context.Event()
            workers = [context.Process(target=_writer, args=(store.root, entries, ready), daemon=True) for _ in range(2)]
            for worker in workers:
                worker.start()
            ready.wait(10)
            time.sleep(0.02 + 0.013 * round_)
            for worker in workers:
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
    finally:
        stop.set()
        reader.join()
    assert reads[0] > 0
    assert bad == []
    store.put(entries[2])
    assert [found.entry for found in store.find(spec)] == [entries[2]]
    assert not _leftovers(store)


def test_remove(store, make_entry, spec):
    store.put(make_entry())
    (found,) = store.find(spec)
    store.remove(found)
    store.remove(found)
    assert store.find(spec) == []


def forge(path: Path, change) -> Path:
    """Change an entry, its digests and its folder's name, so that only its contents are wrong."""
    data = json.loads((path / "entry.json").read_text())
    change(data)
    content = json.dumps(data).encode()
    (path / "entry.json").write_bytes(content)
    return path.rename(path.with_name(f"{path.name.split('.')[0]}.{store_module._revision(content)}"))


def _source(data):
    return next(iter(data["sources"].values()))


HOSTILE = {
    "a flag that runs a program": (lambda data: _source(data)["flags"].extend(["-wrapper", "sh,-c,x"]), "compiler flag '-wrapper'"),
    "a file elsewhere": (lambda data: data["files"].update({"../../evil": "0"}), "'../../evil' is no file of an entry"),
    "a device as a file": (lambda data: data["files"].update({"/dev/zero": "0"}), "'/dev/zero' is no file of an entry"),
    "a source elsewhere": (lambda data: data["sources"].update({"../x.cpp": _source(data)}), "its files are not its sources"),
    "a source without a digest": (lambda data: data["files"].pop(next(iter(data["sources"]))), "its files are not its sources"),
    "a header elsewhere": (lambda data: _source(data)["headers"].append("../../../dev/zero"), "is no header or folder"),
    "a header of no package": (lambda data: _source(data)["headers"].append("@foo-bar/x.h"), "'@foo-bar/x.h' is no header or folder"),
    "a folder of a module": (lambda data: _source(data)["include"].append("@os.path/x"), "'@os.path/x' is no header or folder"),
    "a folder elsewhere": (lambda data: _source(data)["include"].append("/"), "is no header or folder"),
    "a module elsewhere": (lambda data: _source(data).update(artifact="../../evil"), "'../../evil' is no key"),
    "another language": (lambda data: _source(data).update(language="sh"), "language: Input should be 'c++' or 'cuda'"),
    "another target": (lambda data: data.update(arch="../cpu"), "'../cpu' is no target"),
    "no number": (lambda data: data["provenance"].update(x=float("nan")), "NaN is no number"),
    "no schema": (lambda data: data.update(schema="3"), "its schema is no number"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_entry_under_right_digests_is_passed_over_by_name(store, make_entry, spec, name):
    change, reason = HOSTILE[name]
    forge(store.put(make_entry()), change)
    (found,) = store.find(spec)
    assert found.entry is None
    assert reason in found.problem


def test_links_in_an_entry_are_not_followed(store, make_entry, spec):
    path = store.put(make_entry())
    file = next(path.glob("kernel-*"))
    file.unlink()
    file.symlink_to("/dev/zero")
    (found,) = store.find(spec)
    assert found.problem.endswith(f"{file.name} is a link")


def test_nesting_without_end_is_a_reason(store, make_entry, spec):
    path = store.put(make_entry())
    content = b"[" * 200_000
    (path / "entry.json").write_bytes(content)
    path.rename(path.with_name(f"{path.name.split('.')[0]}.{store_module._revision(content)}"))
    (found,) = store.find(spec)
    assert "nested too deeply" in found.problem


def test_an_entry_with_infinite_figures_is_not_written(store, make_entry):
    with pytest.raises(KvgenError, match="cannot be written"):
        store.put(make_entry(us=float("inf")))
    assert store.all() == []


def test_every_way_of_writing_says_where_and_why_it_cannot(tmp_path, make_entry, store):
    (tmp_path / "file").write_text("")
    found = store._load(store.put(make_entry()))
    for root in (tmp_path / "file" / "registry", Path("/proc/kvgen")):
        broken = Store(root)
        for write in (lambda broken=broken: broken.put(make_entry()), broken.require_writable, lambda broken=broken: broken.remove(found)):
            with pytest.raises(
                HostError, match=rf"^cannot write to the user registry {root}: (Not a directory|No such file or directory)$"
            ):
                write()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_leaves_the_old_entry(store, make_entry, spec, monkeypatch, code):
    old = make_entry()
    store.put(old)

    def fails(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store_module.os, "fsync", fails)
    with pytest.raises(HostError, match=os.strerror(code)):
        store.put(make_entry(date="2026-05-05"))
    monkeypatch.undo()
    assert [found.entry for found in store.find(spec)] == [old]
    store.require_writable()
    assert not _leftovers(store)


def test_a_store_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, spec):
    (tmp_path / "file").write_text("")
    for read in (lambda store: store.find(spec), lambda store: store.all()):
        with pytest.raises(HostError, match=r"cannot list .*/registry: Not a directory"):
            read(Store(tmp_path / "file" / "registry"))
