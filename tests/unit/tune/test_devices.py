"""Several devices: workers start together, an artifact is verified once, and no device waits while there is something to measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any

import pytest
from filelock import FileLock

from kvgen.errors import MeasureError
from kvgen.lower.backend import Source
from kvgen.measure.measurement import Job, Measurement
from kvgen.registry import Store
from kvgen.spec import Workload
from kvgen.toolchain import Artifact, ArtifactCache, Resources
from kvgen.tune import compile_queue, isolated_runner
from kvgen.tune.budget import Budget
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.isolated_runner import IsolatedRunner
from kvgen.tune.measuring import Devices
from kvgen.tune.tuner import tune
from tests.support.specs import kv4_spec
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec

DEVICES = 4
PATIENCE_S = 60.0
ARTIFACT = Artifact("artifact", Path("/nothing"), Resources("none", 0.0))
SCHEDULE = FakeBackend().default(tiny_spec(), "cpu")


@dataclass
class FakeWorkers:
    """What the workers of all devices were asked to do."""

    outcome: Callable[[Job], Measurement] = lambda job: Measurement("ok", accuracy={"relative_l2": 1e-4})
    together: Barrier = field(default_factory=lambda: Barrier(DEVICES))
    whole: list[str] = field(default_factory=list)
    part: list[str] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def worker(self, memory_bytes: int, environment: dict[str, str]) -> FakeWorkers:
        self.environments.append(environment)
        return self

    def start(self, device: str) -> None:
        self.together.wait(PATIENCE_S)  # breaks unless all devices start at the same time

    def run(self, job: Job, timeout_s: float) -> Measurement:
        assert job.check is not None
        with self.lock:
            (self.part if job.check.workloads_only else self.whole).append(job.workload.key)
        self.together.wait(PATIENCE_S)
        return self.outcome(job)

    def close(self) -> None: ...


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> FakeWorkers:
    fake = FakeWorkers()
    monkeypatch.setattr(isolated_runner, "Worker", fake.worker)
    monkeypatch.setattr(isolated_runner, "visible_gpus", lambda: list("0123"))
    monkeypatch.setattr(isolated_runner, "named_gpus", lambda devices: [str(device) for device in devices])
    monkeypatch.setattr(isolated_runner, "fingerprint", lambda target: {})
    monkeypatch.setattr(isolated_runner, "compile_read_roofline", lambda target: None)
    return fake


def _runner(locks: Path) -> IsolatedRunner:
    return IsolatedRunner(kv4_spec(), "sm90", locks, range(DEVICES))


def _measured(runner: IsolatedRunner) -> list[Record]:
    """One artifact, on all devices at once, each at a workload of its own."""
    works = [Workload(batch=1 + device, kv_len=1024) for device in range(DEVICES)]
    with ThreadPoolExecutor(DEVICES) as pool:
        jobs = [pool.submit(runner.measure, Candidate(SCHEDULE, work), ARTIFACT, device) for device, work in enumerate(works)]
        return [job.result() for job in jobs]


def test_all_workers_start_at_the_same_time(workers: FakeWorkers, tmp_path: Path):
    _runner(tmp_path).ready()
    assert not workers.together.broken


def test_workers_share_the_processors(workers: FakeWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGEN_MACHINE", '{"cores": 64}')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _runner(tmp_path)
    assert [(one["CUDA_VISIBLE_DEVICES"], one["OMP_NUM_THREADS"]) for one in workers.environments] == [(n, "16") for n in "0123"]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _runner(tmp_path)
    assert workers.environments[-1]["OMP_NUM_THREADS"] == "2"


def test_a_thread_that_waits_for_a_device_gives_up_when_the_run_ends(workers: FakeWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process holds the device, which may have another name there. Without this, Ctrl-C waits for it, and a worker is started after
    all.
    """
    monkeypatch.setattr("kvgen.tune.isolated_runner.gpu_uuid", lambda name: f"GPU-{name}")
    runner = _runner(tmp_path)
    with ThreadPoolExecutor(1) as pool, FileLock(tmp_path / "measure-GPU-0.lock"):
        waiting = pool.submit(runner.measure, Candidate(SCHEDULE, Workload(batch=1, kv_len=1024)), ARTIFACT, 0)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        runner.close()
        with pytest.raises(MeasureError, match="the run has ended"):
            waiting.result(PATIENCE_S)
    assert workers.whole == workers.part == []


