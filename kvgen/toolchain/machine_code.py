"""Compares the machine code of two compiled modules, independent of their sources."""

from __future__ import annotations

import re
import struct
from pathlib import Path

CODE = (".text", ".rodata", ".data", ".nv_fatbin")
"""Sections with code or data of the program; the others have names, relocations and unwinding."""
_SECTION = struct.Struct("<IIQQQQ")
"""Name, type, flags, address, offset and size: the beginning of a section's header in 64-bit ELF."""
_NOBITS = 8
_UNIQUE = re.compile(rb"_GLOBAL__N__[0-9a-f]{8}_")
"""nvcc's name of an unnamed namespace holds a digest of everything that was included, comments too."""


def same_machine_code(one: Path, other: Path) -> bool:
    """Whether two modules run the same instructions over the same constants. False if that cannot be determined, because device code
    is compressed or a file is not 64-bit ELF.
    """
    first, second = one.read_bytes(), other.read_bytes()
    if first == second:
        return True
    try:
        return _code(first) == _code(second)
    except (struct.error, ValueError):
        return False


def _code(module: bytes) -> list[tuple[str, bytes]]:
    """Name and contents of the sections that count."""
    if module[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not 64-bit little-endian ELF")
    (start,) = struct.unpack_from("<Q", module, 0x28)
    size, count, names = struct.unpack_from("<HHH", module, 0x3A)
    headers = [_SECTION.unpack_from(module, start + index * size) for index in range(count)]
    labels = headers[names][4]
    found = []
    for name, kind, _, _, offset, length in headers:
        end = module.index(b"\0", labels + name)
        label = module[labels + name : end].decode()
        if label.startswith(CODE) and kind != _NOBITS:
            found.append((label, _UNIQUE.sub(b"", module[offset : offset + length])))
    return found
