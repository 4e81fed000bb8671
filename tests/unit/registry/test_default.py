"""The entry of a format that nothing is tuned for: each call takes the default of the grid's workload nearest to it, calls beyond the grid
the plain schedule.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu_words import schedule_word, spec_of, workload_of
from kvgen.cli.launches import rows
from kvgen.lower.backends import get_backend
from kvgen.registry.default import default_entry
from kvgen.registry.dispatch import DispatchTable
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.registry.serving import serving, shares
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.traffic import parse

CUDA = get_backend("cuda")
PLAIN = "n128.w8u4d1c1"


def spec(work: str) -> KernelSpec:
    return spec_of("k4v4", "sm90", [workload_of(one) for one in work.split(",")])


def loaded(work: str) -> KernelSpec:
    """A spec whose attention takes four query tokens, with one workload."""
    attention = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "q_len": 4}
    bits = {"key": {"bits": 4}, "value": {"bits": 4}}
    return load_spec({"name": "loaded", "arch": "sm90", "attention": attention, **bits, "workloads": [parse(work).to_json()]})


def entry_for(work: str) -> Entry:
    return default_entry(spec(work), "sm90", Selection(None, "default", ()))[0]


def taken(entry: Entry, work: str) -> str:
    """The word of the schedule that a call takes."""
    found = serving(entry, entry.spec, parse(work))
    return schedule_word(entry.schedule(found.launch))


@pytest.mark.parametrize(
    ("work", "schedule"),
    [
        ("1x4096", "n128.w8u1d2c1.cl8"),
        ("1x2048", "n128.w8u1d2c1.cl8"),
        ("2x4096", "n128.w8u1d2c1.cl4"),
        ("9x30000", "n128.w8u4d1c1.cl2"),
        ("64x512", "n128.w2u1d2c4"),
        ("64x32768", "n128.w4u4d1c2"),
        ("1x131072", PLAIN),
        ("4096x512", PLAIN),
        ("1x4194304", PLAIN),
    ],
)
def test_a_call_takes_the_default_of_the_traffic_around_it_and_beyond_the_grid_the_plain_schedule(work: str, schedule: str) -> None:
    """The spec names one workload; each launch serves only the calls that it is for."""
    assert taken(entry_for("1x4096"), work) == schedule


def test_every_workload_of_the_spec_has_the_default_of_its_own_traffic() -> None:
    entry = entry_for("1x4096,8x32768,32x8192,3x300000")
    assert [schedule_word(entry.schedule(launch)) for launch in entry.launches] == [
        "n128.w8u1d2c1.cl8", "n128.w8u4d1c1.cl2", "n128.w4u4d1c2", PLAIN,
    ]  # fmt: skip
    for work in ("1x4096", "8x32768", "32x8192", "3x300000"):
        assert taken(entry, work) == schedule_word(CUDA.default(entry.spec, "sm90", parse(work)))


def test_each_launch_is_compiled_once() -> None:
    entry = entry_for("1x4096,1x32768,8x32768")
    words = [schedule_word(entry.schedule(launch)) for launch in entry.every_launch]
    assert len(entry.codes) == len(set(words)) == len(words)


def test_show_says_how_much_of_the_grid_each_further_launch_serves() -> None:
    entry = entry_for("1x4096")
    assert entry.dispatch is not None
    further = [row[0] for row in rows(entry)[1:]]
    assert sum(int(row.split(" cells")[0]) for row in further) + shares(entry)[0] == len(entry.dispatch.defaults) == 195
    assert all(row.endswith("of the grid") for row in further)


def test_a_default_does_not_depend_on_the_load() -> None:
    """A workload of the spec does not draw calls that are nearer to others because both are under load."""
    rested, sustained = (default_entry(loaded(work), "sm90", Selection(None, "default", ()))[0] for work in ("1x4096", "1x4096:sustained"))
    for work in ("1x4096", "2x3000", "1x8000", "12x30000"):
        assert taken(sustained, work) == taken(rested, work)


def test_calls_with_one_query_token_and_with_as_many_as_the_workload_have_defaults() -> None:
    entry = default_entry(loaded("8x32768q4"), "sm90", Selection(None, "default", ()))[0]
    assert taken(entry, "8x32768q4") == taken(entry, "8x32768") != PLAIN


def test_unequal_lengths_count_by_their_mean() -> None:
    """The sequences of the first are as short as those of 64x512; the second ones have 15 times the tokens."""
    entry = entry_for("1x4096")
    assert taken(entry, "64x32-2048") == "n128.w2u1d2c4"
    assert taken(entry, "64x512-32768") == "n128.w4u4d1c2"


def test_where_all_defaults_are_plain_there_is_one_launch() -> None:
    entry = default_entry(spec("1x32768"), "sm80", Selection(None, "default", ()))[0]
    assert (entry.dispatch, len(entry.every_launch)) == (None, 1)


def test_the_entry_survives_being_written_and_says_why_a_launch_serves() -> None:
    entry = entry_for("1x4096")
    again = Entry.from_parts(entry.to_json(), {file: code.text for file, code in entry.codes.items()}, entry.resources())
    assert again.dispatch == entry.dispatch
    near, other, far = (serving(again, again.spec, parse(work)).why for work in ("1x4096", "60x600", "4096x512"))
    assert near == "the default for 1x4096"
    assert other == "the default for 64x512, 0.2 doublings away"
    assert far == "the plain schedule: the grid has no default within a doubling of it"


@pytest.mark.parametrize(("defaults", "problem"), [({"64x512": 9}, "names launch 9 of 1"), ({"many": 0}, "many")])
def test_defaults_of_launches_or_workloads_that_are_none_are_refused(defaults: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DispatchTable((), 0, (), (), defaults=defaults).check(1)
