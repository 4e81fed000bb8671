"""Which entry answers, and the reason of every other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgen.registry.select import select
from kvgen.registry.store import Store
from kvgen.spec import Workload, load_spec
from kvgen.spec.workloads import distance

HERE = {"name": "Test CPU", "threads": 2}


def _workloads(*shapes: tuple[int, int]) -> tuple[Workload, ...]:
    return tuple(Workload(batch=batch, kv_len=kv_len) for batch, kv_len in shapes)


def _wanting(spec, *shapes: tuple[int, int]):
    return load_spec({**spec.to_json(), "workloads": [work.to_json() for work in _workloads(*shapes)]})


def _select(spec, *stores, device=None, workload=None):
    return select(spec, "cpu", workload, stores=stores, device=device or HERE)


@pytest.mark.parametrize("wanted", [(64, 1024), (4, 8192), (1, 100)])
def test_the_entry_is_the_one_at_the_least_distance(store, make_entry, spec, wanted):
    entries = [make_entry((shape,)) for shape in ((1, 4096), (1, 32768), (8, 32768), (32, 8192))]
    for entry in entries:
        store.put(entry)
    work = Workload(batch=wanted[0], kv_len=wanted[1])
    chosen = _select(spec, store, workload=work).entry
    assert distance(chosen.spec.workloads[0], work) == min(distance(entry.spec.workloads[0], work) for entry in entries)


def test_an_entry_must_cover_every_workload_to_be_exact(store, make_entry, spec):
    store.put(make_entry(((1, 4096),)))
    both = make_entry(((1, 4096), (1, 32768)))
    store.put(both)
    wide = _wanting(spec, (1, 4096), (1, 32768))
    assert _select(wide, store).entry == both
    assert _select(_wanting(spec, (1, 8192), (1, 4096)), store).how == "nearest"


def test_of_entries_that_cover_a_spec_the_one_of_the_fewest_other_workloads_serves(store, make_entry, spec):
    """Whatever its file is called: what was built for exactly these workloads is not hidden by what has them among others."""
    whole, own = make_entry(((1, 4096), (8, 32768), (64, 512))), make_entry(((8, 32768),))
    for entries in ((whole, own), (own, whole)):
        for entry in entries:
            store.put(entry)
        selection = _select(_wanting(spec, (8, 32768)), store)
        assert (selection.how, selection.entry) == ("exact", own)
        assert any(line.endswith("not needed: it was tuned for more other workloads") for line in selection.why)
    assert _select(_wanting(spec, (8, 32768), (64, 512)), store).entry == whole


def test_no_back_end_means_none_with_the_reasons_of_those_for_the_target(store, spec):
    whole = load_spec({**spec.to_json(), "key": {"bits": 4, "group": 4096}})
    selection = _select(whole, store)
    assert (selection.how, selection.entry) == ("none", None)
    assert selection.refusals == ("cpu: whole groups need blocks of 4096 tokens, more than 2048",)
    assert all("nothing for this format" in line for line in selection.why)


def test_an_entry_of_another_device_serves_with_a_caution(store, make_entry, spec):
    store.put(make_entry(device="Other CPU"))
    selection = _select(spec, store)
    assert selection.how == "exact"
    assert selection.cautions == ("tuned on Other CPU, and this is Test CPU",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda make: replace(make(), layout_id="0123456789abcdef"), "it was made for another version of the packed layout"),
        (lambda make: make(device="Other CPU", launch=16), "its schedule is not for this machine: tile = 16 is not one of 1, 2"),
        (lambda make: make(((1, 4096), (1, 32768)), device="Other CPU", names=("cpu", "tilelang")), "tile = 2 is not one of 8"),
    ],
)
def test_what_does_not_fit_is_passed_over_by_reason(store, make_entry, spec, change, reason):
    store.put(change(make_entry))
    selection = _select(spec, store)
    assert selection.entry is None
    assert any(reason in line for line in selection.why)


def test_this_device_outranks_a_better_match_from_another(store, make_entry, spec):
    store.put(make_entry(device="Other CPU"))
    own = make_entry(((4, 4096),))
    store.put(own)
    selection = _select(spec, store)
    assert selection.entry == own
    assert any("not needed: tuned on Other CPU" in line for line in selection.why)


def test_what_was_never_measured_serves_with_a_caution_where_nothing_else_was_tuned_here(store, make_entry, spec):
    store.put(replace(make_entry(), timings=()))
    assert _select(spec, store).cautions == ("its schedules were compiled and never measured",)
    tuned = make_entry(((4, 4096),))
    store.put(tuned)
    selection = _select(spec, store)
    assert (selection.entry, selection.cautions) == (tuned, ())
    assert any("not needed: compiled on Test CPU" in line for line in selection.why)


def test_a_store_that_cannot_be_read_is_passed_over_with_a_caution(tmp_path, store, make_entry, spec):
    (tmp_path / "file").touch()
    store.put(make_entry())
    broken = Store(tmp_path / "file" / "registry", "site")
    answer = select(spec, "cpu", stores=[broken, store], device={"name": "Test CPU", "threads": 2})
    assert answer.how == "exact"
    assert answer.why[0].startswith("site: passed over: cannot list ")
    assert "the site registry was passed over: cannot list" in answer.cautions[0]


def test_changed_headers_mean_rendering_anew_unless_the_schedule_is_gone(store, make_entry, spec, other_header):
    store.put(make_entry())
    other_header("int  one;  // with a comment\n")
    assert _select(spec, store).cautions == ()
    other_header("int two;\n")
    selection = _select(spec, store)
    assert selection.how == "exact"
    assert any("rendered anew" in caution for caution in selection.cautions)
    other_header("int one;\n")
    store.put(make_entry(launch=16))
    assert _select(spec, store).how == "exact"
    other_header("int two;\n")
    selection = _select(spec, store)
    assert selection.how == "default"
    assert any("its schedule is gone: tile = 16 is not one of 1, 2" in line for line in selection.why)
