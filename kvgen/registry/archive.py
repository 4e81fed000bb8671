"""The file format of archives: a tar in gzip that is read strictly, so that only what an export wrote is accepted.

    gzip header    its comment is `kvgen archive FORMAT sha256 HEX`, the digest of all bytes after the header
    index.json     the first member: {"format", "files": {name: {"sha256", "bytes"}}, and facts of the caller}
    members        the plain files that the index lists, in its order, each once

Any tar program reads it. This reader accepts nothing else: the header of every member must be, byte for byte, the one that follows from its
name and size in the index. So there are no folders, links, devices, sparse, extended or duplicate members, and no bytes after the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvgen.errors import KvgenError, host_errors
from kvgen.files import child, open_plain, parse_json, read_plain
from kvgen.registry.gzipped import FORMAT, Deflated, Inflated, Refused, file_digests
from kvgen.registry.ustar import BLOCK, difference, header, padding, size_in
from kvgen.toolchain.cache import left_behind, owned, sync

INDEX = "index.json"
DEPTH = {"entries": 5, "modules": 3}
"""Number of components of a member's name, by the first of them."""
CHUNK = 1 << 20
MOST_INDEX, MOST_MEMBER, MOST_BYTES = 1 << 24, 1 << 28, 1 << 32
"""Bytes of the index, of one member, and of all."""
MOST_MEMBERS = 20_000
PLAIN_BYTES, MOST_RATIO = 1 << 26, 100
"""An archive that decompresses to more than PLAIN_BYTES may be at most MOST_RATIO times as large as its file; more is treated as a
decompression bomb."""
PART = ".kvgen-export-"


class Index(NamedTuple):
    """The index of an archive: sha256 and bytes of every member by name, and the rest of `index.json`."""

    files: dict[str, tuple[str, int]]
    facts: dict[str, Any]
    sha256: str
    """Digest of the whole archive."""


# --- writing ---------------------------------------------------------------------------------------------------------


def write(file: Path, members: Mapping[str, bytes | Path], facts: Mapping[str, Any]) -> str:
    """Write an archive of `members` (contents, or files to read, by name) and replace `file` by it. Returns its sha256.

    If the writer fails or is killed, the old file stays. Raises HostError, and KvgenError if `file` exists and is not a plain file, or if
    `read` would refuse the archive for its size.
    """
    file = file.resolve()
    with host_errors("write", file):
        if file.exists() and not file.is_file():
            raise KvgenError(f"cannot write {file}: it is no plain file")
        _sweep(file.parent)
        part = file.parent / f"{owned(PART)}{secrets.token_hex(4)}"
        try:
            with open(part, "x+b") as opened:
                index = _fill(opened, {name: members[name] for name in sorted(members)}, facts)
                _listed(index, opened.seek(0, os.SEEK_END))
                os.fsync(opened.fileno())
                opened.seek(0)
                digest = file_digests(opened).whole
            part.replace(file)
        except OSError as error:
            error.filename = str(file)  # its user named this one
            raise
        except Refused as reason:
            raise KvgenError(f"cannot write {file}: no import would take the archive, because {reason}; export fewer entries") from reason
        finally:
            part.unlink(missing_ok=True)
        sync(file.parent)
    return digest


