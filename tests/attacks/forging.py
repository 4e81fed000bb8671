"""Archives as an attacker writes them: the container is right, header and digests included, and what it holds is not."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

from kvgen.registry import paths
from kvgen.registry.archive import INDEX
from kvgen.registry.gzipped import FORMAT, Deflated, Inflated
from kvgen.registry.store import ENTRY
from kvgen.registry.ustar import BLOCK, header, padding, size_in

Members = dict[str, bytes]


def opened(archive: bytes) -> tuple[dict[str, Any], Members]:
    """Index and members of a good archive."""
    stream = Inflated(io.BytesIO(archive))
    found: Members = {}
    while (block := stream.read(BLOCK)).strip(b"\0"):
        size = size_in(block)
        name = (block[345:500].rstrip(b"\0") + b"/" + block[:100].rstrip(b"\0")).strip(b"/").decode()
        found[name] = stream.read(size)
        stream.read(padding(size))
    return json.loads(found.pop(INDEX)), found


def plain(name: str, data: bytes) -> bytes:
    """A member as export writes it."""
    return header(name, len(data)) + data + bytes(padding(len(data)))


def sealed(chunks: Iterable[bytes]) -> bytes:
    """Any tar in the container, with a right header, digest and checksum."""
    file = io.BytesIO()
    stream = Deflated(file)
    for chunk in chunks:
        stream.write(chunk)
    stream.finish()
    return file.getvalue()


def listing(members: Members) -> dict[str, Any]:
    """The part of an index that follows from the members."""
    return {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in sorted(members.items())}


def forged(index: dict[str, Any], members: Members, *, relist: bool = True) -> bytes:
    """An archive of an index and members; `relist`: with the digests and sizes that the members have."""
    said = {**index, "format": index.get("format", FORMAT), **({"files": listing(members)} if relist else {})}
    order = sorted(members)
    return sealed([plain(INDEX, json.dumps(said).encode()), *(plain(name, members[name]) for name in order), bytes(2 * BLOCK)])


def entry_folder(members: Members) -> str:
    """The folder of the archive's first entry."""
    return next(name for name in sorted(members) if name.endswith(ENTRY)).rpartition("/")[0]


def with_entry(members: Members, change: Callable[[dict[str, Any]], Any], extra: Members | None = None) -> Members:
    """The members with `entry.json` changed, its digests and its folder's name made right again; `extra` files beside it."""
    folder = entry_folder(members)
    own = {name.rpartition("/")[2]: data for name, data in members.items() if name.startswith(f"{folder}/")} | (extra or {})
    entry = json.loads(own.pop(ENTRY))
    entry["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in own.items()}
    change(entry)
    raw = json.dumps(entry).encode()
    above, _, name = folder.rpartition("/")
    place = f"{above}/{paths.entry_folder(paths.key_of(name), hashlib.sha256(raw).hexdigest()[:8])}"
    others = {name: data for name, data in members.items() if not name.startswith(f"{folder}/")}
    return others | {f"{place}/{name}": data for name, data in {**own, ENTRY: raw}.items()}
