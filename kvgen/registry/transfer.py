"""Exports and imports archives of entries and compiled modules, for machines without a compiler.

An archive contains `entries/` as in a store, `modules/<key>/` as in the artifact cache, and an index (`archive`). The index names, for each
module, the source, the machine that compiled it, and the machine properties that it needs. A machine without the compiler finds a module
by its source. The whole archive is checked before anything of it is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from kvgen.arch import Target
from kvgen.errors import RegistryMiss, ToolchainMissing
from kvgen.files import is_name, read_json
from kvgen.lower.backend import Source
from kvgen.plaindata import Json
from kvgen.registry import archive
from kvgen.registry.device import origin
from kvgen.registry.entry import Damaged, Entry, OtherSchema
from kvgen.registry.gzipped import Refused
from kvgen.registry.paths import device_folder, format_folder, key_of
from kvgen.registry.store import Found, Store, entry_files, folder_name, read_entry
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.cache import Resources
from kvgen.toolchain.compilers import compiler_for, machine

MODULE, RESOURCES = "module.so", "resources.json"
MOST_ORIGIN = 200


@dataclass(frozen=True)
class ArchiveContents(Json):
    """Contents of an archive that was written or read: folders of entries, keys of modules, machines that compiled them, and what was left
    out, with reasons. `sha256` is the archive's digest.
    """

    entries: tuple[Path, ...]
    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    sha256: str = ""


class _Module(NamedTuple):
    """A module of an archive, checked."""

    key: str
    file: Path
    sha256: str
    resources: Resources
    source: str
    target: Target
    machine: str
    origin: str


def export_archive(found: Iterable[Found], file: Path, cache: ArtifactCache) -> ArchiveContents:
    """Write entries with those of their modules that the cache has: of the launches, of the defaults that serve beside them and, for an
    untuned entry, of all compiled schedules of the space. Raises RegistryMiss if there is no good entry, HostError if the file cannot be
    written; the old file then stays.
    """
    every = list(found)
    good = [(one, one.entry) for one in every if one.entry is not None]
    if not good:
        raise RegistryMiss("; ".join(["there is no entry to export", *(f"{one.key} is left out: {one.problem}" for one in every)]))
    members: dict[str, bytes | Path] = {}
    modules: dict[str, dict[str, str]] = {}
    for _, entry in good:
        contents = entry_files(entry)
        folder = f"entries/{device_folder(entry.device)}/{format_folder(entry.spec)}/{folder_name(entry, contents)}"
        members |= {f"{folder}/{name}": content for name, content in contents.items()}
        for source in _sources(entry):
            artifact = _artifact(source, entry, cache)
            if artifact is not None:
                made_on = artifact.origin or origin()
                modules[artifact.id] = {"source": source.id, "target": entry.arch, "machine": machine(entry.arch), "origin": made_on}
                members[f"modules/{artifact.id}/{MODULE}"] = artifact.path
                members[f"modules/{artifact.id}/{RESOURCES}"] = json.dumps(artifact.resources.to_json(), sort_keys=True).encode()
    digest = archive.write(file, members, {"modules": modules})
    damaged = tuple(f"entry {one.key}: {one.problem}" for one in every if one.entry is None)
    return ArchiveContents(tuple(one.path for one, _ in good), tuple(modules), damaged, _origins(modules.values()), digest)


def import_archive(file: Path, store: Store, cache: ArtifactCache, sha256: str | None = None) -> ArchiveContents:
    """Read an archive: entries go into the store, modules that this machine can run into the cache. `sha256` pins the archive.

    An entry replaces one of its key, unless that one is tuned and this one is not, or that one is newer. Raises Refused, with nothing
    taken, for a file that is not a complete archive of kvgen, has another digest than `sha256`, or contains something that no export
    writes; HostError if the disk fails.
    """
    with cache.scratch() as root:
        try:
            index = archive.read(file, root, sha256)
            modules = _modules(root, index)
            entries, foreign = _entries(root, index)
        except Refused as error:
            raise Refused(f"{file} is refused, and nothing of it was taken: {error}") from error
        store.require_writable()
        taken, other = _take_modules(modules, cache)
        paths, kept = _take_entries(entries, store)
        origins = _origins(one._asdict() for one in taken)
        return ArchiveContents(paths, tuple(one.key for one in taken), (*other, *foreign, *kept), origins, index.sha256)


def _origins(modules: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted({str(one["origin"]) for one in modules}))


# --- what is written -------------------------------------------------------------------------------------------------


def _sources(entry: Entry) -> list[Source]:
    """Sources of an entry's launches and of the defaults beside them; of an untuned one, of every schedule of its space."""
    found = [source for code in entry.codes.values() if (source := entry.source(code)) is not None]
    if not entry.timings:
        from kvgen.lower.backend import backends_for, refusal

        for backend in backends_for(entry.arch):
            if refusal(backend, entry.spec, entry.arch) is None:
                schedules = backend.space(entry.spec, entry.arch).schedules()
                found += [backend.lower(entry.spec, schedule, entry.arch) for schedule in schedules]
    return found


