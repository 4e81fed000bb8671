"""Archives of entries and compiled modules, for machines without a compiler: a tar in gzip.

    index.json          {"format", "modules": {id: source, target, machine, origin, sha256, resources}}
    entries/KEY.json    as in a store
    modules/ID.so       shared libraries, whose ids and sources are those of the artifact cache

The index names, for each module, the source and the machine properties that it needs: a machine without the compiler finds a module by its
source. An archive is read and checked whole before anything of it is taken.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kvgen.arch import Target
from kvgen.errors import KvgenError, RegistryMiss, ToolchainMissing, host_errors
from kvgen.files import NAME, is_name, parse_json, replacing
from kvgen.lower.backend import Source
from kvgen.plaindata import Json, adapter
from kvgen.registry.entry import Damaged, Entry, OtherSchema
from kvgen.registry.store import MOST_BYTES, Found, Store
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.cache import Resources
from kvgen.toolchain.compilers import compiler_for, cpu_name, machine

FORMAT = 3
INDEX = "index.json"
MEMBER = re.compile(rf"index\.json|entries/{NAME.pattern}\.json|modules/{NAME.pattern}\.so")
MOST_MEMBERS, MOST_MODULE = 4_000, 1 << 28
PLAIN_BYTES, MOST_RATIO = 1 << 26, 100
"""An archive that decompresses to more than PLAIN_BYTES may be at most MOST_RATIO times as large as its file."""
MOST_ORIGIN = 200
CHUNK = 1 << 20


class Refused(KvgenError):
    """A file that is not an archive of kvgen, is damaged, or contains something that no export writes."""


@dataclass(frozen=True)
class ArchiveContents(Json):
    """Contents of an archive that was written or read: files of entries, ids of modules, machines that compiled them, and what was left
    out, with reasons. `sha256` is the archive's digest.
    """

    entries: tuple[Path, ...]
    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    sha256: str = ""


@dataclass(frozen=True)
class _Module:
    """What the index says of a module."""

    source: str
    target: Target
    machine: str
    origin: str
    sha256: str
    resources: Resources

    def __post_init__(self) -> None:
        if not is_name(self.source) or not is_name(self.machine):
            raise ValueError("its source and machine are no names")
        if not self.origin.isprintable() or len(self.origin) > MOST_ORIGIN:
            raise ValueError("its origin is no line of text")


# --- writing -------------------------------------------------------------------------------------------------------------


def export_archive(found: Iterable[Found], file: Path, cache: ArtifactCache) -> ArchiveContents:
    """Write entries with those of their modules that the cache has: of the launches and, for an untuned entry, of all compiled schedules of
    the space. Raises RegistryMiss if there is no good entry, HostError if the file cannot be written; the old file then stays.
    """
    every = list(found)
    good = [(one, one.entry) for one in every if one.entry is not None]
    damaged = tuple(f"entry {one.key}: {one.problem}" for one in every if one.entry is None)
    if not good:
        raise RegistryMiss("; ".join(["there is no entry to export", *damaged]))
    members: dict[str, bytes | Path] = {}
    modules: dict[str, _Module] = {}
    for _, entry in good:
        members[f"entries/{entry.key}.json"] = entry.text().encode()
        for source, artifact in _compiled(entry, cache):
            made_on = artifact.origin or origin()
            modules[artifact.id] = _Module(source.id, entry.arch, machine(entry.arch), made_on, artifact.sha256, artifact.resources)
            members[f"modules/{artifact.id}.so"] = artifact.path
    index = {"format": FORMAT, "modules": adapter(dict[str, _Module]).dump_python(modules, mode="json")}
    members = {INDEX: json.dumps(index, indent=1).encode(), **members}
    if file.exists() and not file.is_file():
        raise KvgenError(f"cannot write {file}: it is no plain file")
    with host_errors("write", file), replacing(file) as opened:
        packed = gzip.GzipFile("", "wb", fileobj=opened, mtime=0)
        with packed, tarfile.open(fileobj=packed, mode="w") as tar:
            for name, content in members.items():
                data = content if isinstance(content, bytes) else content.read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    origins = tuple(sorted({one.origin for one in modules.values()}))
    return ArchiveContents(tuple(one.path for one, _ in good), tuple(modules), damaged, origins, _sha256(file))


def origin() -> str:
    """A description of this machine, stored with modules that are exported."""
    from kvgen import __version__

    return f"{cpu_name()} ({platform.machine()}, kvgen {__version__})"


def _compiled(entry: Entry, cache: ArtifactCache) -> Iterator[tuple[Source, Artifact]]:
    """The entry's modules that the cache has, with their sources."""
    sources = list(entry.sources)
    if not entry.timings:
        from kvgen.lower.backend import backends_for, refusal

        for backend in backends_for(entry.arch):
            if refusal(backend, entry.spec, entry.arch) is None:
                schedules = backend.space(entry.spec, entry.arch).schedules()
                sources += [backend.lower(entry.spec, schedule, entry.arch) for schedule in schedules]
    recorded = {launch.fingerprint: launch.artifact for launch in entry.launches}
    for source in sources:
        ids = [recorded.get(source.fingerprint)]
        with suppress(ToolchainMissing):
            ids.append(compiler_for(source.language).key(source))
        artifact = next((artifact for key in ids if key is not None and (artifact := cache.get(key)) is not None), None)
        if artifact is not None:
            yield source, artifact


# --- reading -------------------------------------------------------------------------------------------------------------


