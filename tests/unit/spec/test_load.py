"""Loading specs: what is accepted, and how mistakes are reported; malformed ones, those written to do harm too, are SpecErrors."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from kvgen.errors import MAX_ISSUE_TEXT, MAX_ISSUES, SpecError, SpecIssue
from kvgen.spec import AttentionSpec, KernelSpec, KeySpec, dump_spec, load_spec
from kvgen.spec.load import MAX_TEXT
from tests.support.specs import base, spec_data

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
GOOD = """\
name: good
attention: {q_heads: 4, kv_heads: 2, head_dim: 64}
key: {bits: 4, axis: channel, group: 32}
value: {bits: 4, axis: token, group: 64}
"""


def issues(source: Any) -> list[SpecIssue]:
    """The mistakes that loading reports."""
    with pytest.raises(SpecError) as caught:
        load_spec(source)
    return caught.value.issues


def refused(source: Any) -> bool:
    """Whether a SpecError of bounded length says what is wrong; a spec that is accepted survives a round trip."""
    try:
        spec = load_spec(source)
    except SpecError as error:
        found = error.issues
    else:
        assert load_spec(dump_spec(spec)) == spec
        return False
    assert 1 <= len(found) <= MAX_ISSUES
    assert all(str(issue).isprintable() and len(str(issue)) <= 3 * MAX_ISSUE_TEXT + 30 for issue in found)
    return True


@given(spec_data())
def test_yaml_gives_back_every_spec(data: dict[str, Any]) -> None:
    spec = load_spec(data)
    again = load_spec(dump_spec(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.format_id == spec.format_id


def test_a_path_a_pipe_a_text_a_mapping_and_a_spec_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("\ufeff" + GOOD, encoding="utf-8")
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        pipe.write(GOOD)
    spec = load_spec(GOOD)
    for source in (file, str(file), spec.to_json(), spec, f"/dev/fd/{reading}"):
        assert load_spec(source) == spec
    os.close(reading)


def test_mistakes_of_fields_and_within_sections_come_at_once_with_lines_in_order() -> None:
    text = """\
name: a b
attention: {q_heads: 32, kv_heads: 7, head_dim: 96}
key:
  bits: "4"
  axis: chanel
value: {bits: 4, axis: token, group: 128}
cache:
  page: 64
workloads:
  - {batch: 1}