def _artifact(source: Source, entry: Entry, cache: ArtifactCache) -> Artifact | None:
    ids = [code.artifact for code in entry.codes.values() if code.artifact and entry.source(code) == source]
    with suppress(ToolchainMissing):
        ids.append(compiler_for(source.language).key(source))
    return next((artifact for key in ids if (artifact := cache.get(key)) is not None), None)


# --- what is read ----------------------------------------------------------------------------------------------------


def _modules(root: Path, index: archive.Index) -> list[_Module]:
    """The modules that the index describes, each with both of its files. Raises Refused."""
    listed = index.facts.get("modules")
    if not isinstance(listed, dict) or not all(isinstance(facts, dict) for facts in listed.values()):
        raise Refused("its index lists no modules")
    expected = {f"modules/{key}/{name}" for key in listed for name in (MODULE, RESOURCES)}
    if expected != {name for name in index.files if name.startswith("modules/")}:
        raise Refused("its modules are not those of its index")
    return [_module(root, key, facts, index) for key, facts in listed.items()]


def _module(root: Path, key: str, facts: Mapping[str, Any], index: archive.Index) -> _Module:
    wrong = [name for name in ("source", "machine") if not is_name(facts.get(name))]
    wrong += [] if facts.get("target") in get_args(Target) else ["target"]
    made_on = facts.get("origin")
    wrong += [] if isinstance(made_on, str) and made_on.isprintable() and len(made_on) <= MOST_ORIGIN else ["origin"]
    if wrong:
        raise Refused(f"module {key}: {facts.get(wrong[0])!r:.120} is no {wrong[0]}")
    folder = root / "modules" / key
    try:
        data = read_json(folder / RESOURCES, archive.MOST_INDEX)
        resources = Resources.from_json(data)
        if resources.to_json() != data:  # a name that is missing would read as none used
            raise ValueError("they are not what an export writes")
        if not all(type(value) is int for used in resources.to_json()["kernels"].values() for value in used.values()):
            raise TypeError("a number of registers or bytes is none")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"module {key}: its resources cannot be read: {type(error).__name__}: {error}") from error
    target: Target = facts["target"]
    digest, _ = index.files[f"modules/{key}/{MODULE}"]
    return _Module(key, folder / MODULE, digest, resources, facts["source"], target, facts["machine"], str(made_on))


def _entries(root: Path, index: archive.Index) -> tuple[list[Entry], tuple[str, ...]]:
    """The entries, and those of other versions of kvgen, which are left out. Raises Refused for one that was changed."""
    entries, foreign = [], []
    names = [name for name in index.files if name.startswith("entries/")]
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        path = root / folder
        try:
            entry = read_entry(path)
        except OtherSchema as other:
            foreign.append(f"entry {path.name}: {other}")
            continue
        except Damaged as damage:
            raise Refused(f"entry {path.name}: {damage}") from damage
        held = {name.rpartition("/")[2] for name in names if name.startswith(f"{folder}/")}
        if held != set(entry_files(entry)) or key_of(path.name) != entry.key:
            raise Refused(f"entry {path.name}: it is not in a folder of its own")
        entries.append(entry)
    return entries, tuple(foreign)


def _take_modules(modules: Iterable[_Module], cache: ArtifactCache) -> tuple[list[_Module], list[str]]:
    taken, refused = [], []
    for one in modules:
        if one.machine != machine(one.target):
            refused.append(f"module {one.key}: it was compiled for another machine ({one.target})")
            continue
        artifact = cache.put(one.key, one.file, one.resources, origin=one.origin)
        if artifact.sha256 == one.sha256:
            cache.name(one.source, one.key, one.machine)
            taken.append(one)
        else:
            refused.append(f"module {one.key}: one of this key and other bytes is here already, and stays")
    return taken, refused


def _take_entries(entries: Iterable[Entry], store: Store) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    taken, kept = [], []
    for entry in entries:
        rivals = [one.entry for one in store.find(entry.spec) if one.entry is not None and one.entry.key == entry.key]
        reason = next((reason for rival in rivals if (reason := _stays(rival, entry)) is not None), None)
        if reason is not None:
            kept.append(f"entry {entry.key}: {reason}")
        else:
            taken.append(store.put(entry))
    return tuple(taken), tuple(kept)


def _stays(present: Entry, entry: Entry) -> str | None:
    """Why an imported entry does not replace the present one of its key; None if it does."""
    if bool(present.timings) != bool(entry.timings):
        return "a tuned one is there" if present.timings else None
    ours, theirs = (str(one.provenance.get("date", "")) for one in (present, entry))
    return f"a newer one is there, of {ours}, and the archive's is of {theirs or 'no date'}" if ours > theirs else None
