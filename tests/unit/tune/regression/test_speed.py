"""Speed: a module that is not the registered one is timed, against the module that was tuned or against the recorded read fraction."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from kvgen.lower.backend import Source
from kvgen.measure.measurement import Job, Measurement
from kvgen.registry.entry import Entry
from kvgen.toolchain import Artifact, ArtifactCache, build
from tests.support.checking import Place, detail, told

SLOW = 'extern "C" int slow() { int n = 0; for (int i = 0; i < 99; ++i) n += i; return n; }\n'


def times(us: float, read_us: float | None, jobs: list[Job]) -> list[Measurement]:
    """The first job takes `us`, the second 10 µs."""
    first = jobs[0].artifact
    return [
        Measurement(
            "ok", "", job.schedule, job.workload, tuple((us if job.artifact == first else 10.0) + 0.001 * i for i in range(11)), read_us
        )
        for job in jobs
    ]


def never(jobs: list[Job]) -> list[Measurement]:
    raise AssertionError("nothing is to be timed")


def headers_changed(place: Place, addition: str) -> None:
    """As after a change of headers: the rendered text is the same, and what is compiled holds more."""

    def with_headers(source: Source, cache: ArtifactCache) -> Artifact:
        return build(replace(source, text=source.text + addition), cache)

    place.build(with_headers)


def recorded(entry: Entry, **changes: object) -> Entry:
    return replace(entry, timings=tuple(replace(timing, **changes) for timing in entry.timings))


def test_what_was_registered_is_not_timed(place: Place):
    place.interleaved(never)
    checked = place.check(speed=True)
    assert (told(checked)["speed"], detail(checked, "speed")) == ("good", "the same modules")


@pytest.mark.parametrize(("us", "status"), [(15.0, "regressed"), (10.0, "good"), (5.0, "good")])
def test_a_header_that_slows_the_kernel_down_regresses(place: Place, us: float, status: str):
    headers_changed(place, SLOW)
    place.interleaved(lambda jobs: times(us, None, jobs))
    checked = place.check(speed=True)
    assert told(checked)["source"] == "good", "the text is the same"
    assert told(checked)["speed"] == status
    assert "than the module it was tuned as" in detail(checked, "speed")


@pytest.mark.parametrize(("read_us", "status"), [(4.0, "regressed"), (4.6, "good")])
def test_without_the_old_module_the_read_fraction_decides(place: Place, read_us: float, status: str):
    shutil.rmtree(place.cache.root)
    place.entry = recorded(place.entry, us=10.0, read_us=5.0)
    headers_changed(place, SLOW)
    place.interleaved(lambda jobs: times(10.0, read_us, jobs))
    checked = place.check(speed=True)
    assert told(checked)["speed"] == status
    assert "50% when tuned" in detail(checked, "speed")


def test_without_old_module_and_recorded_read_it_is_said(place: Place):
    shutil.rmtree(place.cache.root)
    place.entry = recorded(place.entry, read_us=None)
    headers_changed(place, SLOW)
    place.interleaved(never)
    checked = place.check(speed=True)
    assert told(checked)["speed"] == "unable"
    assert "no read was timed beside it" in detail(checked, "speed")


def test_speed_is_of_the_device_that_it_was_tuned_on(place: Place):
    place.entry = replace(place.entry, device={"name": "Another CPU"})
    headers_changed(place, SLOW)
    place.interleaved(never)
    checked = place.check(speed=True)
    assert (told(checked)["speed"], checked.environment) == ("unable", False)
    assert "it was tuned on Another CPU, and this is" in detail(checked, "speed")
