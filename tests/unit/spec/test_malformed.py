"""Malformed specs, those written to do harm too: a SpecError of bounded length each, never anything else."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import MAX_ISSUE_TEXT, MAX_ISSUES, SpecError
from kvgen.spec import dump_spec, load_spec
from kvgen.spec.load import MAX_TEXT

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
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
REPEATED = (
    "[", "{", "{a: ", "? ", "- ", "- {", "&a ", "*a ", "!!python/name:os ", "%TAG !a! b\n", "---\n", "a: 1\n", "1:", "9", "'", '"', "|\n",
    "#\n", "\t", "\x00", "\ud800", "<<: ",
)  # fmt: skip
VALUES = (
    "9" * 6000, "0x" + "9" * 6000, "1e400", ".nan", "-.inf", "1:" * 30000 + "1", "!!int ''", "!!float x", "&a [*a]", "&a {? *a : 1}",
    '"\\ud800"', "!!map x", "!!binary aGk=", "{[1]: 2}",
)  # fmt: skip
PIECES = (
    "{",
    "}",
    "[",
    ":",
    "\n",
    "&a ",
    "*a",
    "!!",
    "|",
    "'",
    "%",
    "\x00",
    "- ",
    "? ",
    "#",
    "<<: ",
    "0x",
    "!!int ",
    "&a [*a]",
    "9" * 5000,
)


def refused(source: Any) -> bool:
    """Whether a SpecError of bounded length says what is wrong; a spec that is accepted survives a round trip."""
    try:
        spec = load_spec(source)
    except SpecError as error:
        issues = error.issues
    else:
        assert load_spec(dump_spec(spec)) == spec
        return False
    assert 1 <= len(issues) <= MAX_ISSUES
    assert all(str(issue).isprintable() and len(str(issue)) <= 3 * MAX_ISSUE_TEXT + 30 for issue in issues)
    return True


@pytest.mark.parametrize("piece", REPEATED, ids=repr)
def test_texts_of_the_largest_size(piece: str) -> None:
    size = len(piece.encode("utf-8", "surrogatepass"))
    assert refused("\n" + piece * ((MAX_TEXT - 1) // size))
    head = GOOD + "cache: "
    assert refused(head + piece * ((MAX_TEXT - len(head)) // size))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
def test_values_that_are_none_of_a_field(value: str) -> None:
    for field in ("attention", "key", "workloads"):
        assert refused("".join(line for line in GOOD.splitlines(True) if not line.startswith(field)) + f"{field}: {value}\n")
    assert refused(GOOD + f"workloads: [{{batch: 1, kv_len: {value}}}]\n")


def test_texts_that_grow() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    itself = "&a {attention: *a, key: *a, value: *a}\n"
    many = GOOD + "workloads: [" + "{}," * 1200 + "]\n"
    large = GOOD + "#" * MAX_TEXT
    assert all(refused(text) for text in (bomb, itself, many, large, GOOD + "z" * 60000 + ": 1\n"))


def test_objects_that_are_no_specs() -> None:
    knot: dict[str, Any] = {}
    knot.update(attention=knot, key=knot, value=knot)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (knot, 10**6000, [1] * 10**6, "x" * 10**7, b"x", deep, "\ud800", float("nan"), 1j, {1}, object(), int, [None]):
        assert refused(value if not isinstance(value, str) else {value: value})
        assert refused({**DATA, "attention": value})
        assert refused({**DATA, "key": {**DATA["key"], "bits": value}})
    assert all(refused({**DATA, key: 1}) for key in (10**6000, None, 1.5, (1, 2), b"a", "\ud800", "", "x" * 10**6))


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    made = {"empty": b"", "binary": bytes(range(256)), "latin": "name: é".encode("latin-1"), "wide": GOOD.encode("utf-16")}
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 32)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = (*made, "sparse", "pipe", "loop", "missing", "missing/below", "a\0b", "n" * 5000)
    assert all(refused(tmp_path / name) for name in names)
    assert all(refused(Path(name)) for name in ("/dev/zero", "/dev/full", "/proc/self/mem", "/"))


def test_examples_with_characters_changed() -> None:
    rng = random.Random(20)
    texts = [file.read_text() for file in EXAMPLES]
    count = 0
    for _ in range(250):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(PIECES) + text[at + rng.choice([0, 1, rng.randrange(30)]) :]
        count += refused("\n" + text)
    assert count > 200
