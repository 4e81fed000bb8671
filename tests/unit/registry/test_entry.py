"""Entries: their file, their identity, and what makes one stale or damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvgen.errors import KvgenError
from kvgen.lower.schedule import Params, Schedule
from kvgen.registry.entry import Damaged, Entry
from tests.support.entries import signed


def again(entry: Entry) -> Entry:
    return Entry.of_text(entry.text().encode())


def test_the_file_gives_the_entry_back(make_entry):
    entry = make_entry(
        ((1, 4096), (8, 1024)),
        names=("cuda", "tilelang"),
        accuracy={"1x4096": {"relative_l2": 1e-3}},
    )
    assert again(entry) == entry
    assert again(entry).backend == "cuda+tilelang"
    assert again(entry).standings() == [
        {"workload": "1x4096", "backend": "cuda", "us": 10.0},
        {"workload": "8x1024", "backend": "tilelang", "us": 10.0},
    ]


def test_launches_are_kept_once_with_all_their_workloads_and_others_serve_further_calls(make_entry):
    entry = make_entry(((1, 4096), (8, 1024)))
    schedule, source = entry.schedule(entry.launches[0]), entry.sources[0]
    other = Schedule(schedule.backend, schedule.layout, Params(tile=99))
    works = entry.spec.workloads
    made = Entry.of(
        entry.spec,
        "cpu",
        [(work, schedule, source, None) for work in works],
        [(works[0], schedule, source, None), (works[0], other, source, None)],
        device=entry.device,
    )
    assert [(launch.params["tile"], launch.workloads) for launch in again(made).launches] == [(1, ("1x4096", "8x1024")), (99, ())]
    assert made.key == entry.key, "further launches are no part of it"
    assert [made.look_up().launch(*call) for call in ((1, 4096), (1024, 1 << 20))] == [0, 0]


def test_the_key_follows_format_device_and_workloads_only(make_entry):
    key = make_entry().key
    assert make_entry(launch=7, us=3.0, date="2027-01-01", spec={"name": "renamed"}).key == key
    assert make_entry(device="Other CPU").key != key
    assert make_entry(((1, 8192),)).key != key
    assert make_entry(spec={"value": {"bits": 8, "axis": "token", "group": 64}}).key != key


def test_a_comment_of_a_header_changes_nothing_and_another_token_makes_the_times_old(make_entry, other_header):
    entry = make_entry()
    assert entry.timed_with_others, "it does not record which sources were timed"
    entry = replace(entry, provenance={**entry.provenance, "sources": entry.sources_id})
    for text, other in (("int  one ; // a comment\n", False), ("int two;\n", True)):
        other_header(text)
        assert (again(entry).outdated, again(entry).timed_with_others) == (other, other)
    assert not replace(entry, timings=()).timed_with_others, "it has no times"


def test_an_entry_with_infinite_figures_is_not_written(make_entry):
    with pytest.raises(KvgenError, match="cannot be written"):
        make_entry(us=float("inf")).text()


def test_every_edit_is_found(make_entry):
    """Spacing is none: it changes nothing that is read."""
    raw = make_entry().text().encode()
    assert Entry.of_text(json.dumps(json.loads(raw)).encode()) == make_entry()
    for at in range(0, len(raw), 7):
        edited = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(Damaged):
            Entry.of_text(edited)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"null", b'{"schema": "5"}', b"\xff\xfe", b"[" * 200_000, b'{"schema": 5}', b"{"])
def test_nonsense_is_damaged(raw):
    with pytest.raises(Damaged):
        Entry.of_text(raw)


SIGNED = {
    "a newer schema": (lambda data: data.update(schema=99), "schema 99, and this kvgen reads 5, which a newer kvgen wrote"),
    "an older schema": (lambda data: data.update(schema=4), "schema 4, and this kvgen reads 5: build it again"),
    "another target": (lambda data: data.update(arch="../cpu"), "arch: "),
    "no launches": (lambda data: data.pop("launches"), "launches: Field required"),
    "an accuracy of words": (lambda data: data.update(accuracy={"1x4096": {"relative_l2": "small"}}), "accuracy"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNED)
def test_an_entry_of_another_form_under_a_right_digest_is_refused_by_reason(make_entry, name):
    change, reason = SIGNED[name]
    with pytest.raises(Damaged, match=reason):
        Entry.of_text(signed(make_entry(), change))
