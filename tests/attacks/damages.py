"""Ways to damage an archive. Each is a name and a function of (archive, random) that gives other bytes, all of which are to be refused."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import zlib
from collections.abc import Callable
from typing import Any

from kvgen.registry import archive as limits
from kvgen.registry.archive import INDEX
from kvgen.registry.gzipped import START, comment
from kvgen.registry.ustar import BLOCK, header, padding
from tests.attacks.forging import entry_folder, forged, listing, opened, plain, sealed, with_entry

Damage = Callable[[bytes, random.Random], bytes]
NAMES = (
    "../evil", "../../../../etc/evil", "/etc/evil", "entries/../../evil/x/y", "modules/../evil/module.so", "modules/..", "", ".",
    "modules/./module.so", "modules//module.so", "modules/a\x00b/module.so", "modules/a\nb/module.so", "~/evil", "-rf",
    "modules/" + "k" * 300 + "/module.so", "modules/ключ/module.so", "entries/a/b/c/../../../../evil", ".git/config", "C:\\evil",
)  # fmt: skip
FLAGS = (
    "-wrapper", "sh,-c,touch canary", "-fplugin=/tmp/evil.so", "-B/tmp", "@/etc/passwd", "-include/etc/passwd", "-I/", "-o/tmp/evil",
    "-Xlinker", "-Wl,-rpath,/tmp", "-L/tmp", "-lm", "-specs=/tmp/evil", "--options-file", "-ccbin=/tmp/evil", "-DX=1", "-fopenmp ", "",
)  # fmt: skip
KINDS = (
    tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CONTTYPE,
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.AREGTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """One bit, anywhere in the file: header, body or trailer."""
    region = rng.choice([(0, len(START)), (len(START), len(START) + len(comment("0" * 64))), (100, len(data)), (len(data) - 8, len(data))])
    at = rng.randrange(*region)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def flip_bit_resealed(data: bytes, rng: random.Random) -> bytes:
    """One bit of the tar within, under a right outer digest and checksum."""
    tar = bytearray(zlib.decompress(data[data.index(b"\0", len(START)) + 1 : -8], -zlib.MAX_WBITS))
    at = rng.randrange(len(tar))
    tar[at] ^= 1 << rng.randrange(8)
    return sealed([bytes(tar)])


def truncate(data: bytes, rng: random.Random) -> bytes:
    """The beginning only."""
    return data[: rng.choice([0, 1, 9, 10, len(data) - 1, len(data) - 8, rng.randrange(len(data))])]


def truncate_tar(data: bytes, rng: random.Random) -> bytes:
    """The beginning of the tar only, in a whole container."""
    tar = zlib.decompress(data[data.index(b"\0", len(START)) + 1 : -8], -zlib.MAX_WBITS)
    return sealed([tar[: rng.randrange(len(tar))]])


def append(data: bytes, rng: random.Random) -> bytes:
    """Something behind the end: zeros, noise, another member of gzip, or more tar."""
    tar = zlib.decompress(data[data.index(b"\0", len(START)) + 1 : -8], -zlib.MAX_WBITS)
    tail = rng.choice([b"\0", b"\0" * 512, rng.randbytes(8), gzip.compress(b"more"), data])
    return rng.choice([data + tail, sealed([tar, bytes(BLOCK)]), sealed([tar, plain("modules/x/module.so", b"x")])])


def noise(data: bytes, rng: random.Random) -> bytes:
    """A run of random bytes somewhere."""
    at, length = rng.randrange(len(data)), rng.randrange(1, 200)
    return data[:at] + rng.randbytes(length) + data[at + length :] + b"!"


def old_format(data: bytes, rng: random.Random) -> bytes:
    """As older versions wrote it, or one of a version to come."""
    if rng.random() < 0.5:
        return data.replace(b"kvgen archive 2 ", b"kvgen archive 3 ", 1)
    index, members = opened(data)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in {**members, INDEX: json.dumps({**index, "format": 1}).encode()}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def swap_contents(data: bytes, rng: random.Random) -> bytes:
    """Two members have each other's contents, by an index that says otherwise."""
    index, members = opened(data)
    one, two = rng.sample(sorted(members), 2)
    if members[one] == members[two]:
        members[two] += b" "
    return forged(index, {**members, one: members[two], two: members[one]}, relist=False)


def swap_modules(data: bytes, rng: random.Random) -> bytes:
    """A module is missing, is described twice, or lies under another's key."""
    index, members = opened(data)
    key = rng.choice(sorted(index["modules"]))
    kind = rng.randrange(3)
    if kind == 0:
        del index["modules"][key]
    elif kind == 1:
        del members[f"modules/{key}/{rng.choice(['module.so', 'resources.json'])}"]
    else:
        index["modules"]["0" * 16] = index["modules"].pop(key)
    return forged(index, members)


