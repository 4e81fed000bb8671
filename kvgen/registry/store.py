"""Stores of entries: one JSON file each, replaced atomically, so that readers never see an incomplete entry.

    <device>/<format>.json                   a second entry of the same name: <format>.<workloads>.json

The folders and names are for people; what an entry is for follows from its contents, and a digest within shows that it was not changed.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvgen._resources import generated
from kvgen.errors import HostError
from kvgen.files import write_whole
from kvgen.registry.entry import Damaged, Entry
from kvgen.spec import AnySpec, LinearSpec, MatrixSpec, QuantSpec

LOCK = ".lock"
MOST_NAME = 200
"""Longest name of an entry's file, without its suffix."""
_KEY = re.compile(rb'"key": "([0-9a-f]{16})"')


def stores() -> list[Store]:
    """The stores in order of precedence: the user's, the site's, the one that ships. Entries tuned on this machine come first."""
    return [user_store(), site_store(), packaged_store()]


def user_store() -> Store:
    """`KVGEN_REGISTRY_DIR`, or kvgen's folder in the user's data folder; `kvgen build` writes to it."""
    from platformdirs import user_data_path

    override = os.environ.get("KVGEN_REGISTRY_DIR")
    return Store(Path(override).absolute() if override else user_data_path("kvgen") / "registry", "user")


def site_store() -> Store:
    """`KVGEN_SITE_DIR`, or kvgen's folder in the site's data folder; shared by a team."""
    from platformdirs import site_data_path

    override = os.environ.get("KVGEN_SITE_DIR")
    return Store(Path(override).absolute() if override else site_data_path("kvgen") / "registry", "site")


def packaged_store() -> Store:
    """The winners that ship with kvgen."""
    return Store(generated(), "packaged")


def find(key: str) -> list[Found]:
    """Entries of all stores whose key begins with `key`."""
    return [found for store in stores() for found in store.all() if found.key.startswith(key)]


class Found(NamedTuple):
    """A file of a store: its entry, or the reason why it has none. `key` is the entry's; of a damaged file what it says, else its name."""

    store: str
    path: Path
    key: str
    entry: Entry | None
    problem: str | None = None

    @property
    def label(self) -> str:
        """Store and key, for messages."""
        return f"{self.store} {self.key}"


class Store:
    """Entries under `root`; `name` is for messages. Readers raise HostError where it cannot be listed, writers where it is not written."""

    def __init__(self, root: Path, name: str = "user") -> None:
        self.root = Path(root)
        self.name = name

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {self.name!r})"

    def find(self, spec: AnySpec) -> list[Found]:
        """The store's entries of the spec's format, for any device and workload, and the damaged ones of its name."""
        found = self._read(format_name(spec))
        return [one for one in found if one.entry is None or one.entry.spec.format_id == spec.format_id]

    def all(self) -> list[Found]:
        """All entries of the store, in the order of paths."""
        return self._read(None)

    def put(self, entry: Entry) -> Path:
        """Write an entry, replacing those with the same key. Returns its file. Raises HostError if the store cannot be written, KvgenError
        for an entry with figures that are not finite.
        """
        text = entry.text()
        with self._locked():
            name = format_name(entry.spec)
            present = [one.path for one in self._read(name) if one.key == entry.key]
            folder = self.root / slug(str(entry.device.get("name", "unknown")))[:MOST_NAME]
            place = next((path for path in present if path.parent == folder), None)
            place = place or next(path for stem in _names(entry, name) if not (path := folder / f"{stem}.json").exists())
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(place, text)
            for path in present:
                if path != place:
                    path.unlink(missing_ok=True)
        return place

    def require_writable(self) -> None:
        """Raise HostError if the store cannot be written."""
        with self._locked(), tempfile.NamedTemporaryFile(dir=self.root) as file:
            file.write(bytes(4096))

    def _read(self, name: str | None) -> list[Found]:
        """The files of a format's name, or all. One that disappears meanwhile was removed."""
        found = []
        for path in (path for device in _listed(self.root) if device.is_dir() for path in _listed(device)):
            if path.suffix == ".json" and name in (None, path.name.partition(".")[0]):
                with suppress(FileNotFoundError):
                    found.append(self._load(path))
        return found

    def _load(self, path: Path) -> Found:
        raw = b""
        try:
            raw = path.read_bytes()
            entry = Entry.of_text(raw)
            return Found(self.name, path, entry.key, entry)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, Damaged) as error:
            key, reason = _KEY.search(raw), error.strerror if isinstance(error, OSError) else error
            problem = str(error) if isinstance(error, Damaged) else f"{path.name} cannot be read: {reason}"
            return Found(self.name, path, key[1].decode() if key else path.stem, None, problem)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's lock. An OSError within becomes a HostError."""
        from filelock import FileLock

        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / LOCK):
                yield
        except OSError as error:
            reason = error.strerror or error
            raise HostError(f"cannot write to the {self.name} registry {self.root}: {reason}", self.root) from error


