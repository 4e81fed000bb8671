"""The named formats, against what their papers say."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from kvgen.errors import SpecError
from kvgen.spec import CacheSpec, load_spec, presets

HEADS = "attention: {q_heads: 8, kv_heads: 1, head_dim: 64}\n"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bitdecoding-int4", (4, "channel", 128, True), (4, "token", 128, True)),
        ("turbomind-int8", (8, "token", 128, True), (8, "token", 128, True)),
        ("int4-gqa-groupwise", (4, "token", 32, True), (4, "token", 32, True)),
        ("int8-per-channel", (8, "channel", 128, False), (8, "channel", 128, False)),
        ("kivi-int2", (2, "channel", 32, True), (2, "token", 32, True)),
        ("kitty", (2, "channel", 128, True), (2, "token", 128, True)),
    ],
)
def test_formats(name: str, key: tuple[int, str, int, bool], value: tuple[int, str, int, bool]) -> None:
    spec = presets()[name]
    assert [(q.bits, q.axis, q.group, q.zero) for q in (spec.key, spec.value)] == [key, value]
    assert (spec.key.boost.fraction, spec.cache.sink, spec.cache.local) == ((0.125, 32, 128) if name == "kitty" else (0.0, 0, 0))
    assert spec.attention.dtype == ("bfloat16" if "gqa" in name else "float16")


def test_a_file_may_start_from_a_preset_and_override_it() -> None:
    spec = load_spec("preset: kivi-int2\n" + HEADS + "key: {bits: 4}\n")
    assert (spec.key.bits, spec.key.axis, spec.key.group) == (4, "channel", 32)
    assert (spec.value.bits, spec.value.group) == (2, 32)
    assert spec.attention.q_heads == 8


def test_a_section_that_is_a_model_would_hide_what_the_preset_says() -> None:
    heads = {"q_heads": 8, "kv_heads": 2, "head_dim": 128}
    assert load_spec({"preset": "kitty", "attention": heads, "cache": {"rollback": 4}}).cache.sink == 32
    with pytest.raises(SpecError, match="cache: with a preset, give a mapping of the fields that differ, not CacheSpec"):
        load_spec({"preset": "kitty", "attention": heads, "cache": CacheSpec(rollback=4)})


def test_mistakes_in_what_a_preset_sets_point_at_its_line() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("attention: {q_heads: 8, kv_heads: 1, head_dim: 64, window: 100}\npreset: kitty\n")
    assert {(issue.line, issue.path) for issue in caught.value.issues} == {(2, "cache.sink"), (2, "cache.local")}


@pytest.mark.parametrize(
    ("name", "head_dim", "key", "value"),
    [
        ("turbomind-int8", 64, 64, 64),
        ("bitdecoding-int4", 80, 128, 80),  # groups of tokens stay
        ("bitdecoding-int4", 192, 128, 96),
        ("int4-gqa-groupwise", 80, 16, 16),
    ],
)
def test_a_presets_group_becomes_the_largest_that_divides_head_dim(name: str, head_dim: int, key: int, value: int) -> None:
    source = {"preset": name, "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": head_dim}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = load_spec(source)
    assert (spec.key.group, spec.value.group) == (key, value)
    told = {str(one.message).split(":")[0] for one in caught}
    changed = {"key.group": (presets()[name].key.group, key), "value.group": (presets()[name].value.group, value)}
    assert told == {f"{field} is {now}" for field, (preset, now) in changed.items() if now != preset}


def test_a_group_that_is_given_beside_a_preset_stays_and_may_be_a_mistake() -> None:
    source = {"preset": "bitdecoding-int4", "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 64}}
    assert load_spec({**source, "value": {"group": 32}}).value.group == 32
    with pytest.raises(SpecError, match=r"value\.group \(128\) must divide head_dim \(64\)"):
        load_spec({**source, "value": {"group": 128}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_spec({**source, "value": {"bits": 16}}).value.bits == 16


def test_the_name_of_a_preset_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_spec("kitty")
    (issue,) = caught.value.issues
    assert issue.message == "'kitty' is a preset, not a file: write {'preset': 'kitty', 'attention': {...}}"
    (tmp_path / "kitty").write_text("preset: kivi-int2\n" + HEADS)
    assert load_spec("kitty").key.group == 32


def test_a_misspelt_preset_is_told_with_the_nearest_name() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("preset: bitdecoding-int5\n" + HEADS)
    assert [(issue.path, issue.hint) for issue in caught.value.issues] == [("preset", "did you mean bitdecoding-int4?")]
