"""Files that are written whole."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


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