def import_archive(file: Path, store: Store, cache: ArtifactCache, sha256: str | None = None) -> ArchiveContents:
    """Read an archive: entries go into the store, modules that this machine can run into the cache. `sha256` pins the archive.

    An entry replaces one of its key, unless that one is tuned and this one is not, or that one is newer. Raises Refused, with nothing
    taken, for a file that is not a complete archive of kvgen, has another digest than `sha256`, or contains something that no export
    writes; HostError if the disk fails.
    """
    with cache.scratch() as folder:
        try:
            with host_errors("read", file):
                if file.exists() and not file.is_file():
                    raise Refused("it is no plain file")
                found = _sha256(file)
                if sha256 is not None and found != sha256:
                    raise Refused(f"its sha256 is {found}, not {sha256}")
                names = _unpack(file, folder)
            modules = _modules(folder, names)
            entries, left_out = _entries(folder, names)
        except Refused as error:
            raise Refused(f"{file} is refused, and nothing of it was taken: {error}") from error
        store.require_writable()
        taken: list[str] = []
        for key, one in modules.items():
            if one.machine != machine(one.target):
                left_out.append(f"module {key}: it was compiled for another machine ({one.target})")
            elif cache.put(key, folder / "modules" / f"{key}.so", one.resources, origin=one.origin).sha256 != one.sha256:
                left_out.append(f"module {key}: one of this key and other bytes is here already, and stays")
            else:
                cache.name(one.source, key, one.machine)
                taken.append(key)
        paths: list[Path] = []
        for entry in entries:
            if (reason := _stays(store, entry)) is not None:
                left_out.append(f"entry {entry.key}: {reason}")
            else:
                paths.append(store.put(entry))
        return ArchiveContents(tuple(paths), tuple(taken), tuple(left_out), tuple(sorted({modules[key].origin for key in taken})), found)


def _unpack(file: Path, folder: Path) -> set[str]:
    """Write the members of an archive below a folder. Returns their names. Raises Refused for anything that no export writes."""
    plain, left = folder / "archive.tar", max(PLAIN_BYTES, MOST_RATIO * file.stat().st_size)
    names: set[str] = set()
    try:
        with file.open("rb") as opened, gzip.GzipFile(fileobj=opened) as packed, plain.open("wb") as unpacked:
            while data := packed.read(CHUNK):
                left -= len(data)
                if left < 0:
                    raise Refused("it decompresses to too many bytes")
                unpacked.write(data)
        with plain.open("rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                if not member.isreg() or not MEMBER.fullmatch(member.name):
                    raise Refused(f"{member.name!r:.120} is no plain file of an entry or a module")
                if member.name in names or len(names) >= MOST_MEMBERS:
                    raise Refused(f"{member.name} is there twice" if member.name in names else "it has too many members")
                if member.size > (MOST_MODULE if member.name.endswith(".so") else MOST_BYTES):
                    raise Refused(f"{member.name} has {member.size} bytes")
                names.add(member.name)
                tar.extract(member, folder, filter="data")
            opened.seek(tar.offset)
            while rest := opened.read(CHUNK):
                if rest.strip(b"\0"):
                    raise Refused("there is more behind its end")
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        raise Refused(f"it is damaged: {error or type(error).__name__}") from error
    return names


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        sha = hashlib.sha256()
        while data := opened.read(CHUNK):
            sha.update(data)
        return sha.hexdigest()


def _modules(folder: Path, names: set[str]) -> dict[str, _Module]:
    """The modules that the index describes, whose files are all there. Raises Refused."""
    if INDEX not in names:
        raise Refused("it has no index")
    try:
        index = parse_json((folder / INDEX).read_bytes())
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise Refused(f"its index is none of format {FORMAT}: export it again with this kvgen")
        modules: dict[str, _Module] = adapter(dict[str, _Module]).validate_python(index.get("modules"))
    except (ValidationError, ValueError) as error:
        raise Refused(f"its index cannot be read: {' '.join(str(error).split()):.300}") from error
    if {f"modules/{key}.so" for key in modules} != {name for name in names if name.startswith("modules/")}:
        raise Refused("its modules are not those of its index")
    for key, module in modules.items():
        if _sha256(folder / "modules" / f"{key}.so") != module.sha256:
            raise Refused(f"module {key} is not what its index says: another digest")
    return modules


def _entries(folder: Path, names: set[str]) -> tuple[list[Entry], list[str]]:
    """The entries, and those of other versions of kvgen, which are left out. Raises Refused for one that was changed."""
    entries, foreign = [], []
    for name in sorted(name for name in names if name.startswith("entries/")):
        try:
            entries.append(Entry.of_text((folder / name).read_bytes()))
        except OtherSchema as other:  # noqa: PERF203 - the others are read
            foreign.append(f"{name}: {other}")
        except Damaged as damage:
            raise Refused(f"{name}: {damage}") from damage
    return entries, foreign


def _stays(store: Store, entry: Entry) -> str | None:
    """Why an imported entry does not replace the one of its key in the store; None if it does."""
    for present in (one.entry for one in store.find(entry.spec) if one.entry is not None and one.entry.key == entry.key):
        ours, theirs = (str(one.provenance.get("date", "")) for one in (present, entry))
        if present.timings and not entry.timings:
            return "a tuned one is there"
        if bool(present.timings) == bool(entry.timings) and ours > theirs:
            return f"a newer one is there, of {ours}, and the archive's is of {theirs or 'no date'}"
    return None
