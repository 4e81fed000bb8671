"""Loading specs: what is accepted, and how every mistake is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from kvgen.errors import SpecError, SpecIssue
from kvgen.spec import AttentionSpec, KernelSpec, KeySpec, dump_spec, load_spec
from tests.support.specs import base, spec_data

EXAMPLES = Path(__file__).parents[3] / "examples"

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


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load_and_carry_their_file_name(file: Path) -> None:
    spec = load_spec(file)
    assert spec.name.replace("-", "_") == file.stem
    assert load_spec(dump_spec(spec)) == spec


@given(spec_data())
def test_yaml_gives_back_every_spec(data: dict[str, Any]) -> None:
    spec = load_spec(data)
    again = load_spec(dump_spec(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.format_id == spec.format_id


def test_a_path_a_text_a_mapping_and_a_spec_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("\ufeff" + GOOD, encoding="utf-8")
    spec = load_spec(GOOD)
    assert load_spec(file) == load_spec(str(file)) == load_spec(spec.to_json()) == load_spec(spec) == spec


def test_all_mistakes_come_at_once_with_lines_in_order() -> None:
    found = issues(
        """\
name: a b
attention: {q_heads: 32, kv_heads: 7, head_dim: 96}
key:
  bits: "4"
  axis: chanel
value: {bits: 4, axis: token, group: 128}
cache:
  page: 64
workloads:
  - {batch: 1, kv_len: 16, q_len: 9}
  - {batch: 1}
