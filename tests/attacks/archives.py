"""Archives that are damaged or hostile, none of which may be taken. A damage is a function of (archive, random) that gives other bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from kvgen.errors import HostError, KvgenError
from kvgen.lower import backend as backends
from kvgen.registry import Store, archive
from kvgen.toolchain import ArtifactCache
from kvgen.tune.compile_only import compile_space
from tests.attacks.forging import forged, opened, sealed, with_entry
from tests.support.tuning import FakeBackend, tiny_spec


def tree(root: Path) -> dict[str, str]:
    """Everything below a folder, by path: digests of files; the cache's scratch folder and empty locks apart."""
    found = {}
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root).as_posix()
        if place.startswith(("victim/cache/tmp", "archive.tar.gz")) or path.name == ".lock":
            continue
        found[place] = "link" if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def exported(root: Path) -> bytes:
    """An archive of one entry and its modules."""
    store, cache = Store(root / "registry"), ArtifactCache(root / "cache")
    backends.get_backend = FakeBackend  # type: ignore[assignment]
    backends.backends_for = lambda _: [FakeBackend()]  # type: ignore[assignment, list-item]
    compile_space(tiny_spec(), "cpu", backends=[FakeBackend()], store=store, cache=cache, limit=3)
    sent = archive.export_archive(store.all(), root / "good.tar.gz", cache)
    assert sent.modules
    return (root / "good.tar.gz").read_bytes()


def canaries(root: Path) -> None:
    """Files that hostile names aim at, above and beside the store and the cache."""
    for place in ("evil", "victim/evil", "victim/cache/evil", "victim/cache/modules/evil/x", "victim/registry/evil/x", "etc/evil"):
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        (file / "canary" if place.endswith("/x") else file).parent.mkdir(parents=True, exist_ok=True)
        (file / "canary" if place.endswith("/x") else file).write_text("canary")