def reorder(data: bytes, rng: random.Random) -> bytes:
    """Members out of order, twice, missing, or the index last."""
    index, members = opened(data)
    head = plain(INDEX, json.dumps({**index, "files": listing(members)}).encode())
    body = [plain(name, content) for name, content in sorted(members.items())]
    one = rng.randrange(len(body))
    changed = rng.choice(
        [[*body, head], [head, *body[::-1]], [head, body[one], *body], [head, *body[:one], *body[one + 1 :]], [head, head, *body]]
    )
    return sealed([*changed, bytes(2 * BLOCK)])


def name_of_member(data: bytes, rng: random.Random) -> bytes:
    """A member whose name leads elsewhere; in the index and out of it."""
    index, members = opened(data)
    name, content = rng.choice(NAMES), b"evil"
    members = dict(members)
    listed = {**listing(members), name: listing({name: content})[name]}
    said = json.dumps({**index, "files": dict(sorted(listed.items()))}).encode()
    tar = [_raw(member, tarfile.REGTYPE, body) for member, body in sorted({**members, name: content}.items())]
    return sealed([plain(INDEX, said), *tar, bytes(2 * BLOCK)])


def name_of_module(data: bytes, rng: random.Random) -> bytes:
    """A module's key, source or machine that leads elsewhere, or is no name at all."""
    index, members = opened(data)
    key = rng.choice(sorted(index["modules"]))
    hostile: Any = rng.choice([*NAMES, 7, None, [], {"a": 1}])
    where = rng.choice(["source", "machine", "target", "origin", "key"])
    if where == "key":
        hostile = str(hostile)
        for name in [name for name in members if name.startswith(f"modules/{key}/")]:
            members[f"modules/{hostile}/{name.rpartition('/')[2]}"] = members.pop(name)
        index["modules"][hostile] = index["modules"].pop(key)
        body = [_raw(name, tarfile.REGTYPE, content) for name, content in sorted(members.items())]
        head = plain(INDEX, json.dumps({**index, "files": listing(members)}).encode())
        return sealed([head, *body, bytes(2 * BLOCK)])
    index["modules"][key][where] = f"{hostile}\n" if where == "origin" and isinstance(hostile, str) else hostile
    return forged(index, members)


def other_kind(data: bytes, rng: random.Random) -> bytes:
    """A member that is no plain file: a link to /dev/zero, a device, a folder, a sparse or an extended one."""
    index, members = opened(data)
    kind, victim = rng.choice(KINDS), rng.choice(sorted(members))
    link = rng.choice(["/dev/zero", "../../../../etc/passwd", victim])
    head = plain(INDEX, json.dumps({**index, "files": listing(members)}).encode())
    body = [_raw(name, kind if name == victim else tarfile.REGTYPE, content, link) for name, content in sorted(members.items())]
    return sealed([head, *body, bytes(2 * BLOCK)])


def bomb(data: bytes, rng: random.Random) -> bytes:
    """Sizes beyond all bounds: in the index, in a header, of the index itself, and of what is really there."""
    index, members = opened(data)
    name = f"modules/{next(iter(sorted(index['modules'])))}/module.so"
    listed = listing(members)
    kind = rng.randrange(6)
    if kind == 0:
        listed[name]["bytes"] = rng.choice([limits.MOST_MEMBER + 1, 1 << 62, -1, 1.5, "9", None, True, 10**400])
    elif kind == 1:
        listed |= {f"modules/{n:016x}/module.so": {"sha256": "0" * 64, "bytes": limits.MOST_MEMBER} for n in range(40)}
    elif kind == 2:
        listed |= {f"modules/{n:016x}/module.so": {"sha256": "0" * 64, "bytes": 0} for n in range(limits.MOST_MEMBERS)}
    elif kind == 3:
        return sealed([header(INDEX, 1 << 32), *(bytes(1 << 20) for _ in range(20))])
    elif kind == 4:
        return sealed([plain(INDEX, b"[" * 200_000), bytes(2 * BLOCK)])
    else:  # what is there is more than the index says
        said = plain(INDEX, json.dumps({**index, "files": listed}).encode())
        return sealed([said, *(bytes(1 << 20) for _ in range(64))])
    return sealed([plain(INDEX, json.dumps({**index, "files": dict(sorted(listed.items()))}).encode()), bytes(2 * BLOCK)])


