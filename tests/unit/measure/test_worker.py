from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from kvgen.measure.finalists import interleave

from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.measure.worker import Worker, _Process, run_job
from kvgen.spec import Workload
from kvgen.verify import CheckPolicy
from tests.support.naive import naive_artifact, naive_schedule, naive_spec

TIMING = TimingPolicy(cold_bytes=1 << 18, seconds=0.01, warmup_seconds=0.0, samples=5)
MEMORY = 512 << 20


def job(fault: str | None = None, timing: TimingPolicy | None = TIMING) -> Job:
    spec = naive_spec()
    policy = CheckPolicy(long_tokens=200, most_tokens=1 << 11)
    return Job(spec, naive_schedule(), "cpu", naive_artifact(fault).path, spec.workloads, policy, timing)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(MEMORY) as shared:
        yield shared


def running_children() -> set[int]:
    """Worker processes that this one started."""
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if is_worker(folder) and parent_of(folder) == os.getpid()}


def is_worker(folder: Path) -> bool:
    try:
        return b"kvgen.measure.child" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def parent_of(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_good_candidate_is_verified_and_timed(worker: Worker) -> None:
    outcome = worker.run(job(timing=replace(TIMING, read=True)))
    assert (outcome.kind, outcome.detail) == ("ok", "")
    (timing,) = outcome.timings
    assert timing.workload == job().workloads[0]
    assert len(timing.samples) >= 5
    assert min(timing.samples) <= timing.us <= max(timing.samples)
    assert timing.read_us is not None
    assert timing.read_us > 0
    assert 0 < outcome.accuracy["relative_l2"] < 1e-6


def test_decode_can_be_timed_too(worker: Worker) -> None:
    outcome = worker.run(job(timing=replace(TIMING, call="decode")))
    assert outcome.kind == "ok"
    assert outcome.timings[0].us > 0


def test_verification_alone_gives_no_timings(worker: Worker) -> None:
    outcome = worker.run(job(timing=None))
    assert (outcome.kind, outcome.timings) == ("ok", ())


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("wrong", "wrong", "attend of ragged: relative l2 is 0.048"),
        ("crash", "crash", "it died of signal SIGSEGV during verify"),
        ("hang", "timeout", "it did not finish verify within 2 s"),
        ("eat", "oom", "memory"),
    ],
)
def test_bad_candidates_are_named_and_the_next_one_is_served(worker: Worker, fault: str, kind: str, detail: str) -> None:
    before = running_children()
    outcome = worker.run(job(fault), timeout_s=2.0 if fault == "hang" else 60.0)
    assert outcome.kind == kind
    assert detail in outcome.detail
    assert "\n" not in outcome.detail
    assert not outcome.timings
    assert not (running_children() & before)
    assert worker.run(job(timing=None)).ok


@pytest.fixture(params=["enforced", "watched"])
def small(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """A worker of 128 MiB. Where it is only watched, the system enforces nothing, as for CUDA; pages of kvgen that a candidate is the first
    to write count as its own.
    """
    with Worker(128 << 20) as kept:
        if request.param == "watched":
            kept._alive("cuda").device = "cpu"
        yield kept


def test_memory_of_kvgen_is_not_the_candidates(small: Worker) -> None:
    """The buffers of a cold measurement alone are larger than the limit, and so they are for the next candidate."""
    cold = replace(TIMING, cold_bytes=160 << 20, read=True)
    wide = replace(job(timing=cold), workloads=(Workload(batch=64, kv_len=96),))
    for _ in range(2):
        assert (small.run(wide).kind, small.run(wide).detail) == ("ok", "")
    assert [outcome.kind for outcome in small.interleave([wide, wide], 2)] == ["ok", "ok"]


@pytest.mark.parametrize(("small", "fault"), [("enforced", "leak"), ("watched", "leak"), ("watched", "eat")], indirect=["small"])
def test_a_candidate_that_eats_memory_is_out_of_memory(small: Worker, fault: str) -> None:
    outcome = small.run(job(fault))
    assert outcome.kind == "oom", outcome.detail
    assert "memory" in outcome.detail


def test_a_workspace_that_is_too_large_is_out_of_memory(worker: Worker) -> None:
    outcome = worker.run(job("greed"))
    assert (outcome.kind, "its workspace takes" in outcome.detail) == ("oom", True)


def test_a_process_is_ended_before_the_machine_has_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps({"available_bytes": 128 << 20}))
    # The caches fit (from 210,000 tokens on they would not), and the fp64 reference over them does not (up to 150,000 it would).
    fits = job(timing=replace(TIMING, cold_bytes=0))
    with Worker() as poor:
        outcome = poor.run(replace(fits, workloads=(Workload(batch=1, kv_len=195_000),), check=CheckPolicy(workloads_only=True)))
    assert (outcome.kind, outcome.detail) == ("oom", "its process used up all 128 MiB of host memory that were free during reference")


