from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kvgen.errors import HostError, KvgenError, RegistryMiss
from kvgen.registry import Store, transfer
from kvgen.registry.device import origin
from kvgen.registry.gzipped import Refused
from kvgen.toolchain import ArtifactCache, build
from kvgen.toolchain.cache import Resources
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import compile_space
from kvgen.tune.tuner import tune
from tests.attacks.forging import forged, listing, opened, with_entry
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


class Machine:
    """A registry and a cache."""

    def __init__(self, root: Path) -> None:
        self.store, self.cache = Store(root / "registry"), ArtifactCache(root / "cache")


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there")


def test_a_tuned_entry_arrives_whole_with_its_modules(here: Machine, there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=here.store, cache=here.cache, runner=FakeRunner())
    sent = transfer.export_archive(here.store.all(), tmp_path / "a.tar.gz", here.cache)
    assert len(sent.modules) == len(result.entry.codes) == len({launch.file for launch in result.entry.every_launch}) == 2
    got = transfer.import_archive(tmp_path / "a.tar.gz", there.store, there.cache)
    assert set(got.modules) == set(sent.modules)
    assert [one.entry for one in there.store.all()] == [result.entry]
    monkeypatch.setenv("PATH", "/nonexistent")
    for code in result.entry.codes.values():
        source = code.source("cpu")
        assert source is not None
        assert build(source, there.cache).path.read_bytes() == build(source, here.cache).path.read_bytes()


def test_modules_of_another_machine_are_left_out(here: Machine, there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=here.store, cache=here.cache, runner=FakeRunner())
    transfer.export_archive(here.store.all(), tmp_path / "a.tar.gz", here.cache)
    monkeypatch.setattr(transfer, "machine", lambda target: "another")
    got = transfer.import_archive(tmp_path / "a.tar.gz", there.store, there.cache)
    assert got.modules == ()
    assert len(got.entries) == 1
    assert "another machine" in got.left_out[0]


def test_an_untuned_entry_brings_every_compiled_schedule_and_never_replaces_a_tuned_one(
    here: Machine, there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from kvgen.lower import backend as backends

    monkeypatch.setattr(backends, "backends_for", lambda target: [FakeBackend()])
    report = compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=here.store, cache=here.cache)
    sent = transfer.export_archive(here.store.all(), tmp_path / "a.tar.gz", here.cache)
    assert set(sent.modules) == {one.artifact for one in report.outcomes}
    tuned = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=there.store, cache=there.cache, runner=FakeRunner())
    got = transfer.import_archive(tmp_path / "a.tar.gz", there.store, there.cache)
    assert got.entries == ()
    assert "a tuned one is there" in got.left_out[-1]
    assert [one.entry for one in there.store.all()] == [tuned.entry]


def test_a_newer_local_entry_stays_and_an_older_one_is_replaced(sender: tuple[Machine, bytes], there: Machine, sent: Path):
    (entry,) = (one.entry for one in sender[0].store.all() if one.entry is not None)
    date = str(entry.provenance["date"])
    for year, arrives in (("2999", False), ("1999", True)):
        local = dataclasses.replace(entry, provenance={**entry.provenance, "date": year + date[4:]})
        there.store.put(local)
        got = transfer.import_archive(sent, there.store, there.cache)
        assert [one.entry for one in there.store.all()] == [entry if arrives else local]
        assert bool(got.entries) == arrives
        assert [f"entry {entry.key}: a newer one is there, of 2999" in reason for reason in got.left_out] == [True] * (not arrives)


def test_a_module_that_is_refused_is_not_found_by_its_source(here: Machine, there: Machine, sent: Path, tmp_path: Path):
    index, _ = opened(sent.read_bytes())
    ((key, facts), *_) = index["modules"].items()
    (tmp_path / "other.so").write_bytes(b"other")
    there.cache.put(key, tmp_path / "other.so", Resources("g++", 1.0, {}))
    got = transfer.import_archive(sent, there.store, there.cache)
    assert f"module {key}: one of this key and other bytes is here already, and stays" in got.left_out
    assert there.cache.named(facts["source"], facts["machine"]) is None


