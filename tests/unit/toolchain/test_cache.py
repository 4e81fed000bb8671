from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgen.errors import HostError
from kvgen.lower.backend import Source
from kvgen.toolchain import build
from kvgen.toolchain import cache as cache_module
from kvgen.toolchain.cache import ArtifactCache, Resources

RESOURCES = Resources("g++ 12.2.0", 1.5)
BUILD = """
import sys
from pathlib import Path
from kvgen.lower.backend import Source
from kvgen.toolchain import ArtifactCache, build
print(build(Source(sys.argv[2], "c++", "cpu"), ArtifactCache(Path(sys.argv[1]))).path)
"""
SLOW = '#include <map>\n#include <string>\nint f(std::map<std::string, int>& m) { return m["a"]; }\n'


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


def test_processes_building_one_source_and_one_of_them_killed_leave_one_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path), SLOW]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    while not list((tmp_path / "tmp").glob("*")):
        time.sleep(0.01)
    children[0].send_signal(signal.SIGKILL)
    paths = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children[1:]] == [0, 0]
    assert len(list(tmp_path.glob("modules/*/*"))) == 1
    assert Path(max(paths)).is_file()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_a_failure_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    cache = ArtifactCache(tmp_path / "c")
    monkeypatch.setattr(cache_module.os, "fsync", fails)
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
    cache.remove(artifact)
    assert cache.get("ab12") is None
    assert not cache.verified(artifact, "use")


def test_a_cache_that_is_mounted_noexec_is_a_failure_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(HostError, match="mounted noexec"):
        build(Source("int f;\n", "c++", "cpu"), ArtifactCache(tmp_path / "not" / "there"))
