"""Checks of file names, reading files with a bound, because files on disk may be damaged or malicious, and pages that are written whole."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, NoReturn

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
"""Names of keys, ids, folders and files of entries. No separator, no leading dot or hyphen, so a name never leaves its folder."""

MOST_DEPTH = 64
"""Nesting of JSON that is read; beyond a few hundred levels Python's and pydantic's own functions over it fail."""


def is_name(text: object) -> bool:
    """Whether `text` is a name of this pattern."""
    return isinstance(text, str) and NAME.fullmatch(text) is not None


def write_whole(file: Path, text: str) -> None:
    """Replace a file by a text in UTF-8, which takes its place and permissions when it is whole; what is a pipe or a device is written to.
    Raises OSError that names `file`; the old file then stays.
    """
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    file = file.resolve()
    part = file.with_name(f".kvgen-{secrets.token_hex(8)}")  # no longer than a file system takes, and no other's
    try:
        with open(part, "xb") as opened:
            if file.exists():
                os.fchmod(opened.fileno(), stat.S_IMODE(file.stat().st_mode))
            opened.write(text.encode())
            opened.flush()
            os.fsync(opened.fileno())  # else a crash soon afterwards could leave an empty file
        part.replace(file)
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        part.unlink(missing_ok=True)


def read_plain(file: Path, most: int) -> bytes:
    """Contents of a plain file of at most `most` bytes. Raises OSError; ValueError for more bytes, or for a pipe, a device, a folder."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file.name} is no plain file")
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{file.name} has more than {most} bytes")
    return content


def read_json(file: Path, most: int) -> Any:
    """Value of a file of JSON, of at most `most` bytes. Raises as `read_plain` and `parse_json` do."""
    return parse_json(read_plain(file, most))


def parse_json(raw: bytes) -> Any:
    """JSON of finite numbers, nested at most MOST_DEPTH deep. Raises ValueError."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text:.40} is no number")

    def finite(text: str) -> float:
        return value if math.isfinite(value := float(text)) else refuse(text)

    def depth(value: Any) -> int:
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(depth, held), default=0)

    try:
        found = json.loads(raw, parse_constant=refuse, parse_float=finite)
        if depth(found) <= MOST_DEPTH:
            return found
    except RecursionError:
        pass
    raise ValueError("it is nested too deeply")
