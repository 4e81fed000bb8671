"""The entry of a format that nothing is tuned for: its default serves calls near the spec's workloads, the plain schedule all others."""

from __future__ import annotations

from benchmarks.gpu_words import schedule_word, spec_of, workload_of
from kvgen.lower.backends import get_backend
from kvgen.registry.default import default_entry
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.registry.serving import serving
from kvgen.spec import KernelSpec

CUDA = get_backend("cuda")


def spec(work: str) -> KernelSpec:
    return spec_of("k4v4", "sm90", [workload_of(one) for one in work.split(",")])


def entry_for(work: str) -> Entry:
    return default_entry(spec(work), "sm90", Selection(None, "default", ()))[0]


def taken(entry: Entry, work: str) -> str:
    """The word of the schedule that a call takes."""
    found = serving(entry, spec(work), workload_of(work))
    return schedule_word(entry.schedule(found.launch))


def test_clusters_serve_only_the_calls_that_they_are_for() -> None:
    entry = entry_for("1x4096")
    assert len(entry.codes) == 2
    assert taken(entry, "1x4096") == taken(entry, "1x2048") == "n128.w8u1d2c1.cl8"
    assert taken(entry, "64x512") == taken(entry, "8x32768") == taken(entry, "1x131072") == schedule_word(CUDA.plain(entry.spec, "sm90"))


def test_every_workload_of_the_spec_has_a_default_of_its_own() -> None:
    entry = entry_for("1x4096,8x32768,32x8192")
    assert len(entry.codes) == 4
    assert taken(entry, "1x4096") == "n128.w8u1d2c1.cl8"
    assert taken(entry, "8x32768") == taken(entry, "8x40000") == "n128.w8u4d1c1.cl2"
    assert taken(entry, "32x8192") == "n128.w4u4d1c2"
    assert taken(entry, "128x32768") == "n128.w8u4d1c1"


def test_a_default_that_is_plain_is_one_launch() -> None:
    entry = entry_for("1x32768")
    assert (entry.dispatch, len(entry.every_launch)) == (None, 1)


def test_the_entry_survives_being_written_and_says_why_a_launch_serves() -> None:
    entry = entry_for("1x4096")
    assert entry.dispatch is not None
    entry.dispatch.check(len(entry.launches))
    near, far = (serving(entry, spec(work), workload_of(work)).why for work in ("1x4096", "64x512"))
    assert near == "the default for 1x4096"
    assert far == "the plain schedule: no workload of the spec is within a doubling of it"
