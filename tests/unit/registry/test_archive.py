"""Archives: what is exported arrives, and what no export writes is refused whole, by name. Damages of all kinds: `tests/attacks`."""

from __future__ import annotations

import hashlib
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.errors import HostError, KvgenError, RegistryMiss
from kvgen.lower import backend as backends
from kvgen.registry import Store, archive
from kvgen.registry.archive import Refused, origin
from kvgen.toolchain import ArtifactCache, build
from kvgen.toolchain.cache import Resources
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import compile_space
from kvgen.tune.tuner import tune
from tests.attacks.forging import forged, opened, with_entry
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


class Machine:
    """A registry and a cache."""

    def __init__(self, root: Path) -> None:
        self.store, self.cache = Store(root / "registry"), ArtifactCache(root / "cache")


@pytest.fixture(autouse=True)
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "get_backend", FakeBackend)
    monkeypatch.setattr(backends, "backends_for", lambda target: [FakeBackend()])


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there")


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, bytes]:
    """A machine with one tuned entry and its modules, and what it exports."""
    one = Machine(tmp_path_factory.mktemp("sender"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "get_backend", FakeBackend)
        tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=one.store, cache=one.cache, runner=FakeRunner())
        archive.export_archive(one.store.all(), one.store.root.parent / "a.tar.gz", one.cache)
    return one, (one.store.root.parent / "a.tar.gz").read_bytes()


@pytest.fixture
def sent(sender: tuple[Machine, bytes], tmp_path: Path) -> Path:
    """The archive, to be damaged."""
    (tmp_path / "a.tar.gz").write_bytes(sender[1])
    return tmp_path / "a.tar.gz"


def test_a_tuned_entry_arrives_whole_with_its_modules(sender, sent: Path, there: Machine, monkeypatch: pytest.MonkeyPatch):
    here, content = sender
    (entry,) = (one.entry for one in here.store.all())
    got = archive.import_archive(sent, there.store, there.cache)
    assert [one.entry for one in there.store.all()] == [entry]
    assert len(got.modules) == len(entry.launches) == 2
    assert (got.origins, got.sha256) == ((origin(),), hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("PATH", "/nonexistent")
    for source in entry.sources:
        assert build(source, there.cache).path.read_bytes() == build(source, here.cache).path.read_bytes()
    with tarfile.open(sent) as tar:
        assert f"entries/{entry.key}.json" in tar.getnames(), "any tar reads it"


def test_modules_of_another_machine_are_left_out(sent: Path, there: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archive, "machine", lambda target: "another")
    got = archive.import_archive(sent, there.store, there.cache)
    assert (got.modules, len(got.entries)) == ((), 1)
    assert "another machine" in got.left_out[0]


def test_an_untuned_entry_brings_every_compiled_schedule_and_never_replaces_a_tuned_one(sent: Path, there: Machine, tmp_path: Path):
    here = Machine(tmp_path / "here")
    report = compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=here.store, cache=here.cache)
    shipped = archive.export_archive(here.store.all(), tmp_path / "b.tar.gz", here.cache)
    assert set(shipped.modules) == {one.artifact for one in report.outcomes}
    archive.import_archive(sent, there.store, there.cache)
    (tuned,) = there.store.all()
    got = archive.import_archive(tmp_path / "b.tar.gz", there.store, there.cache)
    assert got.entries == ()
    assert "a tuned one is there" in got.left_out[-1]
    assert [one.entry for one in there.store.all()] == [tuned.entry]


@pytest.mark.parametrize(("year", "arrives"), [("2999", False), ("1999", True)])
def test_a_newer_local_entry_stays_and_an_older_one_is_replaced(sender, there: Machine, sent: Path, year: str, arrives: bool):
    (entry,) = (one.entry for one in sender[0].store.all())
    date = str(entry.provenance["date"])
    local = replace(entry, provenance={**entry.provenance, "date": year + date[4:]})
    there.store.put(local)
    got = archive.import_archive(sent, there.store, there.cache)
    assert [one.entry for one in there.store.all()] == [entry if arrives else local]
    assert [f"entry {entry.key}: a newer one is there, of 2999" in reason for reason in got.left_out] == [True] * (not arrives)


def test_a_module_that_is_here_with_other_bytes_stays_and_is_told(sent: Path, there: Machine, tmp_path: Path):
    index, _ = opened(sent.read_bytes())
    key, facts = next(iter(index["modules"].items()))
    (tmp_path / "mine.so").write_bytes(b"mine")
    there.cache.put(key, tmp_path / "mine.so", Resources("g++", 1.0))
    got = archive.import_archive(sent, there.store, there.cache)
    assert f"module {key}: one of this key and other bytes is here already, and stays" in got.left_out
    assert there.cache.get(key).path.read_bytes() == b"mine"
    assert there.cache.named(facts["source"], facts["machine"]) is None


def test_what_is_no_entry_of_this_version_is_left_out_and_named(sent: Path, there: Machine, tmp_path: Path):
    index, members = opened(sent.read_bytes())
    good = sent.read_bytes()
    sent.write_bytes(forged(index, with_entry(members, lambda entry: entry.update(schema=99))))
    got = archive.import_archive(sent, there.store, there.cache)
    assert (got.entries, "schema 99, and this kvgen reads 5" in got.left_out[0]) == ((), True)
    sent.write_bytes(good)
    archive.import_archive(sent, there.store, there.cache)
    (there.store.root / "some-gpu").mkdir()
    (there.store.root / "some-gpu" / "x.json").write_text("{}")
    got = archive.export_archive(there.store.all(), tmp_path / "b.tar.gz", there.cache)
    assert (len(got.entries), got.left_out) == (1, ("entry x: it is no entry: it has no schema",))
    with pytest.raises(RegistryMiss, match="no entry to export"):
        archive.export_archive([], tmp_path / "c.tar.gz", there.cache)


def test_a_failed_export_leaves_the_old_file(sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "a.tar.gz"
    file.write_bytes(b"old")

    def fails(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(HostError, match=f"cannot write {file}: No space left"):
        archive.export_archive(sender[0].store.all(), file, sender[0].cache)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
    with pytest.raises(KvgenError, match="it is no plain file"):
        archive.export_archive(sender[0].store.all(), tmp_path, sender[0].cache)


# --- what is refused -----------------------------------------------------------------------------------------------------


def test_a_pinned_archive_must_be_that_one_and_what_is_refused_leaves_nothing(sent: Path, there: Machine):
    with pytest.raises(Refused, match="is refused, and nothing of it was taken: its sha256 is [0-9a-f]{64}, not 0{64}"):
        archive.import_archive(sent, there.store, there.cache, "0" * 64)
    assert not there.store.root.exists()
    assert [path for path in there.cache.root.rglob("*") if path.is_file()] == []
