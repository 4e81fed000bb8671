from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.measure.worker import Worker, _Process
from kvgen.spec import Workload
from kvgen.verify import CheckPolicy
from tests.support.naive import naive_artifact, naive_schedule, naive_spec

TIMING = TimingPolicy(cold_bytes=1 << 18, seconds=0.01, warmup_seconds=0.0, samples=5)
MEMORY = 512 << 20


def job(fault: str | None = None, timing: TimingPolicy | None = TIMING) -> Job:
    spec = naive_spec()
    policy = CheckPolicy(long_tokens=200, most_tokens=1 << 11)
    return Job(spec, naive_schedule(), "cpu", naive_artifact(fault).path, spec.workloads[0], policy, timing)


NOTHING = replace(job(timing=None), workload=None, check=None)
"""Loads a module."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(MEMORY) as shared:
        yield shared


def running_children() -> set[int]:
    """Worker processes that this one started."""
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if is_worker(folder) and parent_of(folder) == os.getpid()}


def is_worker(folder: Path) -> bool:
    try:
        return b"kvgen.measure.worker" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def parent_of(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.parametrize("call", ["attend", "decode"])
def test_a_good_candidate_is_verified_and_timed(worker: Worker, call: Any) -> None:
    found = worker.run(job(timing=replace(TIMING, read=True, call=call)))
    assert (found.kind, found.detail) == ("ok", "")
    assert (found.schedule, found.workload) == (naive_schedule(), job().workload)
    assert len(found.samples) >= 5
    assert min(found.samples) > 0
    assert found.read_us is not None
    assert found.read_us > 0
    assert 0 < found.accuracy["relative_l2"] < 1e-6


def test_verification_alone_takes_no_samples_and_needs_no_workload(worker: Worker) -> None:
    for one in (job(timing=None), replace(job(timing=None), workload=None)):
        found = worker.run(one)
        assert (found.kind, found.samples) == ("ok", ())


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("wrong", "wrong", "attend of ragged, form 1: relative l2 is 0.048"),
        ("crash", "crash", "it died of signal SIGSEGV during verify"),
        ("hang", "timeout", "within 2 s"),
        ("leak", "oom", "memory"),
        ("greed", "oom", "memory"),
    ],
)
def test_bad_candidates_are_named_and_the_next_one_is_served(worker: Worker, fault: str, kind: str, detail: str) -> None:
    before = running_children()
    found = worker.run(job(fault), timeout_s=2.0 if fault == "hang" else 60.0)
    assert found.kind == kind
    assert detail in found.detail
    assert "\n" not in found.detail
    assert not found.samples
    assert not (running_children() & before)
    assert worker.run(NOTHING).ok


def test_a_job_that_takes_longer_than_there_is_time_has_no_measurement(worker: Worker) -> None:
    before = running_children()
    with pytest.raises(TimeoutError, match=r"^there was no time left during \w+$"):
        worker.run(job("hang"), timeout_s=60.0, seconds=2.0)
    assert not (running_children() & before)
    assert worker.run(NOTHING, seconds=60.0).ok


def test_memory_of_kvgen_is_not_the_candidates() -> None:
    """The buffers of a cold measurement alone are larger than the limit, and so they are for the next candidate."""
    cold = replace(TIMING, cold_bytes=160 << 20, read=True)
    wide = replace(job(timing=cold), workload=Workload(batch=64, kv_len=96))
    with Worker(128 << 20) as small:
        assert [(one.kind, one.detail) for one in (small.run(wide), small.run(wide))] == [("ok", "")] * 2


def test_a_process_is_ended_before_the_machine_has_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps({"available_bytes": 64 << 20}))
    long = Workload(batch=1, kv_len=400_000)  # its cache, 250 MiB, stays in memory throughout
    # The process itself sees what this machine has, so that it does not refuse the workload beforehand.
    with Worker(environment={"KVGEN_MACHINE": "{}"}) as poor:
        found = poor.run(replace(job(timing=None), workload=long, check=CheckPolicy(workloads_only=True)))
    assert found.kind == "oom"
    assert found.detail.startswith("it took more than 64 MiB of host memory during ")


def test_a_module_that_cannot_be_loaded_is_a_crash(worker: Worker, tmp_path: Path) -> None:
    broken = tmp_path / "module.so"
    broken.write_bytes(b"not a library")
    found = worker.run(replace(job(), artifact=broken))
    assert found.kind == "crash"
    assert "cannot load" in found.detail


def test_a_killed_worker_is_replaced(worker: Worker) -> None:
    assert worker.run(NOTHING).ok
    assert worker._process is not None
    worker._process._popen.kill()
    worker._process._popen.wait()
    assert worker.run(NOTHING).ok


def test_workers_die_with_the_process_that_started_them() -> None:
    code = (
        "import sys; from kvgen.measure.worker import Worker; w = Worker(); w.start('cpu'); "
        "print(w._process._popen.pid, flush=True); import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while is_worker(Path(f"/proc/{child}")):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.02)


def test_a_worker_may_be_started_before_its_first_job_and_outlives_the_thread_that_started_it() -> None:
    others = running_children()
    with Worker(MEMORY) as early:
        thread = Thread(target=early.start, args=("cpu",))
        thread.start()
        thread.join()
        first = running_children() - others
        assert early.run(NOTHING).kind == "ok"
        assert running_children() - others == first
    assert not running_children() & first


def test_finalists_are_timed_in_turns_three_at_least(worker: Worker) -> None:
    found = worker.interleave([job(timing=replace(TIMING, read=True)), job()], 3)
    assert [(one.kind, len(one.samples)) for one in found] == [("ok", 3), ("ok", 3)]
    assert [one.read_us is not None for one in found] == [True, False]
    assert [len(one.samples) for one in worker.interleave([job(), job()], 9, seconds=0.0)] == [3, 3]
    assert worker.interleave([], 2) == []


def test_a_finalist_that_kills_the_process_is_the_only_one_out(worker: Worker) -> None:
    found = worker.interleave([job(), job("crash")], 2, 60.0)
    assert [one.kind for one in found] == ["ok", "crash"]
    assert len(found[0].samples) == 2


def test_finalists_that_fail_in_company_only_keep_their_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()

    def run(jobs: Sequence[Job], rounds: int, timeout_s: float, seconds: float | None = None) -> list[Measurement]:
        return [Measurement("ok" if len(jobs) == 1 else "timeout", f"{rounds} rounds")] * len(jobs)

    monkeypatch.setattr(worker, "_request", run)
    assert [one.detail for one in worker.interleave([job(), job()], 3)] == ["1 rounds", "1 rounds"]


def test_an_interrupted_request_ends_the_process_whose_answer_nobody_awaits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request would read it as its own."""

    def interrupt(*_: object) -> list[Measurement]:
        raise KeyboardInterrupt

    others = running_children()
    with Worker(MEMORY) as worker:
        worker.start("cpu")
        (before,) = running_children() - others
        with monkeypatch.context() as patch:
            patch.setattr(_Process, "outcome", interrupt)
            with pytest.raises(KeyboardInterrupt):
                worker.run(job())
        assert before not in running_children()
        assert worker.run(NOTHING).ok