def attack(root: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Damage an archive in `count` ways and try to import each below `root`: what was refused, by the damage, and what went wrong."""
    good, rng = exported(root / "sender"), random.Random(seed)
    canaries(root)
    file, refused, failures = root / "archive.tar.gz", Counter[str](), list[str]()
    store, cache = Store(root / "victim" / "registry"), ArtifactCache(root / "victim" / "cache")
    before = tree(root)
    for name in islice(cycle(DAMAGES), count):
        file.write_bytes(DAMAGES[name](good, rng))
        try:
            archive.import_archive(file, store, cache)
            failures.append(f"{name}: it was taken")
        except HostError as error:
            failures.append(f"{name}: called a failure of this machine: {error}")
        except KvgenError as error:
            refused[name] += 1
            if not str(error).rpartition("was taken: ")[2]:
                failures.append(f"{name}: refused without a reason")
        except BaseException as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        after = tree(root)
        if after != before:
            failures.append(f"{name}: it touched {sorted({path for path, _ in before.items() ^ after.items()})[:5]}")
            before = after
    if list((cache.root / "tmp").glob("*")):
        failures.append("something is left in the cache's scratch folder")
    file.write_bytes(good)
    archive.import_archive(file, store, cache)  # and the good one is taken
    return refused, failures


Damage = Callable[[bytes, random.Random], bytes]
NAMES = (
    "../evil", "../../../../etc/evil", "/etc/evil", "entries/../../evil/x/y", "modules/../evil.so", "modules/..", ".", "modules/./x.so",
    "modules//x.so", "modules/a\nb.so", "~/evil", "-rf", "modules/" + "k" * 300 + ".so", "modules/ключ.so", ".git/config", "C:\\evil",
)  # fmt: skip
KINDS = (
    tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE,
)  # fmt: skip


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """One bit of what is compressed, or of the checksum behind it."""
    at = rng.randrange(10, len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def flip_bit_of_a_member(data: bytes, rng: random.Random) -> bytes:
    """One bit of an entry or a module, under a right checksum."""
    index, members = opened(data)
    name = rng.choice(sorted(members))
    content = bytearray(members[name])
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return forged(index, {**members, name: bytes(content)})


def truncate(data: bytes, rng: random.Random) -> bytes:
    """The beginning only, of the file or of the tar in it."""
    tar = gzip.decompress(data)
    end = tar.rstrip(b"\0")
    return rng.choice([data[: rng.randrange(len(data))], sealed(tar[: rng.randrange(len(end))])])


def append(data: bytes, rng: random.Random) -> bytes:
    """Something behind the end: noise, another member of gzip, or more tar."""
    more = forged({}, {"modules/x.so": b"x"})
    return rng.choice([data + rng.randbytes(8), data + gzip.compress(b"more"), data + more, sealed(gzip.decompress(data) + b"more")])


def no_archive(data: bytes, rng: random.Random) -> bytes:
    """Another file, or an archive of another version."""
    index, members = opened(data)
    other = forged({**index, "format": rng.choice([1, 2, 4, "3", None])}, members)
    return rng.choice([b"", rng.randbytes(1000), gzip.compress(rng.randbytes(1000)), other])


def swap(data: bytes, rng: random.Random) -> bytes:
    """Members have each other's contents, lie under others' keys, are described twice or not at all, or are missing."""
    index, members = opened(data)
    one, two = rng.sample([name for name in sorted(members) if name.startswith("modules/")], 2)
    key = one.removeprefix("modules/").removesuffix(".so")
    kind = rng.randrange(4)
    if kind == 0:
        members[one], members[two] = members[two] + b" ", members[one]
    elif kind == 1:
        del index["modules"][key]
    elif kind == 2:
        del members[one]
    else:
        index["modules"]["0" * 16] = index["modules"].pop(key)
    return forged(index, members)


def hostile_member(data: bytes, rng: random.Random) -> bytes:
    """A member whose name leads elsewhere, which is there twice, or is no plain file."""
    index, members = opened(data)
    info = tarfile.TarInfo(rng.choice([*NAMES, *members]))
    if rng.random() < 0.5:
        info = tarfile.TarInfo(f"modules/{rng.randrange(100)}.so")
        info.type, info.linkname = rng.choice(KINDS), rng.choice(["/dev/zero", "../../../../etc/passwd", "index.json"])
    else:
        info.size = 4
    return forged(index, members, [(info, b"evil")])


def hostile_facts(data: bytes, rng: random.Random) -> bytes:
    """What the index says of a module is of another form, or leads elsewhere."""
    index, members = opened(data)
    facts = rng.choice(list(index["modules"].values()))
    hostile: Any = rng.choice(["../evil", "/etc/evil", "", 7, None, [], {"a": 1}, {"seconds": "y"}, "a\nb"])
    where = rng.choice(["source", "machine", "target", "origin", "sha256", "resources"])
    facts[where] = f"{hostile}\n" if where == "origin" and isinstance(hostile, str) else hostile
    others: list[Any] = [{**index, "modules": []}, {**index, "modules": {"a": 3}}, [index], None, 3, {"format": archive.FORMAT}]
    return forged(rng.choice([index, index, *others]), members)


def bomb(data: bytes, rng: random.Random) -> bytes:
    """Sizes and counts beyond all bounds, of what is really there and of what a header says."""
    index, members = opened(data)
    kind = rng.randrange(4)
    if kind == 0:
        return forged(index, members, ((_sized(f"modules/{n}.so", 1 << 24), bytes(1 << 24)) for n in range(6)))
    if kind == 1:
        return forged(index, members, ((_sized(f"modules/{n}.so", 0), b"") for n in range(archive.MOST_MEMBERS + 1)))
    if kind == 2:
        return sealed(_sized("index.json", rng.choice([1 << 32, 1 << 62])).tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * (1 << 27)}):
        pass
    return rng.choice([sealed(file.getvalue()), forged(None, {"index.json": b"[" * 200_000})])


def edit_entry(data: bytes, rng: random.Random) -> bytes:
    """An entry of another form under a right digest, or with other contents under the old one."""
    index, members = opened(data)
    launch: Callable[[dict[str, Any]], Any] = lambda entry: entry["launches"][0]  # noqa: E731
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda entry: launch(entry).update(artifact=rng.choice(["/etc/evil", "../" * 8 + "evil", 5])),
        lambda entry: launch(entry).update(machine=rng.choice(["../evil", 5])),
        lambda entry: launch(entry).update(workloads=rng.choice([["7x7"], 3, None])),
        lambda entry: launch(entry).pop(rng.choice(["backend", "params", "workloads", "fingerprint"])),
        lambda entry: launch(entry).update(params=rng.choice([None, 3, {"a": {}}])),
        lambda entry: entry.update(arch=rng.choice(["../cpu", "", "sm1", None])),
        lambda entry: entry.update(key=rng.choice(["../evil", "0" * 16])),
        lambda entry: entry.update(timings=rng.choice([None, [{"us": float("nan")}], 3])),
        lambda entry: entry.update(spec=rng.choice([None, {}, [], {"name": "x"}])),
        lambda entry: entry.pop(rng.choice(["schema", "key", "spec", "arch", "device", "layout", "layout_id", "launches"])),
        lambda entry: entry["provenance"].update(x=float(rng.choice(["inf", "nan"]))),
    ]
    if rng.random() < 0.7:
        return forged(index, _signed(members, rng.choice(changes)))
    name = next(name for name in members if name.startswith("entries/"))
    entry = json.loads(members[name])
    rng.choice([lambda: entry["device"].update(name="another"), lambda: entry.update(backend="x"), lambda: entry.pop("digest")])()
    return forged(index, {**members, name: json.dumps(entry).encode()})


_EVERY = (
    flip_bit, flip_bit_of_a_member, truncate, append, no_archive, swap, hostile_member, hostile_facts, bomb, edit_entry,
)  # fmt: skip
DAMAGES: dict[str, Damage] = {function.__name__: function for function in _EVERY}


def _sized(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def _signed(members: dict[str, bytes], change: Callable[[dict[str, Any]], Any]) -> dict[str, bytes]:
    """As `with_entry`; what has no digest, for a number that is not finite, is left without a right one."""
    try:
        return with_entry(members, change)
    except ValueError:
        name = next(name for name in members if name.startswith("entries/"))
        entry = json.loads(members[name])
        change(entry)
        return {**members, name: json.dumps(entry).encode()}