def test_what_is_no_archive_is_refused_in_a_sentence(there: Machine, tmp_path: Path):
    file = tmp_path / "a.tar.gz"
    file.write_text("nothing")
    with pytest.raises(KvgenError, match=r"is refused, and nothing of it was taken: it is no archive of format 2"):
        transfer.import_archive(file, there.store, there.cache)
    with tarfile.open(file, "w:gz"):
        pass
    with pytest.raises(KvgenError, match=r"is refused, and nothing of it was taken: it is no archive of format 2"):
        transfer.import_archive(file, there.store, there.cache)


def test_nothing_to_export_is_a_miss(here: Machine, tmp_path: Path):
    with pytest.raises(RegistryMiss):
        transfer.export_archive([], tmp_path / "a.tar.gz", here.cache)


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, bytes]:
    """A machine with one entry and its modules, and what it exports."""
    root = tmp_path_factory.mktemp("sender")
    one = Machine(root)
    compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=one.store, cache=one.cache, limit=1)
    transfer.export_archive(one.store.all(), root / "a.tar.gz", one.cache)
    return one, (root / "a.tar.gz").read_bytes()


@pytest.fixture
def sent(sender: tuple[Machine, bytes], tmp_path: Path) -> Path:
    """The archive, to be damaged."""
    (tmp_path / "a.tar.gz").write_bytes(sender[1])
    return tmp_path / "a.tar.gz"


def refused(file: Path, there: Machine, content: bytes, reason: str) -> None:
    """The archive is refused with a reason, and nothing of it is placed."""
    file.write_bytes(content)
    with pytest.raises(Refused, match=reason):
        transfer.import_archive(file, there.store, there.cache)
    assert not there.store.root.exists()
    assert [path for path in there.cache.root.rglob("*") if path.is_file()] == []


def test_modules_come_with_the_machine_that_compiled_them_and_keep_it(sent: Path, there: Machine, tmp_path: Path):
    index, members = opened(sent.read_bytes())
    for facts in index["modules"].values():
        assert facts["origin"] == origin()
        facts["origin"] = "a machine far away"
    sent.write_bytes(forged(index, members))
    got = transfer.import_archive(sent, there.store, there.cache)
    assert got.origins == ("a machine far away",)
    again = transfer.export_archive(there.store.all(), tmp_path / "b.tar.gz", there.cache)
    assert again.origins == ("a machine far away",)
    assert again.sha256 == hashlib.sha256((tmp_path / "b.tar.gz").read_bytes()).hexdigest()


def test_a_pinned_archive_must_be_that_one(sent: Path, there: Machine):
    digest = hashlib.sha256(sent.read_bytes()).hexdigest()
    with pytest.raises(Refused, match="nothing of it was taken: its sha256 is"):
        transfer.import_archive(sent, there.store, there.cache, "0" * 64)
    assert not there.store.root.exists()
    assert transfer.import_archive(sent, there.store, there.cache, digest).sha256 == digest


