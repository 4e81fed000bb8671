"""Where nothing is tuned, each call takes the default of the least modelled time."""

from __future__ import annotations

import pytest

from benchmarks.gpu_words import schedule_word, schedules_of, spec_of, workload_of
from kvgen.lower.backend import get_backend
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection, serving, serving_entry
from kvgen.spec import KernelSpec
from kvgen.spec.workloads import Timing, parse

CUDA = get_backend("cuda")
PLAIN, CLUSTERS, WIDE, PAIRS = "n128.w8u4d1c1", "n128.w8u1d2c1.cl2", "n128.w8u1d2c1.cl8", "n128.w4u1d2c2"


def spec(work: str, words: str = "k4v4") -> KernelSpec:
    return spec_of(words, "sm90", [workload_of(one) for one in work.split(",")])


def entry_for(work: str, words: str = "k4v4") -> Entry:
    return serving_entry(spec(work, words), "sm90", Selection(None, "default", ()))[0]


def taken(entry: Entry, work: str) -> str:
    """The word of the schedule that a call takes."""
    return schedule_word(entry.schedule(serving(entry, entry.spec, parse(work)).launch))


@pytest.mark.parametrize(
    ("work", "schedule"),
    [
        ("1x2048", WIDE),
        ("8x30000", CLUSTERS),
        ("9x30000", PAIRS),
        ("16x8192", PLAIN),
        ("64x1000", PAIRS),
        ("64x32768", PAIRS),
        ("64x64-4096", PAIRS),
    ],
)
def test_a_call_takes_the_default_that_suits_its_heads_and_lengths(work: str, schedule: str) -> None:
    """Whatever workload the spec names. The clusters of two that serve 8 sequences of 32K would take two waves for 9."""
    for named in ("1x4096", "32x8192"):
        assert taken(entry_for(named), work) == schedule


def test_a_gpu_without_clusters_has_one_default() -> None:
    entry = serving_entry(spec("1x32768"), "sm80", Selection(None, "default", ()))[0]
    assert len(entry.launches) == 1
    assert taken(entry, "64x1000") == PLAIN


def test_a_tuned_launch_serves_its_workload_and_a_default_the_others() -> None:
    works = spec("8x32768")
    (schedule,) = schedules_of("n128.w8u2d2c1", CUDA, works, "sm90")
    defaults = CUDA.defaults(works, "sm90")
    tuned = (works.workloads[0], schedule, CUDA.lower(works, schedule, "sm90"), None)
    more = [(works.workloads[0], one, CUDA.lower(works, one, "sm90"), None) for one in defaults]
    entry = Entry.of(works, "sm90", [tuned], more, device={"name": "a GPU"}, timings=(Timing(works.workloads[0], 10.0, read_us=9.0),))
    told = serving(entry, works, parse("8x32768"))
    assert (told.index, told.why, told.timing.read_fraction) == (0, "tuned for 8x32768", 0.9)
    assert [taken(entry, work) for work in ("1x2048", "64x1000")] == [WIDE, PAIRS]
