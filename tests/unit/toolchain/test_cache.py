from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgen.errors import HostError, KvgenError
from kvgen.lower.backend import Source
from kvgen.toolchain import build
from kvgen.toolchain import cache as cache_module
from kvgen.toolchain.cache import ArtifactCache, Resources

RESOURCES = Resources("g++ 12.2.0", 1.5)


def module(tmp_path: Path, content: bytes = b"\x7fELF") -> Path:
    file = tmp_path / "compiled.so"
    file.write_bytes(content)
    return file


def test_what_was_put_is_found_by_a_new_cache(tmp_path: Path) -> None:
    put = ArtifactCache(tmp_path / "c").put("ab12", module(tmp_path), RESOURCES, {"log.txt": "fine"})
    got = ArtifactCache(tmp_path / "c").get("ab12")
    assert got == put
    assert got.resources == RESOURCES
    assert {file.name: file.read_bytes()[:4] for file in got.path.parent.iterdir() if file.suffix != ".json"} == {
        "module.so": b"\x7fELF",
        "log.txt": b"fine",
    }


def test_damaged_entries_are_misses_and_are_replaced(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "c")
    for damage in ("module.so", "artifact.json"):
        for content in (b"", b"{}", b"\xff\xfe", b"[1]"):
            path = cache.put("ab12", module(tmp_path), RESOURCES).path
            (path.parent / damage).write_bytes(content)
            assert cache.get("ab12") is None
            assert cache.put("ab12", module(tmp_path), RESOURCES).path.read_bytes() == b"\x7fELF"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_a_failure_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    cache = ArtifactCache(tmp_path / "c")
    monkeypatch.setattr(cache_module.shutil, "copyfile", fails)
    with pytest.raises(HostError, match=os.strerror(code)):
        cache.put("ab12", module(tmp_path), RESOURCES)
    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(HostError, match=os.strerror(code)):
        build(Source("int x;\n", "c++", "cpu"), cache)
    assert list((tmp_path / "c" / "tmp").iterdir()) == []
    assert cache.get("ab12") is None


def test_a_record_of_verification_holds_for_its_bytes_and_its_use(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    artifact = cache.put("ab12", module(tmp_path), RESOURCES)
    assert not cache.verified(artifact, "use")
    cache.mark_verified(artifact, "use")
    assert ArtifactCache(tmp_path / "cache").verified(artifact, "use")
    assert not cache.verified(artifact, "other")
    assert not cache.verified(replace(artifact, sha256="0" * 64), "use")
    (artifact.path.parent / "verified-use").write_bytes(b"\xff\xfe")
    assert not cache.verified(artifact, "use")
    cache.remove(artifact)
    assert cache.get("ab12") is None
    assert not cache.verified(artifact, "use")


def test_a_damaged_name_of_a_source_is_none_and_a_key_stays_within_the_cache(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "c")
    artifact = cache.put("ab12", module(tmp_path), RESOURCES)
    cache.name("source", artifact.id, "machine")
    assert cache.named("source", "machine") == artifact
    (cache.root / "sources" / "source.machine").write_bytes(b"\xff\xfe")
    assert cache.named("source", "machine") is None
    for key in ("", "..", "../ab12", "/etc"):
        with pytest.raises(KvgenError, match="is no key of a compiled module"):
            cache.get(key)


def test_a_cache_that_is_mounted_noexec_is_a_failure_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(HostError, match="mounted noexec"):
        build(Source("int f;\n", "c++", "cpu"), ArtifactCache(tmp_path / "not" / "there"))