def test_an_artifact_is_verified_once_for_all_devices(workers: FakeWorkers, tmp_path: Path):
    workers.outcome = lambda job: Measurement("ok", samples=(5.0,), accuracy={"relative_l2": 1e-4})
    records = _measured(_runner(tmp_path))
    assert (len(workers.whole), len(workers.part)) == (1, DEVICES - 1)
    assert all(record.ok for record in records)


def test_no_record_of_a_wrong_artifact_is_good(workers: FakeWorkers, tmp_path: Path):
    def outcome(job: Job) -> Measurement:
        right = job.check is not None and job.check.workloads_only
        return Measurement("ok", samples=(5.0,)) if right else Measurement("wrong", "a code differs")

    workers.outcome = outcome
    workers.together = Barrier(1)
    records = _measured(_runner(tmp_path))
    assert {record.kind for record in records} == {"wrong"}
    assert sorted(workers.whole) == sorted(f"{1 + device}x1024" for device in range(DEVICES))


def test_an_idle_device_takes_what_is_compiled_while_another_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first schedule is measured at both workloads until a third device has measured another, which is compiled meanwhile."""
    begun, other = Event(), Event()
    first: list[Source] = []

    def build(self: Any, source: Source) -> Artifact:
        if first and source.id != first[0].id:
            assert begun.wait(PATIENCE_S)
            time.sleep(0.0 if other.is_set() else 0.5)  # until the tuner waits for the measurement
        first.append(source)
        return Artifact(source.id, Path("/nothing"), Resources("none", 0.0))

    class Runner(FakeRunner):
        def measure(self, candidate: Candidate, artifact: Artifact, device: int) -> Record:
            begun.set()
            if artifact.id != first[0].id:
                other.set()
            assert other.wait(PATIENCE_S)
            return super().measure(candidate, artifact, device)

    monkeypatch.setattr(compile_queue.CompileQueue, "build", build)
    runner = Runner(devices=3, exclusive=False)
    place: dict[str, Any] = {"cache": ArtifactCache(tmp_path / "cache"), "store": Store(tmp_path / "registry")}
    assert tune(tiny_spec(), "cpu", Budget(seconds=600.0), backends=[FakeBackend()], runner=runner, **place).entry.layout["block"] == 32


def test_a_device_goes_on_with_the_layout_and_workload_that_it_holds():
    devices = Devices(2)
    small, large = (Candidate(SCHEDULE, Workload(batch=1, kv_len=kv_len)) for kv_len in (128, 512))
    assert devices.take(small) == 0
    assert devices.take(large) == 1
    devices.idle = [1, 0]
    assert devices.take(small) == 0
    assert devices.idle == [1]
    assert devices.take(small) == 1  # better than to wait


def test_compilers_without_work_begin_with_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While the first round is measured, schedules of no candidate of it are compiled; on a CPU compilers rest."""
    built: list[str] = []

    def build(self: Any, source: Source) -> Artifact:
        built.append(source.id)
        return Artifact(source.id, Path("/nothing"), Resources("none", 0.0))

    class Runner(FakeRunner):
        def measure(self, candidate: Candidate, artifact: Artifact, device: int) -> Record:
            deadline = time.monotonic() + (0.0 if self.exclusive or self.measured else PATIENCE_S)
            while len(set(built)) <= round_one and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(len(set(built)))
            return super().measure(candidate, artifact, device)

    monkeypatch.setattr(compile_queue.CompileQueue, "build", build)
    monkeypatch.setenv("KVGEN_MACHINE", '{"cores": 16}')
    round_one = 0
    for exclusive in (True, False):
        seen: list[int] = []
        built.clear()
        place: dict[str, Any] = {"cache": ArtifactCache(tmp_path / f"{exclusive}"), "store": Store(tmp_path / f"registry-{exclusive}")}
        budget = Budget(seconds=600.0)
        tune(tiny_spec(), "cpu", budget, backends=[FakeBackend()], runner=Runner(exclusive=exclusive), **place)
        round_one = round_one or seen[0]
    assert seen[0] > round_one
