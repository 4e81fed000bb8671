"""Compiled modules by content: one folder per key, published by a rename, so that no process ever sees half an entry."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvgen._resources import user_cache
from kvgen.toolchain.artifact import Artifact, Resources

MODULE = "module.so"
META = "artifact.json"


def default_root() -> Path:
    """`KVGEN_CACHE_DIR`, or kvgen's folder in the user's cache."""
    return user_cache()


class ArtifactCache:
    """Artifacts under `root`. A damaged entry is a miss; any process may be killed at any time and leaves nothing that stays."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()
        self._swept = False

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, or None where it is absent or not what was written."""
        folder = self._folder(key)
        try:
            meta = json.loads((folder / META).read_text())
            module = folder / MODULE
            if _sha256(module) != meta["sha256"]:
                return None
            return Artifact(key, module, Resources.from_json(meta["resources"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, key: str, module: Path, resources: Resources, extra: dict[str, str] | None = None) -> Artifact:
        """Publish a compiled module, with text files by name in `extra` beside it; an entry that is there and whole stays."""
        with self.scratch() as folder:
            staged = folder / "entry"
            staged.mkdir()
            shutil.copyfile(module, staged / MODULE)
            for name, text in (extra or {}).items():
                (staged / name).write_text(text)
            meta = {"sha256": _sha256(staged / MODULE), "resources": resources.to_json()}
            (staged / META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
            for file in staged.iterdir():
                sync(file)
            return self._publish(key, staged)

    def name(self, source_id: str, key: str) -> None:
        """Let a module be found by its source alone: it was compiled elsewhere, and the compiler that names it may be missing."""
        folder = self.root / "sources"
        folder.mkdir(parents=True, exist_ok=True)
        with self.scratch() as scratch:
            (scratch / "key").write_text(key)
            (scratch / "key").replace(folder / source_id)

    def named(self, source_id: str) -> Artifact | None:
        """The module that `name` gave to a source, or None."""
        try:
            return self.get((self.root / "sources" / source_id).read_text())
        except OSError:
            return None

    def _publish(self, key: str, staged: Path) -> Artifact:
        target = self._folder(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(8):
            with suppress(OSError):
                staged.rename(target)
                sync(target.parent)
            artifact = self.get(key)
            if artifact is not None:
                return artifact
            with self.scratch() as aside, suppress(OSError):  # damaged: move it away, then try again
                target.rename(aside / "damaged")
        raise OSError(f"cannot write {target}")

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Only one process at a time compiles a key; the lock's file goes with the last holder."""
        from filelock import FileLock  # not needed to find a module

        file = self.root / "locks" / f"{key}.lock"
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file):
            try:
                yield
            finally:
                file.unlink(missing_ok=True)  # filelock retries on a file that was unlinked while it waited

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder on the cache's own file system; gone afterwards, or swept later if this process is killed."""
        parent = self.root / "tmp"
        parent.mkdir(parents=True, exist_ok=True)
        self._sweep_once()
        folder = Path(tempfile.mkdtemp(prefix=f"{_owner(os.getpid())}-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what processes of this machine left that are no longer alive."""
        from filelock import FileLock, Timeout

        for folder in (self.root / "tmp").glob(f"{socket.gethostname()}+*"):
            with suppress(ValueError, IndexError):
                pid = int(folder.name.split("+")[1])
                if not folder.name.startswith(f"{_owner(pid)}-"):
                    shutil.rmtree(folder, ignore_errors=True)
        for file in (self.root / "locks").glob("*.lock"):
            with suppress(Timeout, OSError), FileLock(file, timeout=0):
                file.unlink(missing_ok=True)

    def _sweep_once(self) -> None:
        if not self._swept:
            self._swept = True
            self.sweep()

    def _folder(self, key: str) -> Path:
        return self.root / "modules" / key[:2] / key


def _owner(pid: int) -> str:
    """Host, process and its start time: a reused process id is another owner."""
    try:
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start = "gone"
    return f"{socket.gethostname()}+{pid}+{start}"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sync(path: Path) -> None:
    """Make a file or folder last beyond a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
