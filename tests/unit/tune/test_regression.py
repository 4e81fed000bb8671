"""One entry checked: what regresses, what this machine cannot check, and what can be accepted."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.errors import CompileError, CompilerCrash, MeasureError
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.measurement import Job, Measurement
from kvgen.measure.worker import Worker
from kvgen.registry.entry import Entry, Launch
from kvgen.runtime import device
from kvgen.toolchain import Artifact, ArtifactCache, KernelResources, Resources
from tests.support.checking import LaterBackend, Place, detail, told
from tests.support.tuning import FakeBackend


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_what_is_as_it_was_is_good(place: Place):
    checked = place.check()
    assert told(checked) == {"source": "good", "resources": "good", "numerics": "good"}
    assert (checked.verdict, checked.reason) == ("good", "")
    assert checked.renewed == place.entry


def test_a_source_that_renders_differently_regresses_and_can_be_accepted(place: Place):
    place.later(comment="// a comment\n")
    assert place.check().verdict == "good"
    place.later(comment="int changed;\n")
    checked = place.check()
    assert checked.verdict == "regressed"
    assert "launch 0 (cpu threads=" in checked.reason
    assert checked.renewed is not None
    place.entry = checked.renewed
    assert not place.check().regressed
    assert place.entry.timings


def rendering(place: Place, error: Exception) -> None:
    """Let every launch of the entry raise an exception when it is rendered."""

    def broken(*_: object) -> Source:
        raise error

    place.patch.setattr(LaterBackend, "lower", broken)


def test_what_renders_no_more_regresses_and_the_rest_is_not_checked(place: Place):
    rendering(place, ZeroDivisionError("in a template"))
    checked = place.check(speed=True)
    assert told(checked) == {"source": "regressed", "resources": "unable", "numerics": "unable", "speed": "unable"}
    assert "it does not render any more: in a template" in checked.reason
    assert checked.renewed is None


def test_more_registers_or_spills_regress_and_fewer_are_a_change(place: Place):
    kernels = {"attend": KernelResources(100, 0, 1024)}
    launches = (replace(launch, resources=Resources("nvcc", 1.0, kernels)) for launch in place.entry.launches)
    place.entry = replace(place.entry, launches=tuple(launches))
    for registers, spills, status in ((100, 0, "good"), (120, 0, "regressed"), (100, 8, "regressed"), (90, 0, "changed")):
        place.resources(registers, spills)
        checked = place.check()
        assert told(checked)["resources"] == status
        assert checked.regressed == (status == "regressed")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        CompilerCrash("g++ was ended by SIGKILL"),
        CompileError("g++ failed with exit status 1", "internal compiler error: in foo"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_of_this_machine_is_no_regression(place: Place, error: Exception):
    def fail(source: Source, cache: ArtifactCache) -> Artifact:
        raise error

    place.build(fail)
    checked = place.check()
    assert told(checked) == {"source": "good", "resources": "unable", "numerics": "unable"}
    assert (checked.verdict, checked.environment) == ("unable", True)
    assert str(error) in checked.reason
    assert checked.renewed is None


def test_what_another_tilelang_lowered_is_not_compared(place: Place):
    launches = tuple(replace(launch, backend="tilelang") for launch in place.entry.launches)
    place.entry = replace(place.entry, launches=launches, toolchain={"tilelang": "0.1.1"})
    checked = place.check()
    assert (checked.verdict, checked.environment) == ("unable", True)
    assert "was lowered by TileLang 0.1.1, and the one here is" in checked.reason


def test_wrong_numbers_regress(place: Place):
    place.numbers(Measurement("wrong", "attend of long: relative l2 is 0.5"))
    checked = place.check()
    assert told(checked)["numerics"] == "regressed"
    assert "relative l2 is 0.5" in checked.to_json()["findings"][2]["detail"]
    assert checked.renewed is None, "what is wrong cannot be accepted"


def test_every_launch_is_verified_at_all_its_workloads(place: Place):
    place.check()
    assert {job.check is not None and job.timing is None for job in place.jobs} == {True}
    verified = [(job.schedule, job.workload.key) for job in place.jobs]
    assert verified == [(place.entry.schedule(launch), key) for launch in place.entry.launches for key in launch.workloads]
    place.entry = replace(place.entry, launches=(replace(place.entry.launches[0], workloads=("1x128", "2x512")),))
    place.jobs.clear()
    place.check()
    assert [(job.workload.key, job.check.workloads_only) for job in place.jobs] == [("1x128", False), ("2x512", True)]


def test_the_module_that_was_tuned_is_verified_where_another_one_is_compiled_now(place: Place):
    """`get_kernel` serves the one that the entry names."""
    tuned = {place.cache.get(launch.artifact).path for launch in place.entry.launches}  # type: ignore[union-attr]
    place.build(lambda source, cache: Artifact("id", Path("other"), Resources("g++ 99", 1.0), sha256="other"))
    place.check()
    assert {job.artifact for job in place.jobs} == {*tuned, Path("other")}


def test_further_launches_are_verified(place: Place):
    """Also one that the spec's first workload has too few tokens for: it serves others."""
    schedule = Schedule("cpu", place.entry.layout, Params(threads=8))  # which no workload of the entry has blocks for
    further = Launch("cpu", schedule.launch, (), FakeBackend().lower(place.entry.spec, schedule, "cpu").fingerprint)
    place.entry = replace(place.entry, launches=(*place.entry.launches, further))
    checked = place.check()
    assert (checked.verdict, checked.reason) == ("good", "")
    assert place.jobs[-1].schedule.launch["threads"] == 8
    assert place.jobs[-1].workload == place.entry.spec.workloads[0]


