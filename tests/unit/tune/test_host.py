"""Failures of this machine while it tunes: said before anything is compiled, and never remembered as a schedule's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvgen.errors import CompilerCrash, HostError, KvgenError
from kvgen.lower.backend import Source
from kvgen.registry import Store
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.tune import trial_store
from kvgen.tune.budget import Budget
from kvgen.tune.compile_only import compile_space
from kvgen.tune.shared_storage import open_database
from kvgen.tune.trial_store import journal_storage
from kvgen.tune.tuner import tune
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec


def places(root: Path) -> list[tuple[Store, ArtifactCache]]:
    """A registry that cannot be written, and a cache."""
    (root / "file").touch()
    good = Store(root / "registry"), ArtifactCache(root / "cache")
    return [(Store(root / "file" / "registry"), good[1]), (good[0], ArtifactCache(root / "file" / "cache"))]


def test_what_cannot_be_written_is_said_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def compiles(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("kvgen.toolchain.compile.run_compiler", compiles)
    for store, cache in places(tmp_path):
        runner = FakeRunner()
        with pytest.raises(HostError, match=r"^cannot write .*: Not a directory$"):
            tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=store, cache=cache, runner=runner)
        assert runner.measured == []
        with pytest.raises(HostError, match=r"^cannot write .*: Not a directory$"):
            compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=store, cache=cache)


def test_a_full_disk_ends_the_run_and_is_remembered_of_no_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(source: Source, cache: ArtifactCache, **options: object) -> Artifact:
        raise HostError("no space")

    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("kvgen.toolchain.compile.build", full)
        with pytest.raises(HostError, match="no space"):
            tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    again = tune(tiny_spec(), "cpu", Budget(trials=2), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    assert again.known == 0
    assert again.failures == []


def test_a_schedule_whose_compiler_was_killed_is_tried_again_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    victims = []

    def killed_once(source: Source, cache: ArtifactCache, **options: object) -> Artifact:
        if not victims or source.text == victims[0]:
            default = FakeBackend().lower(tiny_spec(), FakeBackend().default(tiny_spec(), "cpu"), "cpu")
            if source.text != default.text:
                victims[:] = [source.text]
                raise CompilerCrash("g++ was ended by SIGKILL")
        return build(source, cache)

    store, cache = Store(tmp_path / "registry"), ArtifactCache(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("kvgen.toolchain.compile.build", killed_once)
        first = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    assert victims
    assert first.failures == []
    second = tune(tiny_spec(), "cpu", Budget(), backends=[FakeBackend()], store=store, cache=cache, runner=FakeRunner())
    assert second.measured > 0
    assert second.measured + second.known == len({r.candidate for r in second.records})


def test_a_journal_that_cannot_be_written_says_where_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=r"cannot open the journal .*/file: File exists"):
        journal_storage(tmp_path / "file" / "a.journal")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(trial_store, "_cut_damaged_end", full)
    with pytest.raises(HostError, match=r"cannot open the journal .*a.journal: No space left on device"):
        journal_storage(tmp_path / "a.journal")


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "nosuch://user:secret@host/name",
        "nosuch://user:a/secret@host/name",
        "nosuch://user:a@secret@host/name",
        "nosuch://us@er:secret@host/name",
        "nosuch://user:secret/name",
        "postgresql://user:a@secret@host.invalid/name",
        "user:secret@host/name",
        "nosuch:user:secret@host/name",
        "nosuch://user:…@host/name?password=secret&sslpassword=secret",
        "nosuch://user:…@host/name?x=1&PASSWORD=secret",
        "sqlite:////proc/nowhere/x.db",
    ],
)
def test_a_database_that_does_not_open_is_named_without_its_password(url: str):
    with pytest.raises(
        KvgenError, match=r"cannot open the storage (nonsense|(nosuch://|postgresql://)?…@host|nosuch://user:…/name|sqlite:)"
    ) as caught:
        open_database(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