# --- names ---------------------------------------------------------------------------------------------------------------


def slug(text: str) -> str:
    """Lower-case letters, digits and hyphens only."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def format_name(spec: AnySpec) -> str:
    """Readable name of a format, without dots. Formats that differ in what is rare may share it."""
    if isinstance(spec, MatrixSpec):
        return f"{spec.operation}-{spec.matrix.dtype}-{spec.matrix.bits}{spec.matrix.axis[0]}"
    if isinstance(spec, LinearSpec):
        linear = spec.linear
        also = [part for part, has in {"bias": linear.bias, slug(linear.epilogue): linear.epilogue != "none"}.items() if has]
        code = f"w{linear.bits}{'row' if linear.group == 'row' else f'g{linear.group}'}{'' if linear.zero else 's'}"
        return "-".join(["linear", f"n{linear.n}k{linear.k}", linear.dtype, code, *also])
    attention, cache = spec.attention, spec.cache
    boosted = f"b{spec.key.boosted(attention.head_dim)}" if spec.key.boost.fraction else ""
    parts = [f"q{attention.q_heads}kv{attention.kv_heads}d{attention.head_dim}", attention.dtype]
    parts += [
        f"k{_operand(spec.key, attention.head_dim)}{boosted}",
        f"v{_operand(spec.value, attention.head_dim)}",
        f"page{cache.page}" if cache.page else "contiguous",
    ]
    numbers = {"qlen": attention.q_len - 1 and attention.q_len, "window": attention.window, "softcap": attention.softcap}
    numbers |= {"sink": cache.sink, "local": cache.local, "rollback": cache.rollback}
    parts += [slug(f"{name}{value:g}") for name, value in numbers.items() if value]
    return "-".join([*parts, *(["sinks"] if attention.sinks else []), *(["arrival"] if cache.arrival else [])])


def _operand(quant: QuantSpec, head_dim: int) -> str:
    if not quant.quantized:
        return "16"
    code, symmetric = (f"{quant.bits}", "" if quant.zero else "s") if quant.type == "int" else (quant.type, "")
    rotated = "" if quant.rotate is None else f"r{quant.rotate.channels(head_dim)}{'' if quant.rotate.signs else 'u'}"
    rotated += "c" if quant.rotate is not None and quant.rotate.applied == "caller" else ""
    if quant.static:
        return f"{code}{quant.scale}{rotated}"
    return f"{code}{quant.axis[0]}{quant.group}{symmetric}{rotated}"


def _names(entry: Entry, name: str) -> Iterator[str]:
    """Names for an entry's file, in order of preference: of its format, then with its workloads, then numbered."""
    yield name
    works = [slug(work.key) for work, _ in entry.tuned]
    longer = f"{name}.{'+'.join(works)}"
    longer = longer if len(longer) <= MOST_NAME else f"{name}.{works[0]}+{len(works) - 1}-more"
    yield longer
    yield from (f"{longer}.{number}" for number in itertools.count(2))


def _listed(folder: Path) -> list[Path]:
    """Sorted contents of a folder, without hidden ones; none if it does not exist. Raises HostError if it cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostError(f"cannot list {folder}: {error.strerror or error}", folder) from error
