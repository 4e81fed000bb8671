from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from kvgen.errors import KvgenError, RegistryMiss
from kvgen.registry import Store, carry
from kvgen.toolchain import ArtifactCache, build
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import compile_space
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeBench, tiny_spec


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
    result = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=here.store, cache=here.cache, bench=FakeBench())
    sent = carry.export(here.store.all(), tmp_path / "a.tar.gz", here.cache)
    assert len(sent.modules) == len(result.entry.codes) == 2
    got = carry.load(tmp_path / "a.tar.gz", there.store, there.cache)
    assert set(got.modules) == set(sent.modules)
    assert [one.entry for one in there.store.all()] == [result.entry]
    monkeypatch.setenv("PATH", "/nonexistent")
    for code in result.entry.codes.values():
        source = code.source("cpu")
        assert source is not None
        assert build(source, there.cache).path.read_bytes() == build(source, here.cache).path.read_bytes()


def test_modules_of_another_machine_are_left_out(here: Machine, there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=here.store, cache=here.cache, bench=FakeBench())
    carry.export(here.store.all(), tmp_path / "a.tar.gz", here.cache)
    monkeypatch.setattr(carry, "machine", lambda target: "another")
    got = carry.load(tmp_path / "a.tar.gz", there.store, there.cache)
    assert got.modules == ()
    assert len(got.entries) == 1
    assert "another machine" in got.left_out[0]


def test_an_untuned_entry_brings_every_compiled_point_and_never_replaces_a_tuned_one(
    here: Machine, there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from kvgen.lower import backends

    monkeypatch.setattr(backends, "backends_for", lambda target: [FakeBackend()])
    report = compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=here.store, cache=here.cache)
    sent = carry.export(here.store.all(), tmp_path / "a.tar.gz", here.cache)
    assert set(sent.modules) == {point.artifact for point in report.points}
    tuned = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=there.store, cache=there.cache, bench=FakeBench())
    got = carry.load(tmp_path / "a.tar.gz", there.store, there.cache)
    assert got.entries == ()
    assert "a tuned one is there" in got.left_out[-1]
    assert [one.entry for one in there.store.all()] == [tuned.entry]


def test_what_is_no_archive_is_refused_in_a_sentence(there: Machine, tmp_path: Path):
    file = tmp_path / "a.tar.gz"
    file.write_text("nothing")
    with pytest.raises(KvgenError, match=r"is refused, and nothing of it was taken: it is no archive of format 2"):
        carry.load(file, there.store, there.cache)
    with tarfile.open(file, "w:gz"):
        pass
    with pytest.raises(KvgenError, match=r"is refused, and nothing of it was taken: it is no archive of format 2"):
        carry.load(file, there.store, there.cache)


def test_nothing_to_export_is_a_miss(here: Machine, tmp_path: Path):
    with pytest.raises(RegistryMiss):
        carry.export([], tmp_path / "a.tar.gz", here.cache)
