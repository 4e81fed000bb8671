"""Entries: identity, round trip, and what makes one stale."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.registry.entry import Code, Damaged, Entry
from kvgen.registry.paths import locate, portable
from kvgen.toolchain.cache import Artifact, KernelResources, Resources


def _again(entry: Entry) -> Entry:
    return Entry.from_parts(entry.to_json(), {file: code.text for file, code in entry.codes.items()}, entry.resources())


def test_json_round_trip(make_entry):
    entry = make_entry(((1, 4096), (8, 1024)), accuracy={"1x4096": {"relative_l2": 1e-3}}, runner_up={"us": 11.0})
    assert _again(entry) == entry


def test_launches_of_several_back_ends_come_back_with_their_own(make_entry):
    second = {"launches": {"1x4096": {"backend": "tilelang", "launch": {"tile": 9}, "us": 12.5}}, "layout": None}
    entry = make_entry(((1, 4096), (8, 1024)), backends=("cuda", "tilelang"), runner_up=second)
    again = _again(entry)
    assert again == entry
    assert [again.schedule(launch).backend for launch in again.launches] == ["cuda", "tilelang"]
    assert again.backend == entry.to_json()["backend"] == "cuda+tilelang"
    assert again.standings() == [
        {"workload": "1x4096", "backend": "cuda", "us": 10.0, "runner_up": {"backend": "tilelang", "ratio": 1.25}},
        {"workload": "8x1024", "backend": "tilelang", "us": 10.0, "runner_up": None},
    ]
    assert make_entry(((1, 4096), (8, 1024))).key == entry.key


def _with_another(entry: Entry) -> Entry:
    """The entry with a further launch."""
    work, schedule = entry.launches[0].workload, entry.schedule(entry.launches[0])
    source = entry.codes[entry.launches[0].file].source("cpu")
    other = Schedule(schedule.backend, schedule.layout, Params(threads=99))
    another = replace(source, text=source.text + "int another;\n")
    return Entry.of(entry.spec, "cpu", [(work, schedule, source, None)], [(work, other, another, None)], device=entry.device)


def test_a_further_launch_round_trips_and_is_no_part_of_the_key(make_entry):
    again = _again(_with_another(make_entry()))
    assert again == _with_another(make_entry())
    assert again.key == make_entry().key
    assert [launch.params.get("threads") for launch in again.every_launch][1:] == [99]
    assert len(again.codes) == 2
    assert [again.look_up().launch(*call) for call in ((1, 4096), (1024, 1 << 20))] == [0, 0]


@pytest.mark.parametrize("wrong", [{"us": 0.0}, {"us": -1.0}, {"read_us": 0.0}, {"default_us": -2.0}, {"samples": (1.0, 0.0)}])
def test_times_that_no_measurement_gives_are_refused(make_entry, wrong):
    entry = make_entry()
    with pytest.raises(ValueError, match="1x4096 has a time that is no finite number above 0"):
        _again(replace(entry, timings=(replace(entry.timings[0], **wrong),)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"launches": [1]},
        {"launches": {"1x4096": 3}},
        {"launches": {"1x4096": {"us": 3.0}}},
        {"launches": {"1x4096": {"backend": "cuda", "us": "a"}}},
        {"launches": {"1x4096": {"backend": "cuda", "us": None}}},
        {"launches": {"1x4096": {"backend": "cuda", "us": 10**400}}},
        {"layout": {"layout": {}}},
        {"layout": {"layout": {}, "launches": {"1x4096": {"backend": "cuda", "us": -1.0}}}},
    ],
)
def test_runners_up_of_another_form_are_refused(make_entry, wrong):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        _again(make_entry(runner_up=wrong))


ERRORS = {"normal": {"relative_l2": 0.1}, "structured": {"relative_l2": 0.2, "cosine": 0.9}}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"provenance": {"date": 5}}, "provenance.date: "),
        ({"provenance": {"why": ["a"]}}, "provenance.why: "),
        ({"accuracy": {"1x4096": 3}}, "accuracy"),
        ({"accuracy": {"1x4096": {"relative_l2": "small"}}}, "accuracy.relative_l2: "),
        ({"quality": {"model": None}}, "quality.outputs: Field required"),
        ({"quality": {"outputs": [1]}}, "quality.outputs: "),
        ({"quality": {"outputs": {**ERRORS, "normal": {}}}}, "quality.outputs.normal.relative_l2: Field required"),
        ({"quality": {"outputs": ERRORS, "model": {"lengths": [1]}}}, "quality.model.lengths: "),
        ({"quality": {"outputs": ERRORS, "model": {"lengths": {"2048": {}}}}}, "quality.model.lengths.increase: Field required"),
    ],
)
def test_facts_of_another_form_are_refused(make_entry, facts, reason):
    entry = make_entry()
    with pytest.raises(ValueError, match=reason):
        Entry.from_parts({**entry.to_json(), **facts}, {file: code.text for file, code in entry.codes.items()}, {})


def test_facts_that_nothing_reads_are_kept(make_entry):
    entry = make_entry(provenance={"date": "2026-01-01", "policy": {"a": 1}}, quality={"outputs": {**ERRORS, "seed": 0}, "notes": [1]})
    assert _again(entry) == entry


def test_launches_of_one_source_share_its_file(make_entry):
    entry = make_entry()
    work, schedule = entry.launches[0].workload, entry.schedule(entry.launches[0])
    source = entry.codes[entry.launches[0].file].source("cpu")
    assert source is not None
    other = replace(work, kv_len=512)
    twice = Entry.of(entry.spec, "cpu", [(work, schedule, source, None), (other, schedule, source, None)], device={})
    assert len(twice.codes) == 1
    assert {launch.workload.kv_len for launch in twice.launches} == {4096, 512}


def test_an_entry_has_one_layout(make_entry):
    one, other = make_entry(), make_entry()
    launch = one.launches[0]
    source = one.codes[launch.file].source("cpu")
    schedule = one.schedule(launch)
    different = type(schedule)(schedule.backend, type(schedule.layout)(block=64, order="simd"), schedule.launch)
    with pytest.raises(ValueError, match="one layout, not 2"):
        Entry.of(other.spec, "cpu", [(launch.workload, schedule, source, None), (launch.workload, different, source, None)], device={})


def test_key_follows_format_device_and_workloads_only(make_entry):
    key = make_entry().key
    assert make_entry(launch=7, us=3.0, date="2027-01-01").key == key
    assert make_entry(spec={"name": "renamed"}).key == key
    assert make_entry(device="Other CPU").key != key
    assert make_entry(((1, 8192),)).key != key
    assert make_entry(spec={"value": {"bits": 8, "axis": "token", "group": 64}}).key != key


def test_a_changed_header_makes_the_source_unusable(make_entry, data_dir):
    code = next(iter(make_entry().codes.values()))
    assert code.source("cpu") is not None
    (data_dir / "templates/cpu/include/kernel.h").write_text("int two;\n")
    assert code.source("cpu") is None


def test_times_are_of_other_sources_once_a_header_has_changed(make_entry, data_dir):
    entry = make_entry()
    assert entry.timed_with_others  # it does not record which sources were timed
    entry = replace(entry, provenance={**entry.provenance, "sources": entry.sources_id})
    assert not entry.timed_with_others
    (data_dir / "templates" / "cpu" / "include" / "kernel.h").write_text("int two;\n")
    assert entry.timed_with_others
    assert not replace(entry, timings=()).timed_with_others  # it has no times


@pytest.mark.parametrize("header", ["@__main__/x.h", "@no_such_package_here/x.h", "@sys/x.h"])
def test_a_header_that_is_not_found_here_makes_the_source_unusable(make_entry, monkeypatch, header):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in a script: importlib raises ValueError
    code = next(iter(make_entry().codes.values()))
    assert replace(code, headers=(*code.headers, header)).source("cpu") is None


@pytest.mark.parametrize("name", ["@foo-bar/x.h", "@os.path/x.h", "@/x.h", "@1/x.h"])
def test_a_name_of_no_package_is_no_portable_name(make_entry, name):
    with pytest.raises(ValueError, match="is no header or folder of kvgen's templates or of a package"):
        locate(name)
    with pytest.raises(ValueError, match="is no header or folder"):
        replace(next(iter(make_entry().codes.values())), include=(name,))


def test_a_source_comes_back_with_the_same_identity(make_entry, data_dir):
    header = data_dir / "templates/cpu/include/kernel.h"
    source = Source("int x;\n", "c++", "cpu", (header.parent,), ("-fopenmp",), (header,))
    assert Code.of(source).source("cpu").id == source.id


def test_code_keeps_resources_and_artifact(make_entry, data_dir):
    header = data_dir / "templates/cpu/include/kernel.h"
    resources = Resources("nvcc 13.0", 2.0, {"decode": KernelResources(128, 0, 1024, 0)})
    source = Source("int x;\n", "cuda", "sm90", (header.parent,), (), (header,))
    code = Code.of(source, Artifact("abc", Path("module.so"), resources))
    assert (code.artifact, code.resources) == ("abc", resources)
    assert Code.from_json({**code.to_json(), "text": code.text, "resources": resources.to_json()}) == code


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 99}, "schema 99"),
        ({"schema": 1}, "schema 1: this kvgen reads 4"),
        ({"key": "0" * 16}, "key does not follow"),
    ],
)
def test_foreign_contents_are_refused(make_entry, change, reason):
    entry = make_entry()
    texts = {file: code.text for file, code in entry.codes.items()}
    with pytest.raises(Damaged, match=reason):
        Entry.from_parts({**entry.to_json(), **change}, texts, {})


def test_portable_names(data_dir):
    header = data_dir / "templates" / "cpu" / "include" / "kernel.h"
    assert portable(header) == "cpu/include/kernel.h"
    assert locate(portable(header)) == header
    import yaml

    module = Path(yaml.__file__)
    assert portable(module) == "@yaml/__init__.py"
    assert locate("@yaml/__init__.py") == module


def test_a_path_of_no_package_is_refused(data_dir, tmp_path):
    with pytest.raises(ValueError, match="neither"):
        portable(tmp_path / "stray.h")
    with pytest.raises(FileNotFoundError, match="no_such_package_here"):
        locate("@no_such_package_here/x.h")
