"""Where nothing was measured, each call takes the default of the grid's workload nearest to it, and calls beyond the grid the plain
schedule: all calls of a format that nothing is tuned for, and those that are far from what an entry was tuned for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_words import schedule_word, schedules_of, spec_of, workload_of
from kvgen import validated
from kvgen.cli.launches import rows
from kvgen.lower.backends import get_backend
from kvgen.registry import default
from kvgen.registry.default import default_entry, serving_entry, with_defaults
from kvgen.registry.dispatch import DispatchTable
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.registry.serving import serving, shares
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.timing import Timing
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
        ("8x30000", "n128.w8u4d1c1.cl2"),
        ("9x30000", "n128.w8u4d1c1"),
        ("64x512", "n128.w2u1d2c4"),
        ("64x32768", "n128.w4u4d1c2"),
        ("1x131072", PLAIN),
        ("4096x512", PLAIN),
        ("1x4194304", PLAIN),
    ],
)
def test_a_call_takes_the_default_of_the_traffic_around_it_and_beyond_the_grid_the_plain_schedule(work: str, schedule: str) -> None:
    """The spec names one workload; each launch serves only the calls that it is for. The clusters of two that serve 8 sequences of 32K
    would take two waves for 9."""
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


# --- beside an entry that was tuned at its workloads alone -------------------------------------------------------------


TUNED = "n128.w8u2d2c1"
"""The default of no workload."""


def tuned(*works: str, word: str = TUNED) -> Entry:
    """An entry without a dispatch table."""
    tuned_for = loaded(works[0]) if "sustained" in works[0] else spec(",".join(works))
    (schedule,) = schedules_of(word, CUDA, tuned_for, "sm90")
    launches = [(work, schedule, CUDA.lower(tuned_for, schedule, "sm90"), None) for work in tuned_for.workloads]
    times = tuple(Timing(work, 10.0, read_us=9.0, default_us=12.0) for work in tuned_for.workloads)
    return Entry.of(tuned_for, "sm90", launches, device={"name": "a GPU"}, timings=times)


@pytest.mark.parametrize(
    ("work", "schedule"),
    [
        ("1x4096", TUNED),
        ("1x5000", TUNED),
        ("8x32768", TUNED),
        ("1x8192", None),
        ("64x1000", None),
        ("64x32768", None),
        ("8x1000-32768", None),
        ("1x4194304", PLAIN),
    ],
)
def test_far_from_what_an_entry_was_tuned_for_the_defaults_serve(work: str, schedule: str | None) -> None:
    """None: what serves where nothing is tuned."""
    entry = with_defaults(tuned("1x4096", "8x32768"))
    assert taken(entry, work) == (schedule or taken(entry_for("1x4096"), work))


def test_why_tells_what_was_measured_from_what_was_not() -> None:
    entry = with_defaults(tuned("1x4096", "8x32768"))
    at, near, far, beyond = (serving(entry, entry.spec, parse(work)) for work in ("1x4096", "1x5000", "60x600", "4096x512"))
    assert (at.why, at.us, at.read_fraction, at.default_us, at.index) == ("measured at 1x4096", 10.0, 0.9, 12.0, 0)
    assert (near.why, near.us, near.index) == ("tuned for 1x4096, 0.3 doublings away", None, 0)
    assert (far.why, far.us) == ("the default for 64x512, 0.2 doublings away", None)
    assert (beyond.why, beyond.us) == ("the plain schedule: the grid has no default within a doubling of it", None)
    further = [row[0] for row in rows(entry)[len(entry.launches) :]]
    assert all(row.endswith(("of the grid", "all other calls")) for row in further)


def test_why_names_the_workload_whose_launch_serves_and_not_a_nearer_one() -> None:
    """Clusters of two serve 8 x 32K; for 9 sequences that of 16 x 16K serves, with fuller waves."""
    for entry in (with_defaults(tuned("1x4096")), entry_for("1x4096")):
        told = serving(entry, entry.spec, parse("9x30000"))
        assert told.why == (
            "the default for 16x16384, 0.9 doublings away; it fills the GPU more evenly than that of 8x32768, which is nearest"
        )
        assert told.launch == serving(entry, entry.spec, parse("16x16384")).launch


def test_a_launch_tuned_under_load_keeps_its_calls() -> None:
    entry = with_defaults(tuned("1x4096:sustained"))
    untuned = default_entry(loaded("1x4096"), "sm90", Selection(None, "default", ()))[0]
    assert [taken(entry, work) for work in ("1x4096", "1x6000", "64x1024")] == [TUNED, TUNED, taken(untuned, "64x1024")]


def test_the_tuned_launches_keep_their_numbers_and_files() -> None:
    before = tuned("1x4096", "8x32768")
    after = with_defaults(before)
    assert after.launches == before.launches
    assert before.codes.items() <= after.codes.items()
    assert after.key == before.key
    assert after.dispatch is not None
    after.dispatch.check(len(after.launches))
    assert all(launch.file in after.codes for launch in after.every_launch)


def test_a_default_that_was_tuned_is_no_second_launch() -> None:
    entry = with_defaults(tuned("1x4096", word="n128.w8u4d1c1.cl2"))
    words = [schedule_word(entry.schedule(launch)) for launch in entry.every_launch]
    assert len(set(words)) == len(words)
    assert taken(entry, "8x32768") == "n128.w8u4d1c1.cl2"


def test_entries_that_need_no_defaults_stay_as_they_are() -> None:
    untuned = entry_for("1x4096")
    whole = with_defaults(tuned("1x4096"))
    other = tuned("1x4096", word="n256.w8u2d2c1")
    assert [with_defaults(entry) for entry in (untuned, whole, other)] == [untuned, whole, other]


def test_a_selection_has_the_entry_that_serves() -> None:
    stored = tuned("1x4096")
    entry, selection = serving_entry(stored.spec, "sm90", Selection(stored, "exact", ()))
    assert selection.entry == entry == with_defaults(stored)
    assert serving_entry(stored.spec, "sm90", Selection(None, "default", ()))[1].entry is None


def test_a_record_of_defaults_is_for_processors_with_the_same_vector_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(default, "recall", lambda _, source: asked.append(source) or default.Beside())
    stored = replace(tuned("1x4096"), arch="cpu")
    for bits in (128, 512, 512):
        monkeypatch.setenv("KVGEN_MACHINE", f'{{"vector_bits": {bits}}}')
        assert with_defaults(stored) == stored
    assert asked[0] != asked[1] == asked[2]


def test_what_was_rendered_is_recorded_and_serves_again_until_templates_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))
    stored = tuned("1x4096", "8x32768")
    first = with_defaults(stored)
    monkeypatch.setattr(default, "_beside", lambda *_: pytest.fail("it was rendered again"))
    assert with_defaults(stored) == first
    assert with_defaults(replace(stored, provenance={"date": "2026-01-01"})).dispatch == first.dispatch
    monkeypatch.setattr(validated, "_code", lambda: "other templates")
    with pytest.raises(pytest.fail.Exception, match="rendered again"):
        with_defaults(stored)
