"""Names that may become files, and files that are read with a bound: what lies on disk or in an archive may be anything."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
"""The names kvgen gives: keys, ids, folders and files of entries. No separator, no leading dot or hyphen, so none leads elsewhere."""


def is_name(text: object) -> bool:
    """Whether `text` is one name."""
    return isinstance(text, str) and NAME.fullmatch(text) is not None


def child(folder: Path, *names: str) -> Path:
    """The path of `names` below `folder`. Raises ValueError where one of them is no name."""
    for name in names:
        if not is_name(name):
            raise ValueError(f"{name!r:.120} is no name of a file of kvgen")
    return folder.joinpath(*names)


def read_plain(file: Path, most: int) -> bytes:
    """Contents of a plain file of at most `most` bytes. Raises OSError; ValueError for a link, a device, a pipe or more bytes."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | _no_link(file))
    with os.fdopen(handle, "rb") as opened:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{file.name} is no plain file")
        content = opened.read(min(found.st_size, most) + 1)  # no more memory than the file needs
    if len(content) > most:
        raise ValueError(f"{file.name} has more than {most} bytes")
    if len(content) > found.st_size:
        raise ValueError(f"{file.name} grew while it was read")
    return content


def _no_link(file: Path) -> int:
    """O_NOFOLLOW, with a reason where it would say no more than `too many levels of symbolic links`."""
    if file.is_symlink():
        raise ValueError(f"{file.name} is a link")
    return os.O_NOFOLLOW
