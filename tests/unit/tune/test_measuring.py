"""Workers of several devices: they verify a module once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import pytest
from filelock import FileLock

from kvgen.errors import MeasureError
from kvgen.measure.measurement import Candidate, Job, Measurement
from kvgen.spec import Workload
from kvgen.toolchain import Artifact, Resources
from kvgen.tune import measuring
from kvgen.tune.measuring import Runner
from tests.support.specs import kv4_spec
from tests.support.tuning import FakeBackend, tiny_spec

DEVICES = 4
PATIENCE_S = 60.0
ARTIFACT = Artifact("artifact", Path("/nothing"), Resources("none", 0.0))
SCHEDULE = FakeBackend().default(tiny_spec(), "cpu")


@dataclass
class FakeWorkers:
    """What the workers of all devices were asked to do."""

    outcome: Callable[[Job], Measurement] = lambda job: Measurement("ok", samples=(5.0,), accuracy={"relative_l2": 1e-4})
    whole: list[str] = field(default_factory=list)
    part: list[str] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def worker(self, memory_bytes: int, environment: dict[str, str]) -> FakeWorkers:
        self.environments.append(environment)
        return self

    def run(self, job: Job, timeout_s: float, seconds: float) -> Measurement:
        assert job.check is not None
        with self.lock:
            (self.part if job.check.workloads_only else self.whole).append(job.workload.key if job.workload else "")
        return self.outcome(job)

    def close(self) -> None: ...


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> FakeWorkers:
    fake = FakeWorkers()
    monkeypatch.setattr(measuring, "Worker", fake.worker)
    monkeypatch.setattr(measuring, "visible_gpus", lambda: list("0123"))
    monkeypatch.setattr(measuring, "named_gpus", lambda devices: [str(device) for device in devices])
    monkeypatch.setattr(measuring, "gpu_uuid", lambda name: f"GPU-{name}")
    monkeypatch.setattr(measuring, "fingerprint", lambda target: {})
    return fake


def measured(locks: Path) -> list[Measurement]:
    """One module, on all devices at once, each at a workload of its own."""
    four = Runner(kv4_spec(), "sm90", locks, range(DEVICES))
    works = [Workload(batch=1 + device, kv_len=1024) for device in range(DEVICES)]
    with ThreadPoolExecutor(DEVICES) as pool:
        jobs = [pool.submit(four.measure, Candidate(SCHEDULE, work), ARTIFACT, device) for device, work in enumerate(works)]
        return [job.result() for job in jobs]


def test_workers_share_the_processors(workers: FakeWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGEN_MACHINE", '{"cores": 64}')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Runner(kv4_spec(), "sm90", tmp_path, range(DEVICES))
    assert [(one["CUDA_VISIBLE_DEVICES"], one["OMP_NUM_THREADS"]) for one in workers.environments] == [(n, "16") for n in "0123"]


def test_a_module_is_verified_once_for_all_devices(workers: FakeWorkers, tmp_path: Path):
    assert all(record.ok for record in measured(tmp_path))
    assert (len(workers.whole), len(workers.part)) == (1, DEVICES - 1)


def test_no_record_of_a_wrong_module_is_good(workers: FakeWorkers, tmp_path: Path):
    workers.outcome = lambda job: (
        Measurement("wrong", "a code differs") if job.check and not job.check.workloads_only else Measurement("ok")
    )
    assert {record.kind for record in measured(tmp_path)} == {"wrong"}


def test_a_thread_that_waits_for_a_device_gives_up_when_the_build_ends(workers: FakeWorkers, tmp_path: Path):
    """Another process holds the device. Without this, Ctrl-C waits for it, and a worker is started after all."""
    one = Runner(kv4_spec(), "sm90", tmp_path, [0])
    with ThreadPoolExecutor(1) as pool, FileLock(tmp_path / "measure-GPU-0.lock"):
        waiting = pool.submit(one.measure, Candidate(SCHEDULE, Workload(batch=1, kv_len=1024)), ARTIFACT, 0)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        one.close()
        with pytest.raises(MeasureError, match="the run has ended"):
            waiting.result(PATIENCE_S)
    assert workers.whole == workers.part == []