"""
    told = [(issue.line, issue.path) for issue in issues(text)]
    assert told == [
        (1, "name"), (2, "attention.q_heads"), (4, "key.bits"), (5, "key.axis"), (8, "cache.page"), (10, "workloads[0].kv_len"),
    ]  # fmt: skip
    told = [(issue.line, issue.path) for issue in issues(GOOD.replace("group: 64", "group: 48") + "cache: {layout: paged, page: 48}\n")]
    assert told == [(4, "value.group"), (5, "cache.page")], "those between sections"


@pytest.mark.parametrize(
    ("line", "path", "hint"),
    [
        ("arch: sm91", "arch", "did you mean sm90?"),
        ("cache: {layuot: paged}", "cache.layuot", "did you mean layout?"),
        ("cache: {softcap: 1.0}", "cache.softcap", "softcap belongs to attention"),
        ("cache: {sink: '3'}", "cache.sink", "write it without quotes"),
        ("cache: {sink: 03}", "cache.sink", "write it without quotes and without leading zeros"),
        ("preset: kity", "preset", "did you mean kitty?"),
    ],
)
def test_hints(line: str, path: str, hint: str) -> None:
    (issue,) = issues(GOOD + line + "\n")
    assert (issue.line, issue.path, issue.hint) == (5, path, hint)


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [
        ("bits: 4, axis: channel", "bits: 4.0, axis: channel", "key.bits", "must be an integer, not 4.0"),
        ("bits: 4, axis: channel", "bits: 3, axis: channel", "key.bits", "must be one of 2, 4, 8, 16, not 3"),
        ("q_heads: 4", "q_heads: yes", "attention.q_heads", "must be an integer, not True"),
        ("q_heads: 4", "q_heads: 0100", "attention.q_heads", "must be an integer, not '0100'"),
        ("q_heads: 4", "q_heads: 1:30", "attention.q_heads", "must be an integer, not '1:30'"),
        ("q_heads: 4", "q_heads: !!int '1:30'", "attention.q_heads", "not a readable int: '1:30'"),
        ("q_heads: 4", "q_heads: " + "9" * 6000, "attention.q_heads", "not a readable number: it has more than 64 characters"),
        ("name: good", "workloads: [{batch: 2, kv_len: 9, lengths: 3}]", "workloads[0].lengths", "must be equal, or a mapping"),
        ("q_heads: 4", "q_heads: -4", "attention.q_heads", "must be greater than 0, not -4"),
        ("head_dim: 64", "head_dim: 64, softcap: .nan", "attention.softcap", "must be a finite number, not nan"),
        ("head_dim: 64", "head_dim: 64, sinks: 1", "attention.sinks", "must be true or false, not 1"),
        ("key: {bits: 4, axis: channel, group: 32}\n", "", "key", "required, but missing"),
    ],
)  # fmt: skip
def test_types_are_strict(old: str, new: str, path: str, message: str) -> None:
    (issue,) = issues(GOOD.replace(old, new))
    assert issue.path == path
    assert message in issue.message


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("key: [1,\n", 2, "not valid YAML"),
        ("--- {a: 1}\n--- {b: 2}\n", 2, "not valid YAML"),
        (GOOD + "name: twice\n", 5, "given twice, first on line 1"),
        (GOOD + "3: 4\n", 5, "field names are plain text"),
        (GOOD + "? [a]\n: 4\n", 5, "field names are plain text"),
        (GOOD + "cache: !!python/object:os.system {}\n", 5, "no place in a spec"),
        (GOOD + "cache: &a {sink: *a}\n", 5, "nested too deeply"),
        (GOOD + 'name: "\\UFFFFFFFF"\n', 5, "not valid YAML"),
        ("\n[" + "1," * 9000 + "]\n", 2, "at most 8192 names and values"),
        (GOOD + "# " + "é" * (1 << 15) + "\n", None, "at most 65536 bytes of text"),
        ("[" * 5000 + "\n", 1, "nested too deeply"),
    ],
)
def test_text_that_is_no_spec(text: str, line: int | None, message: str) -> None:
    (issue,) = issues(text)
    assert message in issue.message
    assert issue.line == line


def test_an_alias_and_the_largest_spec_are_read() -> None:
    text = GOOD.replace("key: {", "key: &q {").replace("value: {bits: 4, axis: token, group: 64}", "value: *q")
    assert load_spec(text).value.group == 32
    works = "".join(f"  - {{batch: {batch}, kv_len: 4096, q_len: 1, weight: 1.0}}\n" for batch in range(1, 257))
    text = f"{GOOD}workloads:\n{works}"
    text += "#" * ((1 << 16) - len(text))
    assert len(load_spec(text).workloads) == 256


def test_the_first_hundred_mistakes_are_reported_and_that_there_are_more() -> None:
    for source in (GOOD + "".join(f"k{i}: 1\n" for i in range(1000)), base(**{f"k{i}": 1 for i in range(1000)})):
        with pytest.raises(SpecError) as caught:
            load_spec(source)
        assert [issue.path for issue in caught.value.issues] == [f"k{i}" for i in range(100)]
        lines = str(caught.value).splitlines()
        assert (lines[0], len(lines)) == ("more than 100 mistakes in the spec", 102)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "can't decode" in issues(tmp_path / "binary.yaml")[0].message
    assert "No such file" in issues(tmp_path / "missing.yaml")[0].message
    assert "Is a directory" in issues(tmp_path)[0].message
    assert "null byte" in issues("nul\0byte")[0].message
    assert "this is of type int" in issues(4)[0].message
    assert "this text is empty" in issues(" ")[0].message
    assert "empty" in issues("/dev/null")[0].message
    with (tmp_path / "endless.yaml").open("wb") as file:
        file.truncate(1 << 40)
    assert "at most 65536 bytes" in issues(tmp_path / "endless.yaml")[0].message


def test_python_constructors_report_the_same_way() -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(q_heads=0, kv_heads=True, heads=3)
    assert {issue.path for issue in caught.value.issues} == {"q_heads", "kv_heads", "head_dim", "heads"}
    for sections, message in (
        ({"key": {"bits": 10**6000}}, r"key\.bits: must be a smaller number, not a huge number"),
        ({"workloads": [{}] * 10**6}, "at most 256 workloads, not 1000000"),
        ({"attention": {"q_heads": "4", "kv_heads": 2, "head_dim": 64}}, r"attention\.q_heads"),
    ):
        with pytest.raises(SpecError, match=message):
            KernelSpec(**base(**sections))
    with pytest.raises(SpecError, match=r"boost raises channels of a 2-bit K"):
        KeySpec(bits=4, boost={"fraction": 0.25})


def test_specs_are_frozen() -> None:
    with pytest.raises(Exception, match="cannot assign to field"):
        load_spec(GOOD).name = "other"  # type: ignore[misc]


# --- written to do harm --------------------------------------------------------------------------------------------------

PIECES = (
    "{", "}", "[", ":", "\n", "&a ", "*a", "!!", "|", "'", "%", "\x00", "- ", "? ", "#", "<<: ", "0x", "!!int ", "&a [*a]", "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize(
    "piece", ["[", "{a: ", "- {", "&a ", "*a ", "!!python/name:os ", "%TAG !a! b\n", "---\n", "9", "'", "\x00", "\ud800", "<<: "], ids=repr
)
def test_texts_of_the_largest_size(piece: str) -> None:
    head, size = GOOD + "cache: ", len(piece.encode("utf-8", "surrogatepass"))
    assert refused(head + piece * ((MAX_TEXT - len(head)) // size))


def test_texts_that_grow() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    itself = "&a {attention: *a, key: *a, value: *a}\n"
    assert all(refused(text) for text in (bomb, itself, GOOD + "workloads: [" + "{}," * 1200 + "]\n", GOOD + "z" * 60000 + ": 1\n"))


def test_objects_that_are_no_specs() -> None:
    knot: dict[str, Any] = {}
    knot.update(attention=knot, key=knot, value=knot)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (knot, 10**6000, [1] * 10**6, "x" * 10**7, b"x", deep, "\ud800", float("nan"), 1j, {1}, object(), int, [None]):
        for section in ("attention", "preset", "workloads", "name"):
            assert refused({**base(), section: value})
        assert refused(base(key={"bits": value}))
    assert all(refused({**base(), key: 1}) for key in (10**6000, None, 1.5, (1, 2), b"a", "\ud800", "", "x" * 10**6))


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
