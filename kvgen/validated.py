"""A cache of what was validated before: a later process constructs it again without pydantic and YAML, whose imports take longer than
the rest of a fetch.

A record is a file of the cache folder. Its name is the sha256 of a class, of the source that was validated and of this kvgen; its
content is JSON of plain fields behind a sha256 of it, so a damaged record counts as absent. Only what `construct` gives back exactly
is recorded, and a record that cannot be written is left out: the cache saves time, and nothing depends on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

from kvgen._resources import search_spaces, templates, user_cache
from kvgen.construct import construct
from kvgen.files import read_plain

T = TypeVar("T")

FOLDER = "validated"
MOST_RECORDS = 1024
"""Beyond it, the older half is removed."""
MOST_BYTES = 1 << 20


def recall(kind: type[T], source: str | None, data: Any = None) -> T | None:
    """The value that was recorded for a source, from the recorded data, or from `data` if only the source was recorded. None if there
    is no record, and for a source that is None.
    """
    if source is None:
        return None
    with suppress(OSError, ValueError, TypeError, AttributeError, RuntimeError):  # RuntimeError: there is no home folder
        recorded, _, content = read_plain(_place(kind, source), MOST_BYTES).partition(b"\n")
        if recorded == _sha256(content):
            return construct(kind, json.loads(content) if data is None else data)
    return None


def record(value: Any, source: str | None, data: Any, *, keep: bool = True) -> None:
    """Record a value, and unless not to `keep` it the data that constructs it. A source that is None is not recorded."""
    if source is None or not _gives_back(data, value):
        return
    content = json.dumps(data if keep else None).encode()
    with suppress(OSError, RuntimeError):
        place = _place(type(value), source)
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(place.parent)
        staged = place.with_name(f"{place.name}-{os.getpid()}-{get_ident()}")
        try:
            staged.write_bytes(_sha256(content) + b"\n" + content)
            staged.replace(place)
        finally:
            staged.unlink(missing_ok=True)  # of a full disk


def _gives_back(data: Any, value: Any) -> bool:
    """Whether `data` constructs the value, to the types of its numbers."""
    try:
        return repr(construct(type(value), data)) == repr(value)
    except Exception:  # validation accepts, and converts, what no constructor expects
        return False


def _place(kind: type[Any], source: str) -> Path:
    named = f"{kind.__name__}\n{_code()}\n{source}"
    return user_cache() / FOLDER / _sha256(named.encode("utf-8", "surrogatepass")).decode()


@cache
def _code() -> str:
    """kvgen's version, with the sizes and times of its files, by which Python recognizes stale bytecode, too."""
    from kvgen import __version__

    facts = []
    for root, ending in ((Path(__file__).parent, ".py"), (templates(), ""), (search_spaces(), "")):
        for folder, _, names in os.walk(root):
            for name in names:
                if name.endswith(ending):
                    found = os.stat(os.path.join(folder, name))
                    facts.append((name, found.st_size, found.st_mtime_ns))
    return f"{__version__} {sorted(facts)}"


def _remove_old(folder: Path) -> None:
    records = [folder / name for name in os.listdir(folder)]
    if len(records) >= MOST_RECORDS:
        records.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in records[: len(records) // 2]:
            path.unlink(missing_ok=True)


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