"""
    )
    assert [(issue.line, issue.path) for issue in found] == [
        (1, "name"),
        (2, "attention.q_heads"),
        (4, "key.bits"),
        (5, "key.axis"),
        (6, "value.group"),
        (8, "cache.page"),
        (10, "workloads[0].q_len"),
        (11, "workloads[1].kv_len"),
    ]


def test_rules_between_sections_are_reported_beside_mistakes_in_others() -> None:
    found = issues(GOOD.replace("group: 64", "group: 48") + "cache: {layout: pagd}\n")
    assert {(issue.line, issue.path) for issue in found} == {(4, "value.group"), (5, "cache.layout")}


@pytest.mark.parametrize(
    ("old", "new", "paths"),
    [
        ("q_heads: 4, kv_heads: 2", "q_heads: 32, kv_heads: 7, dtpye: x", {"attention.q_heads", "attention.dtpye"}),
        ("axis: channel, group: 32", "axis: channel, gruop: 1, boost: {fraction: 0.5}", {"key.gruop", "key.boost.fraction"}),
        ("name: good", "cache: {layout: contiguous, page: 40, lokal: 8}", {"cache.page", "cache.lokal"}),
        ("name: good", "workloads: [{batch: 1, kv_len: 2, q_len: 3, weigth: 1}]", {"workloads[0].q_len", "workloads[0].weigth"}),
        # what a misspelt field may have meant is not judged
        ("q_heads: 4, kv_heads: 2", "q_heads: 4, kv_haeds: 3", {"attention.kv_haeds", "attention.kv_heads"}),
        ("name: good", "cache: {layuot: paged, page: 64}", {"cache.layuot"}),
        ("axis: channel", "axis: channel, bouts: 1, boost: {fractoin: 0.1}", {"key.bouts", "key.boost.fractoin"}),
        ("name: good", "workloads: [7, {batch: 1, kv_len: 2, qlen: 3}]", {"workloads[0]", "workloads[1].qlen"}),
    ],
)
def test_rules_between_fields_are_reported_beside_a_misspelt_field_of_their_section(old: str, new: str, paths: set[str]) -> None:
    assert {issue.path for issue in issues(GOOD.replace(old, new))} == paths


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
        ("q_heads: 4", "q_heads: 1e1", "attention.q_heads", "must be an integer, not 10.0"),
        (
            "name: good",
            "workloads: [{batch: 2, kv_len: 9, lengths: 3}]",
            "workloads[0].lengths",
            "must be equal, or a mapping with min, not 3",
        ),
        ("q_heads: 4", "q_heads: 1:30", "attention.q_heads", "must be an integer, not '1:30'"),
        ("q_heads: 4", "q_heads: !!int '1:30'", "attention.q_heads", "not a readable int: '1:30'"),
        ("q_heads: 4", "q_heads: " + "9" * 6000, "attention.q_heads", "not a readable number: it has more than 64 characters"),
        ("name: good", 'name: "\\ud800"', "", "not valid YAML"),
        ("key: {bits", "key: !!int {bits", "key", "no place in a spec"),
        ("q_heads: 4", "q_heads: -4", "attention.q_heads", "must be greater than 0, not -4"),
        ("head_dim: 64", "head_dim: 65", "attention.head_dim", "must be a multiple of 16, not 65"),
        ("head_dim: 64", "head_dim: 64, softcap: .nan", "attention.softcap", "must be a finite number, not nan"),
        ("head_dim: 64", "head_dim: 64, sinks: 1", "attention.sinks", "must be true or false, not 1"),
        ("key: {bits: 4, axis: channel, group: 32}", "key: [4]", "key", "must be a mapping, not a list"),
        ("key: {bits: 4, axis: channel, group: 32}\n", "", "key", "required, but missing"),
        ("name: good", "workloads: []", "workloads", "must not be empty: leave it out for the default"),
    ],
)
def test_types_are_strict(old: str, new: str, path: str, message: str) -> None:
    (issue,) = issues(GOOD.replace(old, new))
    assert issue.path == path
    assert message in issue.message


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("key: [1,\n", 2, "not valid YAML"),
        ("a: b: c\n", 1, "not valid YAML"),
        ("--- {a: 1}\n--- {b: 2}\n", 2, "not valid YAML"),
        (GOOD + "name: twice\n", 5, "given twice, first on line 1"),
        (GOOD + "3: 4\n", 5, "field names are plain text"),
        (GOOD + "? [a]\n: 4\n", 5, "field names are plain text"),
        (GOOD + "cache: !!python/object:os.system {}\n", 5, "no place in a spec"),
        (GOOD + "cache: {sink: !!int x}\n", 5, "not a readable int"),
        (GOOD + "cache: &a {sink: *a}\n", 5, "nested too deeply"),
        (GOOD + 'name: "\\UFFFFFFFF"\n', 5, "not valid YAML"),
        ("&a [*a, *a]\n", 1, "nested too deeply"),
        ("\n[" + "1," * 9000 + "\n", 2, "at most 8192 names and values"),
        (f"a: &a [{'x' * 30000}]\nb: [*a, *a]\n", 1, "the texts of a spec have at most 65536 characters"),
        (GOOD + "# " + "é" * (1 << 15) + "\n", None, "at most 65536 bytes of text"),
        ("[" * 5000 + "\n", 1, "nested too deeply"),
    ],
)
def test_text_that_is_no_spec(text: str, line: int | None, message: str) -> None:
    found = issues(text)
    assert any(message in issue.message and issue.line == line for issue in found), found


def test_aliases_within_reason_are_fine() -> None:
    text = "x".join([GOOD.replace("key: {", "key: &q {").replace("value: {bits: 4, axis: token, group: 64}", "value: *q")])
    assert load_spec(text).value.group == 32


@pytest.mark.parametrize(
    ("sections", "path", "message"),
    [
        ({"name": 10**6000}, "name", "not a readable integer: it has more than 64 digits"),
        ({"cache": {"sink": 10**6000}}, "cache.sink", "not a readable integer"),
        ({"name": "\ud800"}, "name", "half of a surrogate pair"),
        ({"name": "x" * (1 << 17)}, "name", "the texts of a spec have at most 65536 characters"),
        ({"workloads": [{}] * 10**6}, "workloads", "at most 8192 names and values"),
        ({"workloads": [{}] * 300}, "workloads", "at most 256 workloads, not 300"),
        ({10**6000: 1}, "", "field names are plain text, not a huge number"),
        ({"\ud800": 1}, "", "field names are plain text, not '\\ud800'"),
    ],
)
def test_mappings_that_are_no_spec(sections: Any, path: str, message: str) -> None:
    (issue,) = issues({**base(), **sections})
    assert issue.path.startswith(path)
    assert message in issue.message


def test_mappings_and_lists_that_hold_themselves() -> None:
    knot: dict[str, Any] = {}
    knot["cache"] = knot
    ring: list[Any] = []
    ring.append(ring)
    for data in (knot, base(cache=knot), base(workloads=ring), base(preset=ring)):
        (issue,) = issues(data)
        assert "nested too deeply" in issue.message


def test_the_largest_specs_are_read() -> None:
    works = "".join(f"  - {{batch: {batch}, kv_len: 4096, q_len: 1, weight: 1.0}}\n" for batch in range(1, 257))
    text = f"{GOOD}workloads:\n{works}"
    text += "#" * ((1 << 16) - len(text))
    assert len(load_spec(text).workloads) == 256
    assert load_spec(load_spec(text).to_json()) == load_spec(text)
    assert "at most 65536 bytes" in issues(text + "#")[0].message


def test_the_first_hundred_mistakes_are_reported_and_that_there_are_more() -> None:
    for source in (GOOD + "".join(f"k{i}: 1\n" for i in range(1000)), base(**{f"k{i}": 1 for i in range(1000)})):
        with pytest.raises(SpecError) as caught:
            load_spec(source)
        assert [issue.path for issue in caught.value.issues] == [f"k{i}" for i in range(100)]
        lines = str(caught.value).splitlines()
        assert lines[0] == "more than 100 mistakes in the spec"
        assert lines[-1] == "  there are more mistakes: these are the first 100"
        assert len(lines) == 102
    with pytest.raises(SpecError, match="^100 mistakes in the spec"):
        load_spec(GOOD + "".join(f"k{i}: 1\n" for i in range(100)))


def test_an_issue_is_one_short_line_whatever_the_spec_holds() -> None:
    for name in ("z" * 60000, "a\nb", "\x1b[31m", "\u2028"):
        (issue,) = issues({**base(), name: 1})
        assert issue.path == (name[:297] + "..." if len(name) > 300 else name.encode("unicode_escape").decode())
        assert str(issue).isprintable()


def test_specs_that_mean_the_same_are_equal() -> None:
    texts = (GOOD + f"workloads: [{{batch: 2, kv_len: 1024, lengths: {{{lengths}}}}}]\n" for lengths in ("min: 300, max: 1024", "min: 300"))
    with_max, without = map(load_spec, texts)
    assert with_max == without
    assert hash(with_max) == hash(without)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in issues(tmp_path / "binary.yaml")[0].message
    assert "No such file" in issues(tmp_path / "missing.yaml")[0].message
    assert "Is a directory" in issues(tmp_path)[0].message
    assert "cannot read" in issues("nul\0byte")[0].message
    assert "not int" in issues(4)[0].message
    os.mkfifo(tmp_path / "pipe")
    assert "empty" in issues(tmp_path / "pipe")[0].message
    for special in ("/dev/zero", "/dev/null"):
        assert "socket or a device" in issues(special)[0].message
    with (tmp_path / "endless.yaml").open("wb") as file:
        file.truncate(1 << 40)
    assert "at most 65536 bytes" in issues(tmp_path / "endless.yaml")[0].message


def test_a_spec_may_come_through_a_pipe() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        pipe.write(GOOD)
    assert load_spec(f"/dev/fd/{reading}") == load_spec(GOOD)
    os.close(reading)


def test_python_constructors_report_the_same_way() -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(q_heads=0, kv_heads=True, heads=3)
    assert {issue.path for issue in caught.value.issues} == {"q_heads", "kv_heads", "head_dim", "heads"}
    with pytest.raises(SpecError, match=r"key\.bits: must be a smaller number, not a huge number"):
        KernelSpec(**base(key={"bits": 10**6000}))
    with pytest.raises(SpecError, match="at most 256 workloads, not 1000000"):
        KernelSpec(**base(workloads=[{}] * 10**6))
    with pytest.raises(SpecError, match=r"attention\.q_heads"):
        KernelSpec(**base(attention={"q_heads": "4", "kv_heads": 2, "head_dim": 64}))
    with pytest.raises(SpecError, match=r"boost raises channels of a 2-bit K"):
        KeySpec(bits=4, boost={"fraction": 0.25})


def test_specs_are_frozen_and_importing_them_needs_no_torch() -> None:
    with pytest.raises(Exception, match="cannot assign to field"):
        load_spec(GOOD).name = "other"  # type: ignore[misc]
    code = "import sys, kvgen.spec as s; s.load_spec(sys.argv[1]); assert not {'torch', 'numpy', 'rich', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(EXAMPLES / "llama31_8b_kv4.yaml")], check=True, cwd=EXAMPLES.parent)
