"""What was validated once is constructed again without pydantic, and only what was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from kvgen.spec.plain import plain_text

from kvgen import validated
from kvgen.construct import construct
from kvgen.errors import SpecError
from kvgen.registry import packaged_store
from kvgen.registry.entry import Entry
from kvgen.registry.store import read_entry, read_parts
from kvgen.spec import KernelSpec, dump_spec, load_spec, validation
from kvgen.spec.timing import Timing
from tests.support.full_disk import no_file_beyond
from tests.support.specs import base

TEXT = json.dumps(base(name="recorded"))


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """The records of a cache folder of this test's own."""
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: sorted((tmp_path / "cache" / validated.FOLDER).glob("*"))


@pytest.fixture
def not_validated(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and validation fails the test from then on."""

    def never(*_: object) -> None:
        raise AssertionError("validated again")

    def begin() -> None:
        monkeypatch.setattr(validation, "spec_of", never)
        monkeypatch.setattr(Entry, "from_json", never)

    return begin


@pytest.mark.parametrize("source", [TEXT, json.loads(TEXT), dump_spec(load_spec(TEXT))], ids=["text", "mapping", "block style"])
def test_a_known_spec_is_not_validated_again(source: Any, not_validated: Callable[[], None]) -> None:
    spec = load_spec(source)
    not_validated()
    again = load_spec(source)
    assert again == spec
    assert repr(again) == repr(spec)
    assert (hash(again), again.format_id) == (hash(spec), spec.format_id)
    assert again is not spec


def test_a_text_and_a_mapping_of_the_same_json_are_two_sources(records: Callable[[], list[Path]]) -> None:
    """YAML reads some of JSON's numbers as text."""
    load_spec(json.loads(TEXT))
    load_spec(json.dumps(json.loads(TEXT), sort_keys=True, separators=(",", ":")))
    assert len(records()) == 2


def test_a_mistake_beside_what_is_known_is_found(records: Callable[[], list[Path]]) -> None:
    data = base(name="recorded")
    load_spec(data)
    for wrong in ({**data, 7: 1}, {**data, "key": {**data["key"], "bits": 4.0}}, {**data, "name": None}):
        with pytest.raises(SpecError):
            load_spec(wrong)
    assert len(records()) == 1


def test_values_that_json_has_not_are_judged_each_time() -> None:
    class Bits(IntEnum):
        FOUR = 4

    assert plain_text({"bits": Bits.FOUR}) is plain_text({"weight": math.nan}) is plain_text({"workloads": [object()]}) is None
    assert len({plain_text({"bits": value}) for value in (1, 1.0, True, "1", [1], None)}) == 6


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw.replace(b"recorded", b"recordeD"), lambda raw: b""])
def test_a_damaged_record_counts_as_absent(damage: Callable[[bytes], bytes], records: Callable[[], list[Path]]) -> None:
    spec = load_spec(TEXT)
    (record,) = records()
    whole = record.read_bytes()
    record.write_bytes(damage(whole))
    assert load_spec(TEXT) == spec
    assert record.read_bytes() == whole


def test_a_record_of_another_shape_counts_as_absent() -> None:
    spec = load_spec(TEXT)
    source = f"text\n{TEXT}"
    for content in (b"[]", b'{"workloads": 7}', b"7"):
        place = validated._place(KernelSpec, source)
        place.write_bytes(validated._sha256(content) + b"\n" + content)
        assert load_spec(TEXT) == spec


def test_records_of_another_version_are_not_used(records: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    load_spec(TEXT)
    monkeypatch.setattr(validated, "_code", lambda: "another")
    load_spec(TEXT)
    assert len(records()) == 2


def test_without_a_cache_that_can_be_written_specs_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "file" / "folder"))
    assert load_spec(TEXT) == load_spec(TEXT)


def test_a_full_disk_leaves_no_part_of_a_record(records: Callable[[], list[Path]]) -> None:
    with no_file_beyond(10):
        load_spec(TEXT)
    assert records() == []


def test_the_cache_does_not_grow_without_end(records: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validated, "MOST_RECORDS", 4)
    for index in range(9):
        load_spec(base(name=f"spec{index}"))
    assert 1 < len(records()) <= 4


def test_shipped_entries_are_not_validated_again(not_validated: Callable[[], None]) -> None:
    paths = [found.path for found in packaged_store().all()][:4]
    entries = [read_entry(path) for path in paths]
    not_validated()
    again = [read_entry(path) for path in paths]
    assert entries
    assert again == entries
    assert repr(again) == repr(entries)
    assert [entry.to_json() for entry in again] == [entry.to_json() for entry in entries]


def test_what_validation_converts_is_validated_each_time(records: Callable[[], list[Path]]) -> None:
    """pydantic reads the text "12.5" as a number; constructing it without pydantic would leave it a text."""
    data, texts, resources = read_parts(packaged_store().all()[0].path)
    timings = [{**timing, "us": str(timing["us"])} for timing in data["timings"]]
    before = records()
    for _ in range(2):
        entry = Entry.from_parts({**data, "timings": timings}, texts, resources)
        assert all(type(timing.us) is float for timing in entry.timings)
    assert records() == before


def test_constructors_validate_and_replace_does() -> None:
    spec = load_spec(TEXT)
    assert replace(spec, name="other").format_id == spec.format_id
    with pytest.raises(SpecError, match="workloads: at most 256 workloads"):
        replace(spec, workloads=spec.workloads * 257)
    with pytest.raises(SpecError, match="name: may hold letters"):
        replace(spec, name="two words")


def test_data_that_no_type_of_a_union_was_written_as_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="none of its types"):
        construct(Timing, {"workload": {}, "us": 1.0})
