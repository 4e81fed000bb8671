"""Archives as an attacker writes them: the container is right, digests included, and what it holds is not."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable
from typing import Any

from kvgen.digest import digest
from kvgen.registry.archive import INDEX

Members = dict[str, bytes]


def opened(archive: bytes) -> tuple[dict[str, Any], Members]:
    """Index and members of a good archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return json.loads(found.pop(INDEX)), found


def sealed(tar: bytes) -> bytes:
    """Any bytes in the container."""
    return gzip.compress(tar, 1, mtime=0)


def forged(index: Any, members: Members, more: Iterable[tuple[tarfile.TarInfo, bytes]] = ()) -> bytes:
    """An archive of an index and members, and `more` of any kind behind them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in {INDEX: json.dumps(index).encode(), **members}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info, data in more:
            tar.addfile(info, io.BytesIO(data))
    return sealed(file.getvalue())


def with_entry(members: Members, change: Callable[[dict[str, Any]], Any]) -> Members:
    """The members with the first entry changed, and its digest made right again."""
    name = next(name for name in members if name.startswith("entries/"))
    entry = json.loads(members[name])
    del entry["digest"]
    change(entry)
    return {**members, name: json.dumps({"digest": digest(entry), **entry}).encode()}