def test_a_flipped_bit_of_a_module_is_found_even_under_a_right_container(sent: Path, there: Machine):
    index, members = opened(sent.read_bytes())
    name = next(name for name in members if name.endswith("module.so"))
    changed = bytearray(members[name])
    changed[len(changed) // 2] ^= 1
    index["files"] = listing(members)
    refused(sent, there, forged(index, {**members, name: bytes(changed)}, relist=False), "is not what its index says: another digest")


@pytest.mark.parametrize("flag", ["-wrapper", "sh,-c,touch x", "-fplugin=x.so", "@/etc/passwd"])
def test_an_entry_with_a_flag_of_no_back_end_is_refused(sent: Path, there: Machine, flag: str):
    index, members = opened(sent.read_bytes())
    hostile = with_entry(members, lambda entry: next(iter(entry["sources"].values()))["flags"].append(flag))
    refused(sent, there, forged(index, hostile), f"compiler flag '{flag}', which no back end of kvgen uses")


@pytest.mark.parametrize("header", ["@foo-bar/x.h", "@os.path/x.h", "../../x.h"])
def test_an_entry_with_a_header_of_no_package_is_refused(sent: Path, there: Machine, header: str):
    index, members = opened(sent.read_bytes())
    hostile = with_entry(members, lambda entry: next(iter(entry["sources"].values()))["headers"].append(header))
    refused(sent, there, forged(index, hostile), f"'{header}' is no header or folder of kvgen's templates or of a package")


@pytest.mark.parametrize("where", ["source", "machine", "target", "origin"])
def test_hostile_facts_of_a_module_are_refused(sent: Path, there: Machine, where: str):
    index, members = opened(sent.read_bytes())
    next(iter(index["modules"].values()))[where] = "../../../evil\n"
    refused(sent, there, forged(index, members), f"is no {where}")


def test_a_module_key_that_leads_elsewhere_deletes_nothing(sent: Path, there: Machine, tmp_path: Path):
    canary = tmp_path / "there" / "cache" / "modules" / "canary"
    canary.parent.mkdir(parents=True)
    canary.touch()
    index, members = opened(sent.read_bytes())
    index["modules"]["../canary"] = next(iter(index["modules"].values()))
    sent.write_bytes(forged(index, members))
    with pytest.raises(Refused, match="its modules are not those of its index"):
        transfer.import_archive(sent, there.store, there.cache)
    assert canary.exists()


def test_an_entry_of_another_version_is_left_out_and_named(sent: Path, there: Machine):
    index, members = opened(sent.read_bytes())
    sent.write_bytes(forged(index, with_entry(members, lambda entry: entry.update(schema=99))))
    got = transfer.import_archive(sent, there.store, there.cache)
    assert got.entries == ()
    assert "schema 99: this kvgen reads 4" in got.left_out[0]


def test_a_module_that_is_here_with_other_bytes_stays_and_is_told(sent: Path, there: Machine, tmp_path: Path):
    index, _ = opened(sent.read_bytes())
    (key,) = index["modules"]
    (tmp_path / "mine.so").write_bytes(b"mine")
    there.cache.put(key, tmp_path / "mine.so", Resources("g++", 1.0))
    got = transfer.import_archive(sent, there.store, there.cache)
    assert got.modules == ()
    assert got.left_out == (f"module {key}: one of this key and other bytes is here already, and stays",)
    kept = there.cache.get(key)
    assert kept is not None
    assert kept.path.read_bytes() == b"mine"


def test_damaged_entries_are_not_exported_and_named(there: Machine, sent: Path, tmp_path: Path):
    transfer.import_archive(sent, there.store, there.cache)
    (one,) = there.store.all()
    one.path.with_name("0000.1234abcd").mkdir()
    got = transfer.export_archive(there.store.all(), tmp_path / "b.tar.gz", there.cache)
    assert got.left_out == ("entry 0000: entry.json is missing",)
    assert len(got.entries) == 1


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_archive(sent: Path, there: Machine, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="Not a directory"):
        transfer.import_archive(sent, there.store, ArtifactCache(tmp_path / "file" / "cache"))
    with pytest.raises(HostError, match="cannot write to the user registry"):
        transfer.import_archive(sent, Store(tmp_path / "file" / "registry"), there.cache)
    assert not list(there.cache.root.glob("modules/*/*"))


def test_what_a_killed_import_left_is_swept_by_the_next(sent: Path, there: Machine):
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvgen.registry import Store, archive, transfer\nfrom kvgen.toolchain import ArtifactCache\n"
        "archive._take_zeros = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "transfer.import_archive(Path(sys.argv[1]), Store(Path(sys.argv[2])), ArtifactCache(Path(sys.argv[3])))"
    )
    words = [sys.executable, "-c", script, str(sent), str(there.store.root), str(there.cache.root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(words, env=environment, check=False).returncode == -signal.SIGKILL
    assert list(there.cache.root.glob("tmp/*"))
    transfer.import_archive(sent, there.store, there.cache)
    assert list(there.cache.root.glob("tmp/*")) == []
