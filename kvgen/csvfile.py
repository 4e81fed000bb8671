"""CSV files of what is measured, written while it is measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvgen.errors import host_errors
from kvgen.files import write_whole


class CsvFile:
    """Rows of the same names as CSV. Rows are in the file as soon as they are added, so an interrupt or a crash loses none of them.

    The first rows replace what the file held; without any, or where these cannot be written, it stays as it is.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._columns: list[str] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows. Raises HostError where they cannot be written; the rows before stay, and no part of a row."""
        if not rows:
            return
        columns, text = self._columns or list(rows[0]), io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if not self._columns:
            writer.writeheader()
        writer.writerows(rows)
        with host_errors("write", self.file):
            if self._columns:
                with self.file.open("ab", buffering=0) as opened:
                    _append(opened, text.getvalue().encode())
            else:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.file, text.getvalue())
        self._columns = columns


def _append(opened: io.FileIO, data: bytes) -> None:
    """Write all of the data, or none of it. Raises OSError."""
    begin = opened.tell() if opened.seekable() else None
    try:
        while data:  # a disk that gets full takes a part, and refuses the rest
            data = data[opened.write(data) :]
    except OSError:
        if begin is not None:
            with suppress(OSError):  # a device cannot be truncated
                opened.truncate(begin)
        raise
