"""Entries and compiled modules in one file, for machines without a compiler.

An archive (tar, gzip) holds `entries/` as a store has them, `modules/<key>/` as the artifact cache has them, and `index.json`.
The index says which source each module was compiled from and what it needs of the machine that runs it; a module is found by
its source where the compiler that would name it is missing.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvgen.errors import KvgenError, RegistryMiss, ToolchainMissing
from kvgen.lower.base import Source
from kvgen.registry.device import machine
from kvgen.registry.entry import Damaged, Entry
from kvgen.registry.store import Found, Store, read_entry
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.artifact import Resources
from kvgen.toolchain.compilers import compiler_for

INDEX = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class Carried:
    """What an archive held: folders of entries, keys of modules, and what was left out with its reason."""

    entries: tuple[Path, ...]
    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"entries": [str(path) for path in self.entries], "modules": list(self.modules), "left_out": list(self.left_out)}


def export(found: Iterable[Found], file: Path, cache: ArtifactCache) -> Carried:
    """Write entries with every module of theirs that the cache has: the launches', and where nothing was tuned yet all points
    of the space that were compiled. Raises RegistryMiss where there is no whole entry.
    """
    good = [one for one in found if one.entry is not None]
    if not good:
        raise RegistryMiss("there is no entry to export")
    modules: dict[str, tuple[Artifact, dict[str, str]]] = {}
    for one in good:
        assert one.entry is not None
        for source in _sources(one.entry):
            artifact = _artifact(source, one.entry, cache)
            if artifact is not None:
                modules[artifact.id] = artifact, {"source": source.id, "target": one.entry.arch, "machine": machine(one.entry.arch)}
    with tarfile.open(file, "w:gz") as archive:
        for one in good:
            archive.add(one.path, PurePosixPath("entries", *one.path.parts[-3:]).as_posix())
        for key, (artifact, _) in modules.items():
            archive.add(artifact.path, f"modules/{key}/module.so")
            _add_text(archive, f"modules/{key}/resources.json", artifact.resources.to_json())
        _add_text(archive, INDEX, {"format": FORMAT, "modules": {key: facts for key, (_, facts) in modules.items()}})
    return Carried(tuple(one.path for one in good), tuple(modules))


def load(file: Path, store: Store, cache: ArtifactCache) -> Carried:
    """Take an archive in: entries into the store, modules that this machine can run into the cache.

    An entry does not replace a tuned one of its key. Raises KvgenError for a file that is no archive of kvgen.
    """
    with tempfile.TemporaryDirectory(prefix="kvgen-import-") as scratch:
        root = Path(scratch)
        try:
            with tarfile.open(file, "r:gz") as archive:
                archive.extractall(root, filter="data")
            index = json.loads((root / INDEX).read_text())
            if index["format"] != FORMAT:
                raise KvgenError(f"{file} has format {index['format']}, and this kvgen reads {FORMAT}")
            modules, refused = _take_modules(root, index["modules"], cache)
        except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise KvgenError(f"{file} is no archive of kvgen: {error}") from error
        entries, kept = _take_entries(root, store)
        return Carried(entries, modules, (*refused, *kept))


def _sources(entry: Entry) -> list[Source]:
    """Sources of an entry's launches; of an untuned one, of every point of its space."""
    found = [source for code in entry.codes.values() if (source := code.source(entry.arch)) is not None]
    if not entry.timings:
        from kvgen.lower.backends import backends_for

        for backend in backends_for(entry.arch):
            if backend.unsupported(entry.spec, entry.arch) is None:
                points = backend.space(entry.spec, entry.arch).points()
                found += [backend.lower(entry.spec, schedule, entry.arch) for schedule in points]
    return found


def _artifact(source: Source, entry: Entry, cache: ArtifactCache) -> Artifact | None:
    ids = [code.artifact for code in entry.codes.values() if code.artifact and code.source(entry.arch) == source]
    with suppress(ToolchainMissing):
        ids.append(compiler_for(source.language).key(source))
    return next((artifact for key in ids if (artifact := cache.get(key)) is not None), None)


def _take_modules(root: Path, listed: dict[str, dict[str, str]], cache: ArtifactCache) -> tuple[tuple[str, ...], tuple[str, ...]]:
    taken, refused = [], []
    for key, facts in listed.items():
        target: Any = facts["target"]
        if facts["machine"] != machine(target):
            refused.append(f"module {key}: it was compiled for another machine ({target})")
            continue
        folder = root / "modules" / key
        resources = Resources.from_json(json.loads((folder / "resources.json").read_text()))
        cache.put(key, folder / "module.so", resources)
        cache.name(facts["source"], key)
        taken.append(key)
    return tuple(taken), tuple(refused)


def _take_entries(root: Path, store: Store) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    taken, kept = [], []
    for path in sorted((root / "entries").glob("*/*/*")):
        try:
            entry = read_entry(path)
        except Damaged as damage:
            kept.append(f"entry {path.name}: {damage}")
            continue
        rivals = [one.entry for one in store.find(entry.spec) if one.entry is not None and one.entry.key == entry.key]
        if any(rival.timings for rival in rivals) and not entry.timings:
            kept.append(f"entry {entry.key}: a tuned one is there")
        else:
            taken.append(store.put(entry))
    return tuple(taken), tuple(kept)


def _add_text(archive: tarfile.TarFile, name: str, data: Any) -> None:
    content = (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))
