"""The container: what is written is read, what is damaged is refused, and a failed writer leaves what was there."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kvgen.errors import HostError, KvgenError
from kvgen.registry import archive
from kvgen.registry.archive import PART
from kvgen.registry.gzipped import Refused
from kvgen.registry.ustar import header
from kvgen.toolchain.cache import owned
from tests.attacks.forging import forged, listing, opened, plain, sealed

MEMBERS = {"modules/ab12/module.so": os.urandom(3000), "modules/ab12/resources.json": b"{}", "entries/d/f/k.r/entry.json": bytes(512)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    archive.write(tmp_path / "a.tar.gz", MEMBERS, {"modules": {"x": 1}})
    return tmp_path / "a.tar.gz"


def test_what_is_written_is_read_and_any_tar_reads_it(file: Path, tmp_path: Path) -> None:
    index = archive.read(file, tmp_path / "out")
    assert index.facts["modules"] == {"x": 1}
    assert {name: (tmp_path / "out" / name).read_bytes() for name in index.files} == MEMBERS
    assert index.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    with tarfile.open(file) as tar:
        assert tar.getnames() == ["index.json", *sorted(MEMBERS)]
    assert sorted(os.listdir(tmp_path)) == ["a.tar.gz", "out"]


def test_one_archive_is_written_the_same_twice(file: Path, tmp_path: Path) -> None:
    archive.write(tmp_path / "b.tar.gz", dict(reversed(MEMBERS.items())), {"modules": {"x": 1}})
    assert (tmp_path / "b.tar.gz").read_bytes() == file.read_bytes()


def test_every_flipped_bit_and_every_truncation_is_refused(file: Path, tmp_path: Path) -> None:
    good = file.read_bytes()
    damaged = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in [*range(110), *range(110, len(good), 37)]]
    for content in (*damaged, *(good[:at] for at in range(0, len(good), 53)), good + b"\0"):
        file.write_bytes(content)
        with pytest.raises(Refused):
            archive.read(file, tmp_path / "out")
        assert not (tmp_path / "out").exists()  # refused before anything is decompressed


def test_a_pinned_archive_is_refused_before_it_is_decompressed(file: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(Refused, match=f"its sha256 is {digest}, not {'0' * 64}"):
        archive.read(file, tmp_path / "out", "0" * 64)
    assert not (tmp_path / "out").exists()
    assert archive.read(file, tmp_path / "out", digest).sha256 == digest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no archive of format 2$"),
        (b"nothing at all", "no archive of format 2$"),
        (gzip.compress(b"anything", mtime=0), "no archive of format 2, perhaps one of format 1: export it again"),
    ],
)
def test_another_file_is_refused_by_the_format_it_is_not(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(Refused, match=reason):
        archive.read(tmp_path / "a", tmp_path / "out")


def test_a_later_format_is_named(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"kvgen archive 2", b"kvgen archive 7", 1))
    with pytest.raises(Refused, match="it has format 7, and this kvgen reads 2"):
        archive.read(file, tmp_path / "out")


def test_a_device_or_a_folder_is_no_archive_and_an_absent_file_is_named(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(Refused, match="no plain file"):
            archive.read(path, tmp_path / "out")
    with pytest.raises(HostError, match=r"cannot read .*/absent: No such file"):
        archive.read(tmp_path / "absent", tmp_path / "out")


def test_no_more_is_decompressed_than_the_index_allows(file: Path, tmp_path: Path) -> None:
    """4 GiB of zeros behind a right index: refused after the members, not at the end."""
    index, members = opened(file.read_bytes())
    said = json.dumps({**index, "files": listing(members)}).encode()
    bomb = sealed(
        [plain("index.json", said), *(plain(name, members[name]) for name in sorted(members)), *(bytes(1 << 22) for _ in range(64))]
    )
    file.write_bytes(bomb)
    with pytest.raises(Refused, match="more behind its last member"):
        archive.read(file, tmp_path / "out")
    huge = {"sha256": "0" * 64, "bytes": archive.MOST_MEMBER}
    index["files"] = {f"modules/{n}/module.so": huge for n in range(10)}
    file.write_bytes(forged(index, {}, relist=False))
    with pytest.raises(Refused, match="would decompress from"):
        archive.read(file, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_a_link_a_device_and_a_duplicate_are_named(file: Path, tmp_path: Path) -> None:
    index, members = opened(file.read_bytes())
    first = min(members)
    head = plain("index.json", json.dumps({**index, "files": listing(members)}).encode())
    info = tarfile.TarInfo(first)
    for kind, reason in ((tarfile.SYMTYPE, "is a link"), (tarfile.CHRTYPE, "is a device"), (tarfile.DIRTYPE, "is a folder")):
        info.type, info.linkname = kind, "/dev/zero"
        file.write_bytes(sealed([head, info.tobuf()]))
        with pytest.raises(Refused, match=reason):
            archive.read(file, tmp_path / reason)
    file.write_bytes(sealed([head, plain(first, members[first]), plain(first, members[first])]))
    with pytest.raises(Refused, match=f"holds '{first}' where its index has"):
        archive.read(file, tmp_path / "twice")


def test_a_full_disk_leaves_the_old_archive_and_no_half_one(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = file.read_bytes()

    def fails(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive.os, "fsync", fails)
    with pytest.raises(HostError, match=r"cannot write .*a.tar.gz: No space left on device"):
        archive.write(file, {**MEMBERS, "modules/x/module.so": b"x"}, {})
    assert file.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.tar.gz"]


def test_a_member_that_cannot_be_read_is_named(file: Path, tmp_path: Path) -> None:
    old, gone = file.read_bytes(), tmp_path / "module.so"
    with pytest.raises(HostError, match=f"^cannot read {gone}: No such file"):
        archive.write(file, {**MEMBERS, "modules/cd34/module.so": gone}, {})
    assert file.read_bytes() == old


@pytest.mark.parametrize("limit", ["MOST_INDEX", "MOST_MEMBER", "MOST_MEMBERS", "MOST_BYTES"])
def test_an_archive_that_no_import_takes_is_not_written(file: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    old = file.read_bytes()
    monkeypatch.setattr(archive, limit, 2)
    with pytest.raises(KvgenError, match=f"^cannot write {file}: no import would take the archive, because .*; export fewer entries$"):
        archive.write(file, MEMBERS, {})
    assert file.read_bytes() == old
    assert os.listdir(file.parent) == [file.name]


def test_places_that_cannot_hold_an_archive_say_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, reason in (
        (tmp_path / "file" / "a", "Not a directory"),
        (tmp_path / "no" / "a", "No such file"),
        (Path("/proc/a"), "No such file"),
    ):
        with pytest.raises(HostError, match=rf"cannot write .*: {reason}"):
            archive.write(place, MEMBERS, {})
    for place in (tmp_path, Path("/dev/null")):
        with pytest.raises(KvgenError, match="it is no plain file"):
            archive.write(place, MEMBERS, {})
    assert not Path("/dev/null").is_file()


def test_half_archives_of_dead_writers_are_swept_and_those_of_the_living_stay(file: Path, tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "from kvgen.toolchain.cache import owned; print(owned())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    dead, living, other = (tmp_path / f"{name}x" for name in (f"{PART}{gone}", owned(PART), f"{PART}another-host+1+1-"))
    for path in (dead, living, other):
        path.touch()
    archive.write(file, MEMBERS, {})
    assert not dead.exists()
    assert living.exists()
    assert other.exists()


def test_names_are_split_where_a_tar_splits_them() -> None:
    name = f"entries/{'d' * 40}/{'f' * 70}/{'k' * 25}/kernel-12345678.cu"
    info = tarfile.TarInfo.frombuf(header(name, 77), "utf-8", "strict")
    assert (info.name, info.size, info.type, info.mode) == (name, 77, tarfile.REGTYPE, 0o644)
    with pytest.raises(KvgenError, match="too long for an archive"):
        header("entries/" + "d" * 200, 1)
