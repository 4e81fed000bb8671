"""One gzip member whose header contains the digest of all bytes after it, written and read as a stream."""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import BinaryIO, NamedTuple

from kvgen.errors import KvgenError

FORMAT = 2
CHUNK = 1 << 16
START = b"\x1f\x8b\x08\x10\0\0\0\0\x02\xff"
"""gzip header: deflate, with a comment, no time, highest compression, unknown system."""
COMMENT = re.compile(rb"kvgen archive (\d{1,6}) sha256 ([0-9a-f]{64})\0")
MOST_COMMENT = 100


class Refused(KvgenError):
    """A file that is not an archive of kvgen, is damaged, or contains something that no export writes."""


class Digests(NamedTuple):
    """sha256 of a whole file, and of the bytes after its gzip header."""

    whole: str
    body: str


def comment(body: str) -> bytes:
    """The header's comment."""
    return f"kvgen archive {FORMAT} sha256 {body}".encode() + b"\0"


def read_header(file: BinaryIO) -> tuple[bytes, str]:
    """The header's bytes, and the digest in it. Raises Refused for another format."""
    start = file.read(len(START))
    words = b""
    while start == START and len(words) < MOST_COMMENT and not words.endswith(b"\0"):
        byte = file.read(1)
        if not byte:
            break
        words += byte
    found = COMMENT.fullmatch(words)
    if found is None:
        gzip = start[:3] == START[:3]
        raise Refused(f"it is no archive of format {FORMAT}{', perhaps one of format 1: export it again with this kvgen' if gzip else ''}")
    if int(found[1]) != FORMAT:
        raise Refused(f"it has format {int(found[1])}, and this kvgen reads {FORMAT}: export it again with this kvgen")
    return start + words, found[2].decode()


def file_digests(file: BinaryIO) -> Digests:
    """Digests of an archive, read from its beginning. Raises Refused if its header contains another."""
    header, expected = read_header(file)
    whole, body = hashlib.sha256(header), hashlib.sha256()
    while data := file.read(CHUNK):
        whole.update(data)
        body.update(data)
    if body.hexdigest() != expected:
        raise Refused("it is damaged: truncated, or changed after it was written (its digest is not the one in its header)")
    return Digests(whole.hexdigest(), body.hexdigest())


class Deflated:
    """Writes the member: call `write` repeatedly, then `finish`. The file must be seekable."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._file.write(START + comment("0" * 64))
        self._deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._body = hashlib.sha256()
        self._crc = self._length = 0

    def write(self, data: bytes) -> None:
        """Compress more."""
        self._crc, self._length = zlib.crc32(data, self._crc), self._length + len(data)
        self._put(self._deflate.compress(data))

    def finish(self) -> None:
        """End the member and write the digest into the header."""
        self._put(self._deflate.flush() + trailer(self._crc, self._length))
        self._file.seek(len(START))
        self._file.write(comment(self._body.hexdigest()))
        self._file.flush()

    def _put(self, data: bytes) -> None:
        self._body.update(data)
        self._file.write(data)


class Inflated:
    """Reads the member; decompresses only as much as is requested."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the header. Raises Refused."""
        self._file = file
        header, _ = read_header(file)
        self._whole = hashlib.sha256(header)
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._pending = b""
        self._crc = self._length = 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes. Raises Refused if there are fewer."""
        parts = []
        while size:
            part = self._some(size)
            if not part and self._inflate.eof:
                raise Refused("it ends too early")
            size -= len(part)
            parts.append(part)
        return b"".join(parts)

    def finish(self) -> str:
        """Check that this is the end, and the checksum. Returns the sha256 of everything that was read. Raises Refused."""
        while not self._inflate.eof:
            if self._some(1):
                raise Refused("there is more behind its last member")
        tail = self._inflate.unused_data
        while more := self._more():
            tail += more
            if len(tail) > CHUNK:
                break
        if tail != trailer(self._crc, self._length):
            raise Refused("its checksum is wrong" if len(tail) == len(trailer(0, 0)) else "there is more behind its end, or less")
        return self._whole.hexdigest()

    def _some(self, most: int) -> bytes:
        """At most `most` bytes, possibly none; the end of the member is an error here."""
        self._pending = self._pending or self._more()
        if not self._pending and not self._inflate.eof:
            raise Refused("it ends too early")
        try:
            part = self._inflate.decompress(self._pending, most)
        except zlib.error as error:
            raise Refused(f"it does not decompress: {error}") from error
        self._pending = self._inflate.unconsumed_tail
        self._crc, self._length = zlib.crc32(part, self._crc), self._length + len(part)
        return part

    def _more(self) -> bytes:
        data = self._file.read(CHUNK)
        self._whole.update(data)
        return data


def trailer(crc: int, length: int) -> bytes:
    """The trailer of gzip: CRC-32 and size."""
    return crc.to_bytes(4, "little") + (length & 0xFFFFFFFF).to_bytes(4, "little")
