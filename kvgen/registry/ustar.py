"""Headers of plain files in a tar: the header for a name and a size, and the reason why another one is refused."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping

from kvgen.errors import KvgenError

BLOCK = 512
SIZE = slice(124, 136)
KINDS: Mapping[bytes, str] = {
    tarfile.SYMTYPE: "a link",
    tarfile.LNKTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


def header(name: str, size: int) -> bytes:
    """The header of a plain file, 512 bytes. Raises KvgenError for a name that does not fit."""
    front, back = _split(name)
    fields = [back.ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size, b"%011o\0" % 0]
    rest = [b"0", bytes(100), b"ustar\0", b"00", bytes(64), b"0000000\0", b"0000000\0", front.ljust(155, b"\0"), bytes(12)]
    total = sum(b"".join([*fields, b" " * 8, *rest]))
    return b"".join([*fields, b"%06o\0 " % total, *rest])


def padding(size: int) -> int:
    """Zeros after a file of `size` bytes."""
    return -size % BLOCK


def size_in(block: bytes) -> int:
    """The size in a header; -1 if there is none."""
    digits = block[SIZE].rstrip(b"\0 ")
    return int(digits, 8) if digits and set(digits) <= set(b"01234567") else -1


def difference(block: bytes, name: str, size: int) -> str:
    """The reason why a header is not that of a plain file with this name and size."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return f"the header of {name} is damaged or missing"
    if info.type != tarfile.REGTYPE:
        return f"{info.name!r:.120} is {KINDS.get(info.type, 'no plain file')}"
    if info.name != name:
        return f"it holds {info.name!r:.120} where its index has {name}"
    return f"{name} has {info.size} bytes and its index says {size}" if info.size != size else f"the header of {name} is not a plain one"


def _split(name: str) -> tuple[bytes, bytes]:
    """The two fields of a name: at most 155 and 100 bytes, split at a separator."""
    whole = name.encode("ascii", "replace")
    if len(whole) <= 100:
        return b"", whole
    at = whole.find(b"/", len(whole) - 101)
    if not 0 < at <= 155:
        raise KvgenError(f"the name {name!r:.300} is too long for an archive")
    return whole[:at], whole[at + 1 :]