def timed(entry: Entry, **changes: object) -> Entry:
    return replace(entry, timings=tuple(replace(timing, **changes) for timing in entry.timings))  # type: ignore[arg-type]


def test_a_worker_that_does_not_start_or_lacks_memory_is_no_regression(place: Place):
    place.numbers(Measurement("oom", "it used up 100 MiB of host memory during verify"))
    assert (place.check().verdict, place.check().environment) == ("unable", True)

    def fail(worker: Worker, job: object) -> Measurement:
        raise MeasureError("a worker process did not start")

    place.patch.setattr(Worker, "run", fail)
    checked = place.check()
    assert (checked.verdict, checked.environment) == ("unable", True)
    assert checked.renewed is None, "this machine has the device, and did not verify it"


@pytest.mark.parametrize(("capability", "reason"), [(None, "no NVIDIA GPU is visible"), ((10, 0), "which has compute capability 10.0")])
def test_without_the_device_numbers_are_not_checked(place: Place, capability: tuple[int, int] | None, reason: str):
    place.patch.setattr(device, "gpu_capability", lambda: capability)
    place.entry = replace(place.entry, arch="sm90")
    checked = place.check()
    assert told(checked)["numerics"] == "unable"
    assert (checked.verdict, checked.environment) == ("unable", False)
    assert reason in checked.reason
    assert place.jobs == []
    assert checked.renewed is not None


# --- speed: a module that is not the registered one is timed beside the read roofline -----------------------------------


def timed_as(place: Place, us: float, read_us: float | None) -> None:
    """The entry says that it reads at half of the read's speed; a module of today takes `us` beside a read of `read_us`."""
    place.entry = timed(place.entry, us=10.0, read_us=5.0, samples=())

    def interleave(jobs: list[Job]) -> list[Measurement]:
        return [Measurement("ok", "", job.schedule, job.workload, (us,), read_us) for job in jobs]

    place.interleaved(interleave)


def never(jobs: list[Job]) -> list[Measurement]:
    raise AssertionError("nothing is to be timed")


@pytest.mark.parametrize(("us", "status"), [(15.0, "regressed"), (10.9, "good"), (5.0, "good")])
def test_a_compiler_that_slows_the_kernel_down_regresses(place: Place, us: float, status: str):
    timed_as(place, us, 5.0)
    place.resources(100, 0)
    checked = place.check(speed=True)
    assert told(checked)["speed"] == status
    assert "50% when tuned" in detail(checked, "speed")


def test_speed_is_compared_only_with_what_was_timed_on_this_device(place: Place):
    place.interleaved(never)
    checked = place.check(speed=True)
    assert (told(checked)["speed"], detail(checked, "speed")) == ("good", "the modules that won a workload are the same")
    place.resources(100, 0)
    entry, place.entry = place.entry, timed(place.entry, read_us=None)
    assert "no read was timed beside it" in detail(place.check(speed=True), "speed")
    place.entry = replace(entry, device={"name": "Another CPU"})
    checked = place.check(speed=True)
    assert (told(checked)["speed"], checked.environment) == ("unable", False)
    assert "it was tuned on Another CPU, and this is" in detail(checked, "speed")
