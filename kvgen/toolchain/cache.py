"""Compiled modules by content: one folder per key, published by a rename, so that no process ever sees an incomplete folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvgen._resources import user_cache
from kvgen.errors import HostError, KvgenError, host_errors
from kvgen.plaindata import Json

MODULE = "module.so"
META = "artifact.json"


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one device kernel; bytes are per thread, `shared_bytes` is static shared memory per block."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0


@dataclass(frozen=True)
class Resources(Json):
    """Compile time and resources of the kernels; `kernels` is empty for the CPU."""

    compiler: str
    seconds: float
    kernels: Mapping[str, KernelResources] = field(default_factory=dict)

    @property
    def spill_bytes(self) -> int:
        """Largest number of bytes of register spills of a kernel."""
        return max((kernel.spill_bytes for kernel in self.kernels.values()), default=0)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled variant: the shared library at `path`; `id` names source, compiler, flags and machine features."""

    id: str
    path: Path
    resources: Resources
    sha256: str = field(default="", compare=False)
    """Digest of the library's bytes, as the cache keeps it."""


class ArtifactCache:
    """Artifacts under `root`. A damaged folder counts as missing. Methods that write raise HostError where the disk does not take it."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(root) if root is not None else user_cache()

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, or None if it is missing or was changed."""
        folder = self._folder(key)
        try:
            meta, sha256 = json.loads((folder / META).read_bytes()), _sha256(folder / MODULE)
            resources = Resources.from_json(meta["resources"])
            return Artifact(key, folder / MODULE, resources, sha256) if sha256 == meta["sha256"] else None
        except PermissionError as error:
            raise HostError(f"cannot read {error.filename}: {error.strerror}", folder) from error
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, module: Path, resources: Resources, extra: Mapping[str, str] | None = None) -> Artifact:
        """Publish a compiled module, with text files by name in `extra` beside it; an existing good one stays."""
        with self.scratch() as folder:
            staged = folder / "entry"
            staged.mkdir()
            shutil.copyfile(module, staged / MODULE)
            meta = {"sha256": _sha256(staged / MODULE), "resources": resources.to_json()}
            for name, text in {**(extra or {}), META: json.dumps(meta, indent=1)}.items():
                (staged / name).write_text(text, encoding="utf-8")
            target = self._folder(key)
            with suppress(FileNotFoundError):  # another process has put one there, whole or damaged
                if (there := self.get(key)) is not None:
                    return there
                target.rename(folder / "damaged")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                staged.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            if (artifact := self.get(key)) is None:
                raise HostError(f"cannot write {target}: it is damaged", target)
            return artifact

    def name(self, source_id: str, key: str, machine: str) -> None:
        """Let a module be found by its source alone on machines like `machine` (`compilers.machine`): its compiler may be missing there."""
        place = self._source(source_id, machine)
        with self.scratch() as scratch:
            place.parent.mkdir(parents=True, exist_ok=True)
            (scratch / "key").write_text(key)
            (scratch / "key").replace(place)

    def named(self, source_id: str, machine: str) -> Artifact | None:
        """The module that `name` assigned to a source on such a machine, or None."""
        try:
            return self.get(self._source(source_id, machine).read_text())
        except (FileNotFoundError, ValueError):  # it is no text
            return None

    def verified(self, artifact: Artifact, use: str) -> bool:
        """Whether `mark_verified` recorded exactly these bytes for this use."""
        try:
            return self._record(artifact, use).read_bytes() == artifact.sha256.encode() != b""
        except FileNotFoundError:
            return False

    def mark_verified(self, artifact: Artifact, use: str) -> None:
        """Record beside a module that its bytes passed verification. `use`: the digest of what that holds for (`Job.use`)."""
        with self.scratch() as folder:
            (folder / "record").write_text(artifact.sha256)
            with suppress(FileNotFoundError):  # the module was removed meanwhile
                (folder / "record").replace(self._record(artifact, use))

    def remove(self, artifact: Artifact) -> None:
        """Remove a module, so that it is compiled again."""
        with self.scratch() as aside, suppress(FileNotFoundError):  # another process removed it
            self._folder(artifact.id).rename(aside / "removed")

    def require_executable(self) -> None:
        """Raise HostError if no module can be loaded from the cache, because its file system is mounted noexec."""
        folder = next(path for path in (self.root.absolute(), *self.root.absolute().parents) if path.exists())
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            why = "is mounted noexec, and no module can be loaded from there: let KVGEN_CACHE_DIR name another folder"
            raise HostError(f"{self.root} {why}", folder)

    def require_writable(self) -> None:
        """Raise HostError if the cache cannot be written."""
        with self.scratch() as folder:
            (folder / "room").write_bytes(bytes(4096))

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Lock a key, so that only one process compiles it. The operating system releases the lock when its holder dies."""
        from filelock import FileLock  # not needed to find a module

        self._folder(key)
        file = self.root / "locks" / f"{key}.lock"
        lock = FileLock(file)
        with host_errors("lock", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder on the cache's own file system, removed afterwards. An OSError within becomes a HostError."""
        parent = self.root / "tmp"
        with host_errors("write", self.root):
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=parent))
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, key: str) -> Path:
        if Path(key).name != key or key in ("", ".."):  # entries name keys, and come from others, too
            raise KvgenError(f"{key!r:.120} is no key of a compiled module")
        return self.root / "modules" / key[:2] / key

    def _record(self, artifact: Artifact, use: str) -> Path:
        return self._folder(artifact.id) / f"verified-{use}"

    def _source(self, source_id: str, machine: str) -> Path:
        return self.root / "sources" / f"{source_id}.{machine}"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