def _fill(file: BinaryIO, members: Mapping[str, bytes | Path], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write index and members; returns the index. Raises Refused for one that is too large to be read."""
    listed = {}
    for name, content in members.items():
        data = _content(content)
        listed[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    index = {**facts, "format": FORMAT, "files": listed}
    stream, text = Deflated(file), (json.dumps(index, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    if len(text) > MOST_INDEX:
        raise Refused(f"its index has {len(text)} bytes, and {MOST_INDEX} are the most")
    _add(stream, INDEX, text)
    for name, content in members.items():
        data = _content(content)
        if hashlib.sha256(data).hexdigest() != listed[name]["sha256"]:
            raise KvgenError(f"{name} changed while it was exported")
        _add(stream, name, data)
    stream.write(bytes(2 * BLOCK))
    stream.finish()
    return index


def _content(content: bytes | Path) -> bytes:
    if isinstance(content, bytes):
        return content
    with host_errors("read", content):
        try:
            return read_plain(content, MOST_MEMBER)
        except ValueError as error:
            raise Refused(str(error)) from error


def _add(stream: Deflated, name: str, data: bytes) -> None:
    stream.write(header(name, len(data)) + data + bytes(padding(len(data))))


def _sweep(folder: Path) -> None:
    """Remove incomplete archives of killed exports."""
    for left in folder.glob(f"{PART}*"):
        if left_behind(left.name, PART):
            with suppress(OSError):
                left.unlink()


# --- reading ---------------------------------------------------------------------------------------------------------


def read(file: Path, folder: Path, sha256: str | None = None) -> Index:
    """Check a whole archive and write its members below `folder`, by their names. `sha256` is its required digest.

    Raises Refused for any defect of the archive; members that `folder` contains then must not be used.
    Raises HostError if the archive cannot be read or `folder` cannot be written.
    """
    with host_errors("read", file):
        try:
            opened = open_plain(file, follow=True)
        except ValueError as error:
            raise Refused("it is no plain file") from error
        with opened:
            found = file_digests(opened)
            if sha256 is not None and found.whole != sha256:
                raise Refused(f"its sha256 is {found.whole}, not {sha256}")
            size = opened.tell()
            opened.seek(0)
            return _unpack(opened, size, folder, found.whole)


def _unpack(file: BinaryIO, size: int, folder: Path, sha256: str) -> Index:
    stream = Inflated(file)
    data = _read_index(stream)
    files = _listed(data, size)
    for name, (expected, length) in files.items():
        _take_header(stream, name, length)
        place = child(folder, *name.split("/"))
        with host_errors("unpack to", place):
            digest = _copy(stream, length, place)
        if digest != expected:
            raise Refused(f"{name} is not what its index says: another digest")
        _take_zeros(stream, padding(length))
    _take_zeros(stream, 2 * BLOCK)
    if stream.finish() != sha256:
        raise Refused("it changed while it was read")
    return Index(files, data, sha256)


def _read_index(stream: Inflated) -> dict[str, Any]:
    block = stream.read(BLOCK)
    size = size_in(block)
    if block != header(INDEX, max(0, min(size, MOST_INDEX))):
        raise Refused(f"it does not begin with an index of at most {MOST_INDEX} bytes: {difference(block, INDEX, size)}")
    raw = stream.read(size)
    _take_zeros(stream, padding(size))
    try:
        data = parse_json(raw)
    except ValueError as error:
        raise Refused(f"its index cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("files"), dict):
        raise Refused(f"its index is none of format {FORMAT}")
    return data


def _listed(data: Mapping[str, Any], size: int) -> dict[str, tuple[str, int]]:
    """The members that the index lists, checked against all bounds. Raises Refused."""
    files: dict[str, tuple[str, int]] = {}
    if len(data["files"]) > MOST_MEMBERS:
        raise Refused(f"it lists {len(data['files'])} members, more than {MOST_MEMBERS}")
    for name, facts in data["files"].items():
        parts = name.split("/")
        try:
            child(Path(), *parts)
            length, digest = facts["bytes"], facts["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"its index lists {name!r:.120}: {error}") from error
        if DEPTH.get(parts[0]) != len(parts):
            raise Refused(f"its index lists {name!r:.120}, which belongs to no entry or module")
        if type(length) is not int or not 0 <= length <= MOST_MEMBER or not isinstance(digest, str):
            raise Refused(f"its index gives {name} {length!r:.40} bytes, and {MOST_MEMBER} are the most")
        files[name] = digest, length
    total, most = sum(length for _, length in files.values()), min(MOST_BYTES, max(PLAIN_BYTES, MOST_RATIO * size))
    if total > most:
        raise Refused(f"it would decompress from {size} to {total} bytes, and {most} are the most")
    if list(files) != sorted(files):
        raise Refused("its index is not in order")
    return files


def _take_header(stream: Inflated, name: str, size: int) -> None:
    block = stream.read(BLOCK)
    if block != header(name, size):
        raise Refused(difference(block, name, size))


def _take_zeros(stream: Inflated, count: int) -> None:
    if any(stream.read(count)):
        raise Refused("there is something between its members")


def _copy(stream: Inflated, size: int, place: Path) -> str:
    """Copy `size` bytes to a new file; returns their digest."""
    sha = hashlib.sha256()
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "xb") as file:
        while size:
            data = stream.read(min(size, CHUNK))
            sha.update(data)
            file.write(data)
            size -= len(data)
    return sha.hexdigest()