def edit_index(data: bytes, rng: random.Random) -> bytes:
    """An index of another form."""
    index, members = opened(data)
    changed: Any = rng.choice([
        {**index, "format": 1}, {**index, "format": "2"}, {**index, "modules": []}, {**index, "modules": {"a": 3}}, [index], None, 3,
        {k: v for k, v in index.items() if k != "modules"}, {**index, "files": []}, {**index, "files": {"a": None}}, {**index, "files": {}},
        {**index, "files": {**listing(members), "index.json": {"sha256": "", "bytes": 0}}},
    ])  # fmt: skip
    body = [plain(name, content) for name, content in sorted(members.items())]
    return sealed([plain(INDEX, json.dumps(changed).encode()), *body, bytes(2 * BLOCK)])


def edit_resources(data: bytes, rng: random.Random) -> bytes:
    """A module's resources of another form, digests made right."""
    index, members = opened(data)
    name = next(name for name in sorted(members) if name.startswith("modules/") and name.endswith("resources.json"))
    kernels: list[Any] = [{"a": {"evil": 1}}, {"a": {"registers": "$(reboot)"}}, {"a": 3}, 3]
    words: list[Any] = [[], None, {}, *({"compiler": "x", "seconds": 1, "kernels": kernel} for kernel in kernels)]
    words.append({"compiler": "x", "seconds": "y", "kernels": {}})
    contents = [
        *(json.dumps(word).encode() for word in words),
        b"{",
        b"\xff\xfe",
        b'{"seconds": NaN, "compiler": "", "kernels": {}}',
        b"[" * 100_000,
    ]
    return forged(index, {**members, name: rng.choice(contents)})


def edit_entry(data: bytes, rng: random.Random) -> bytes:
    """A hostile entry under digests and a folder name that are right."""
    index, members = opened(data)
    hostile = rng.choice([name for name in NAMES if name])
    sources = lambda entry: next(iter(entry["sources"].values()))  # noqa: E731
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda entry: sources(entry)["flags"].append(rng.choice(FLAGS)),
        lambda entry: sources(entry).update(flags=[rng.choice(FLAGS), rng.choice(FLAGS)]),
        lambda entry: sources(entry)["headers"].append(rng.choice(["../../../../dev/zero", "/dev/zero", "@os.path/x", "@../x", hostile])),
        lambda entry: sources(entry)["include"].append(rng.choice(["/", "..", "../..", "@os/../..", hostile])),
        lambda entry: sources(entry).update(language=rng.choice(["sh", "", None, "../c++"])),
        lambda entry: sources(entry).update(artifact=rng.choice([hostile, "../" * 8 + "evil", 5])),
        lambda entry: entry["files"].update({hostile: "0" * 64}),
        lambda entry: entry["sources"].update({hostile: sources(entry)}),
        lambda entry: entry.update(files={}),
        lambda entry: entry["schedule"]["launches"][0].update(source=hostile),
        lambda entry: entry.update(arch=rng.choice(["../cpu", "", "sm1", None])),
        lambda entry: entry.update(key=rng.choice([hostile, "0" * 16])),
        lambda entry: entry.update(timings=rng.choice([None, [{"us": float("nan")}], 3])),
        lambda entry: entry.update(spec=rng.choice([None, {}, [], {"name": "x"}])),
        lambda entry: entry.pop(
            rng.choice(sorted(set(entry) - {"cache", "dispatch"}))
        ),  # without these it is a good one: they are null here
        lambda entry: entry["provenance"].update(x=float(rng.choice(["inf", "nan"]))),
    ]
    return forged(index, with_entry(members, rng.choice(changes)))


def beside_entry(data: bytes, rng: random.Random) -> bytes:
    """A file in an entry's folder that is none of its own, or an entry under another's name."""
    index, members = opened(data)
    folder = entry_folder(members)
    if rng.random() < 0.5:
        return forged(index, {**members, f"{folder}/{rng.choice(['extra.so', 'kernel-0.cpp', 'setup.py'])}": b"evil"})
    other = folder.replace("." + folder.rpartition(".")[2], ".00000000")
    return forged(index, {name.replace(folder, other): content for name, content in members.items()})


_EVERY = (
    flip_bit, flip_bit_resealed, truncate, truncate_tar, append, noise, old_format, swap_contents, swap_modules, reorder,
    name_of_member, name_of_module, other_kind, bomb, edit_index, edit_resources, edit_entry, beside_entry,
)  # fmt: skip
DAMAGES: dict[str, Damage] = {function.__name__: function for function in _EVERY}


def _raw(name: str, kind: bytes, content: bytes, link: str = "") -> bytes:
    """A member of any kind and name, as other tars write it."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    info.size = len(content) if kind != tarfile.DIRTYPE else 0
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + content[: info.size] + bytes(padding(info.size))