def test_a_module_that_cannot_be_loaded_is_an_outcome(worker: Worker, tmp_path: Path) -> None:
    broken = tmp_path / "module.so"
    broken.write_bytes(b"not a library")
    outcome = worker.run(replace(job(), artifact=broken))
    assert outcome.kind == "crash"
    assert "cannot load" in outcome.detail


def test_a_killed_worker_is_replaced(worker: Worker) -> None:
    assert worker.run(job(timing=None)).ok
    assert worker._process is not None
    worker._process._popen.kill()
    worker._process._popen.wait()
    assert worker.run(job(timing=None)).ok


def test_run_job_leaves_no_process_behind() -> None:
    before = running_children()
    assert run_job(job(timing=None), memory_bytes=MEMORY).ok
    assert running_children() == before


def test_workers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "import sys; from kvgen.measure.worker import Worker; w = Worker(); p = w._alive('cpu'); "
        "print(p._popen.pid, flush=True); import time; time.sleep(60)"
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


def test_a_worker_may_be_started_before_its_first_job() -> None:
    with Worker(MEMORY) as early:
        early.start("cpu")
        first = running_children()
        assert early.run(job()).kind == "ok"
        assert running_children() == first


def test_a_worker_outlives_the_thread_that_first_asked_for_it() -> None:
    with Worker(MEMORY) as kept:
        thread = Thread(target=kept.run, args=(job(),))
        thread.start()
        thread.join()
        first = running_children()
        assert kept.run(job()).kind == "ok"
        assert running_children() == first


def test_finalists_are_timed_in_turns(worker: Worker) -> None:
    outcomes = interleave([job(), job()], rounds=3, worker=worker)
    assert [outcome.kind for outcome in outcomes] == ["ok", "ok"]
    assert [len(outcome.timings[0].samples) for outcome in outcomes] == [3, 3]


def test_where_time_is_short_finalists_still_take_three_turns(worker: Worker) -> None:
    outcomes = interleave([job(timing=replace(TIMING, read=True)), job()], rounds=9, worker=worker, seconds=0.0)
    assert [len(outcome.timings[0].samples) for outcome in outcomes] == [3, 3]
    assert outcomes[0].timings[0].read_us is not None


def test_a_finalist_that_kills_the_process_is_the_only_one_out(worker: Worker) -> None:
    outcomes = interleave([job(), job("crash")], rounds=2, timeout_s=60.0, worker=worker)
    assert [outcome.kind for outcome in outcomes] == ["ok", "crash"]
    assert len(outcomes[0].timings[0].samples) == 2


def test_finalists_that_fail_in_company_only_keep_their_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()

    def run(jobs: list[Job], rounds: int, timeout_s: float, seconds: float | None = None) -> list[Measurement]:
        return [Measurement("ok" if len(jobs) == 1 else "timeout", f"{rounds} rounds")] * len(jobs)

    monkeypatch.setattr(worker, "interleave", run)
    assert [o.detail for o in interleave([job(), job()], rounds=3, worker=worker)] == ["1 rounds", "1 rounds"]


def test_no_finalists_need_no_process() -> None:
    assert interleave([], rounds=2) == []
    assert isinstance(Measurement("ok"), Measurement)


def test_an_interrupted_request_ends_the_process_whose_answer_nobody_awaits(monkeypatch: pytest.MonkeyPatch):
    """The next request would read it as its own."""

    def interrupt(*_: object) -> list[Measurement]:
        raise KeyboardInterrupt

    others = running_children()
    with Worker(MEMORY) as worker:
        worker.start("cpu")
        (before,) = running_children() - others
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_follow", interrupt)
            with pytest.raises(KeyboardInterrupt):
                worker.run(job())
        assert before not in running_children()
        assert worker.run(job()).ok


def test_the_time_of_one_format_limits_no_other(worker: Worker) -> None:
    worker._verified_s.clear()
    assert worker.run(job()).ok
    (family,) = worker._verified_s
    assert family == naive_spec().format_id
    assert worker._limit("verify", family, 3600.0) < 3600.0
    assert worker._limit("verify", "another", 3600.0) == 3600.0


def test_a_process_that_closes_its_pipe_was_not_too_slow() -> None:
    watch = SimpleNamespace(over=False, verdict=None)
    popen = SimpleNamespace(wait=Mock(side_effect=subprocess.TimeoutExpired("child", 0.5)), returncode=None)
    lost = SimpleNamespace(_watch=watch, _popen=popen, _closed=True, log_tail=lambda: "last words", kill=lambda: None)
    outcome = _Process.post_mortem(lost, "verify", 60.0)  # type: ignore[arg-type]
    assert (outcome.kind, outcome.detail) == ("crash", "it closed its pipe during verify: last words")
