"""A store: entries as folders of text, written so that readers never see an incomplete entry.

    <device>/<format>.<format id>/<key>.<revision>/   entry.json  kernel-….cpp  resources.json

The revision is the digest of `entry.json`, which contains the digests of the other files, so changes to a folder are
detected. A new revision is renamed into place before the old one is removed, so there is always a good one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvgen.errors import HostError, KvgenError, host_errors
from kvgen.files import child, is_name, parse_json, read_plain
from kvgen.registry.entry import SUFFIX, Damaged, Entry
from kvgen.registry.paths import device_folder, entry_folder, format_folder, key_of, revision_of
from kvgen.spec import AnySpec
from kvgen.toolchain.cache import sync

ENTRY = "entry.json"
RESOURCES = "resources.json"
LOCK = ".lock"
STAGING = ".staging-"
RESCANS = 4
MOST_BYTES = 1 << 24
"""Largest size of a file of an entry, in bytes."""


class Found(NamedTuple):
    """A folder of a store: its entry, or the reason why it has none."""

    store: str
    path: Path
    entry: Entry | None
    problem: str | None = None

    @property
    def key(self) -> str:
        """The entry's key, from the folder's name."""
        return key_of(self.path.name)

    @property
    def label(self) -> str:
        """Store and key, for messages."""
        return f"{self.store} {self.key}"


class Store:
    """Entries under `root`; `name` is used in messages."""

    def __init__(self, root: Path, name: str = "user") -> None:
        self.root = Path(root)
        self.name = name

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {self.name!r})"

    # Readers raise HostError where the store cannot be listed, writers where it cannot be written.

    # --- reading -----------------------------------------------------------------------------------------------------

    def find(self, spec: AnySpec) -> list[Found]:
        """The store's entries of the spec's format, for any device and workload."""
        folder = format_folder(spec)
        return self._read([device / folder for device in _folders(self.root)])

    def all(self) -> list[Found]:
        """All entries of the store, in the order of paths."""
        return self._read([folder for device in _folders(self.root) for folder in _folders(device)])

    def without_entries(self) -> str:
        """What to say where a store that the user named holds no entry."""
        return f"{self.root} holds no entries: is it a registry's folder?"

    def _read(self, folders: list[Path]) -> list[Found]:
        """The newest good revision of every key, and the problem of a key that has none.

        A folder that disappears between listing and reading was replaced. So was one whose files disappeared, perhaps by a folder of the
        same name, where an earlier revision returned. Both are listed again; a folder that is damaged is damaged then, too.
        """
        found: list[Found] = []
        for folder in folders:
            for _ in range(RESCANS):
                revisions = [self._load(path) for path in _folders(folder)]
                if all(one.entry is not None and one.path.is_dir() for one in revisions):
                    break
            by_key: dict[str, list[Found]] = {}
            for one in revisions:
                by_key.setdefault(one.key, []).append(one)
            found += [max(group, key=_rank) for group in by_key.values()]
        return found

    def _load(self, path: Path) -> Found:
        try:
            return Found(self.name, path, read_entry(path))
        except Damaged as damage:
            return Found(self.name, path, None, str(damage))

    # --- writing -----------------------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> Path:
        """Write an entry, replacing one with the same key. Returns its folder. Raises HostError if the store cannot be written,
        KvgenError for an entry with figures that are not finite.
        """
        contents = entry_files(entry)
        with self._locked():
            return self._put(entry, contents)

    def replace(self, old: Path, entry: Entry) -> Path:
        """Write an entry, replacing the folder `old`. Returns its folder. If `old` no longer exists, another writer replaced it, and
        nothing is written. Raises as `put` does.
        """
        contents = entry_files(entry)
        with self._locked():
            if not old.is_dir():
                return old
            final = self._put(entry, contents)
            if old != final and old.is_dir():
                self._discard(old)
                self._list(old)
            return final

    def require_writable(self) -> None:
        """Raise HostError if the store cannot be written."""
        with self._locked():
            (Path(tempfile.mkdtemp(prefix=STAGING, dir=self.root)) / "room").write_bytes(bytes(4096))
            self._sweep()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's lock, after removing leftovers of killed writers. An OSError within becomes a HostError."""
        from filelock import FileLock

        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / LOCK):
                self._sweep()
                yield
        except OSError as error:
            reason = error.strerror or error
            raise HostError(f"cannot write to the {self.name} registry {self.root}: {reason}", self.root) from error

    def _put(self, entry: Entry, contents: Mapping[str, bytes]) -> Path:
        staged = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.root))
        _write(contents, staged)
        folder = self.root / device_folder(entry.device) / format_folder(entry.spec)
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / folder_name(entry, contents)
        if final.exists() and self._load(final).entry is None:
            self._discard(final)
        if not final.exists():
            staged.chmod(0o755)
            staged.rename(final)
            sync(folder)
        older = [other for other in _folders(folder) if other != final and key_of(other.name) == entry.key]
        for other in older:
            self._discard(other)
        self._sweep()
        self._list(final, *older)
        return final

    def remove(self, found: Found) -> None:
        """Remove an entry. Raises HostError if that fails."""
        with self._locked():
            if found.path.exists():
                self._discard(found.path)
                self._list(found.path)

    def _discard(self, path: Path) -> None:
        """Remove a folder atomically (by renaming it), then delete its files."""
        grave = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.root))
        path.rename(grave / "old")
        shutil.rmtree(grave, ignore_errors=True)

    def _list(self, *changed: Path) -> None:
        """Update the manifest, in a store that has one, for the folders that were written or removed."""
        from kvgen.registry.manifest import MANIFEST, relist

        if (self.root / MANIFEST).exists():
            places = tuple(f"{folder.relative_to(self.root).as_posix()}/" for folder in changed)
            relist(self.root, lambda file: file.startswith(places))

    def _sweep(self) -> None:
        """Remove leftovers of killed writers. The caller holds the lock, so no folder of a living writer is among them."""
        for left in self.root.glob(f"{STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)


def read_entry(path: Path) -> Entry:
    """The entry in a folder. Raises Damaged if it is incomplete, changed, or of another version."""
    with damage_told():
        return Entry.from_parts(*read_parts(path))


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Contents of an entry's `entry.json`, of its sources by name and of its resources, of any schema. Raises Damaged if a
    file was changed or cannot be parsed.
    """
    raw = read_plain(path / ENTRY, MOST_BYTES)
    if not is_name(path.name) or _revision(raw) != revision_of(path.name):
        raise Damaged(f"{ENTRY} was changed after it was written")
    data = parse_json(raw)
    contents = {file: read_plain(child(path, file), MOST_BYTES) for file in _listed(data)}
    for file, expected in data["files"].items():
        if hashlib.sha256(contents[file]).hexdigest() != expected:
            raise Damaged(f"{file} was changed after it was written")
    texts = {file: contents[file].decode() for file in data["sources"]}  # byte for byte: line ends are part of the digest
    return data, texts, parse_json(contents[RESOURCES])


@contextmanager
def damage_told() -> Iterator[None]:
    """Convert exceptions about an entry's contents to Damaged, with the reason."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from error
    except PermissionError as error:
        raise Damaged(f"{Path(error.filename).name} may not be read: {error.strerror}") from error
    except KvgenError as error:
        raise Damaged(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"it cannot be read: {type(error).__name__}: {error}") from error


def _listed(data: Any) -> list[str]:
    """The files beside `entry.json`: its sources and resources, each with a digest, and no other. Raises Damaged."""
    files, suffixes = list(data["files"]), tuple(SUFFIX.values())
    for file in files:
        if not is_name(file) or (file != RESOURCES and not (file.startswith("kernel-") and file.endswith(suffixes))):
            raise Damaged(f"{file!r:.120} is no file of an entry")
    if set(files) != {RESOURCES, *data["sources"]}:
        raise Damaged("its files are not its sources and resources")
    return files


def entry_files(entry: Entry) -> dict[str, bytes]:
    """Contents of an entry's files by name. Raises KvgenError if a figure is not a finite number."""
    files = {file: code.text.encode() for file, code in entry.codes.items()}
    try:
        files[RESOURCES] = _json(entry.resources())
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in sorted(files.items())}
        files[ENTRY] = _json({**entry.to_json(), "files": digests})
    except ValueError as error:
        raise KvgenError(f"the entry {entry.key} cannot be written: {error}") from error
    return files


def folder_name(entry: Entry, contents: Mapping[str, bytes]) -> str:
    """Name of the folder that holds an entry with these files."""
    return entry_folder(entry.key, _revision(contents[ENTRY]))


def _write(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write an entry's files and sync them to disk."""
    for name, content in contents.items():
        with open(child(folder, name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync(folder)


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _revision(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _rank(found: Found) -> tuple[bool, str, str]:
    """Sort key: good before damaged, then newest first."""
    date = str(found.entry.provenance.get("date", "")) if found.entry else ""
    return found.entry is not None, date, found.path.name


def _folders(parent: Path) -> Iterator[Path]:
    """Sorted folders in a folder, without hidden ones; none if it does not exist. Raises HostError if it cannot be listed."""
    try:
        with host_errors("list", parent), os.scandir(parent) as items:
            names = sorted(item.name for item in items if item.is_dir() and not item.name.startswith("."))
    except HostError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return
        raise
    for name in names:
        yield parent / name
