"""Specs written to crash, stall or bloat what reads them, each with a name; every one is malformed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvgen.spec.load import MAX_TEXT

GOOD = """\
name: good
attention: {q_heads: 4, kv_heads: 2, head_dim: 64}
key: {bits: 4, axis: channel, group: 32}
value: {bits: 4, axis: token, group: 64}
"""
DATA: dict[str, Any] = {
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
    "key": {"bits": 4, "axis": "channel", "group": 32},
    "value": {"bits": 4, "axis": "token", "group": 64},
}
HUGE = 10**6000
NINES = "9" * 6000

REPEATED = [
    "[", "{", "[1,", "[[],", "{a: ", "{? ", "[? ", "? ", "- ", "- - ", "? [", "- ? ", "- {", "- [\n", ",", "]", "}",
    "&a ", "&a [", "*a ", "*a\n", "!a ", "!!map ", "!!python/name:os ", "a: &a\n",
    "%A\n", "%TAG !a! b\n", "%YAML 1.1\n", "---\n", "--- a\n", "...\n",
    "a\n", "a b\n", "a:\n", "a: [\n", "a: 1\n", "a: ", ": ", ":", "1:", "1:1.", "9", "0x9", "1_", "-", "+", ".",
    "~", "~: ~\n", "<<: ", "=", "@", "`",
    "'", '"', "''", '"\\"', "\\", "a: |\n", "a: >\n\n", "|\n", ">\n ", "#\n", "# \n", "\n", " ", "\t", " \n",
    "\x00", "\x85", "\u2028", "\ufeff", "\ud800", "\U0001f600", "é",
]  # fmt: skip
"""Pieces that fill a text of the largest size, alone, in a value and in a list."""
NOT_LENGTHS = [
    NINES, "-" + NINES, "0x" + NINES, "0b" + "1" * 6000, "0" + "7" * 6000, NINES + ".0", "." + NINES,
    "0x_", "0b_", "1e400", ".inf", "-.inf", ".nan",
    "-0.0", "1.0", "1:" * 30000 + "1", "1:30", "-1:30.5", "!!int '1:30'", "!!float '1:30.0'", f"!!int '{'1:' * 30000}1'", f"!!int {NINES}",
    "!!int ''", "!!int _", "!!int {}", "!!float ''", "!!float x", "!!bool x",
    "!!str [1]", "!!map 1", "!!seq x", "!!timestamp 1", "!!null 5",
]  # fmt: skip
NO_FIELDS = [
    NINES, "0x" + NINES, "&a [*a]", "&a {a: *a, b: *a}", "&a {? *a : 1}", '"\\ud800"', '"\\UFFFFFFFF"',
    "!!map x", "!!set {a}", "!!binary aGk=", "{[1]: 2}",
]  # fmt: skip


def texts() -> Iterator[tuple[str, str]]:
    """YAML texts."""
    for piece in REPEATED:
        size = len(piece.encode("utf-8", "surrogatepass"))
        for head in ("", GOOD + "cache: ", GOOD + "workloads: [", "a: &a [x]\n"):
            yield f"{head[-12:]!r} and {piece!r} repeated", "\n" + head + piece * ((MAX_TEXT - len(head) - 1) // size)
    for number in NOT_LENGTHS:
        yield f"kv_len {number[:20]}", GOOD + f"workloads: [{{batch: 1, kv_len: {number}}}]\n"
    for field in ("name", "arch", "preset", "attention", "key", "value", "cache", "workloads"):
        others = "".join(line for line in GOOD.splitlines(True) if not line.startswith(field))
        for value in NO_FIELDS:
            yield f"{field} {value[:20]}", others + f"{field}: {value}\n"
    for anchors in (5, 40, 400):
        bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, anchors))
        yield f"{anchors} anchors, each twice the last", bomb
    yield "the root in itself", "&a {attention: *a, key: *a, value: *a}\n"
    yield "the root in a list of itself", "&a [*a, *a]\n"
    yield "long names given twice", (("n" * 3000) + ": 1\n") * 20
    yield "a long anchor", "&" + "a" * 60000 + " *" + "b" * 10
    yield "a long tag", GOOD + "cache: !" + "a" * 60000 + " x\n"
    yield "a long unknown field", GOOD + "z" * 60000 + ": 1\n"
    yield "names of one letter too many", GOOD + "".join(f"k{i}: 1\n" for i in range(1500))
    yield "thousands of bad workloads", GOOD + "workloads: [" + "{}," * 1200 + "]\n"
    yield "aliases of a bad workload", GOOD + "workloads: [&w {batch: 0, x: 1}," + " *w," * 800 + "]\n"
    yield "an alias of a long text", GOOD + f"cache: {{layout: &t {'x' * 30000}, a: *t, b: *t}}\n"
    yield "a version of many digits", f"%YAML {NINES}.1\n---\n" + GOOD
    yield "beyond the largest size", GOOD + "#" * MAX_TEXT
    yield "far beyond the largest size", GOOD + "# x\n" * (1 << 20)
    yield "as many bytes, fewer characters", GOOD + "# " + "é" * (MAX_TEXT // 2)


class Endless(Mapping[str, Any]):
    """A mapping without an end."""

    def __getitem__(self, name: str) -> Any:
        return self

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            yield f"k{number}"
            number += 1

    def __len__(self) -> int:
        return 1


def nested(levels: int, inside: Any, listed: bool) -> Any:
    for _ in range(levels):
        inside = [inside] if listed else {"a": inside}
    return inside


def objects() -> Iterator[tuple[str, Any]]:
    """Python objects."""
    knot: dict[str, Any] = {}
    knot.update(attention=knot, key=knot, value=knot, cache={"a": knot})
    ring: list[Any] = []
    ring += [ring, ring]
    wrong: dict[str, Any] = {
        "itself": knot,
        "a list of itself": ring,
        "an endless mapping": Endless(),
        "a huge integer": HUGE,
        "a huge negative integer": -HUGE,
        "a mapping of a huge integer": {HUGE: 1},
        "a million values": [1] * 10**6,
        "a million mappings": [{}] * 10**6,
        "ten million characters": "x" * 10**7,
        "a million bytes": b"x" * 10**6,
        "deep lists": nested(5000, 1, listed=True),
        "deep mappings": nested(5000, 1, listed=False),
        "half a surrogate pair": "\ud800",
        "not a number": float("nan"),
        "infinity": float("inf"),
        "minus infinity": float("-inf"),
        "a complex number": 1j,
        "a set": {1},
        "a generator": (x for x in ()),
        "an object": object(),
        "a type": int,
        "a list of nothing": [None],
    }
    for name, value in wrong.items():
        yield f"{name} for a spec", value if not isinstance(value, str) else {value: value}
        for field in ("preset", "name", "arch", "attention", "key", "workloads"):
            yield f"{name} for {field}", {**DATA, field: value}
        for field in ("q_heads", "softcap", "window"):
            yield f"{name} for attention.{field}", {**DATA, "attention": {**DATA["attention"], field: value}}
        yield f"{name} for key.bits", {**DATA, "key": {**DATA["key"], "bits": value}}
        yield f"{name} for a weight", {**DATA, "workloads": [{"batch": 1, "kv_len": 64, "weight": value}]}
    for key in (HUGE, None, 1, 1.5, (1, 2), b"a", "\ud800", "", "\n", "x" * 10**6, frozenset()):
        yield f"the field name {type(key)!s}", {**DATA, key: 1}
        yield f"the inner field name {type(key)!s}", {**DATA, "cache": {key: 1}}


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Paths, of files made in `folder` and of the system's."""
    made = {
        "empty": b"",
        "binary": bytes(range(256)),
        "zeros": bytes(9999),
        "latin": "name: é".encode("latin-1"),
        "wide": GOOD.encode("utf-16"),
        "marks": b"\xef\xbb\xbf" * 3,
    }
    for name, content in made.items():
        (folder / name).write_bytes(content)
        yield name, folder / name
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 32)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "locked").write_text(GOOD)
    (folder / "locked").chmod(0)
    if not os.access(folder / "locked", os.R_OK):  # the superuser reads it all the same
        yield "locked", folder / "locked"
    for name in ("sparse", "pipe", "loop", "missing", "missing/below", "a\0b", "\ud800", "n" * 5000):
        yield name[:20], folder / name
    for name in ("/dev/zero", "/dev/null", "/dev/full", "/dev/urandom", "/proc/self/mem", "/proc/self/maps", "/", "", "."):
        yield name, Path(name)
