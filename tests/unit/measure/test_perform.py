"""What the worker process does, here in this one; `test_worker` has processes of their own."""

from __future__ import annotations

import pytest

from kvgen.lower.backend import get_backend
from kvgen.measure import perform
from kvgen.measure.measurement import Job, TimingPolicy
from kvgen.spec import MatrixShape
from kvgen.toolchain import build
from kvgen.verify import CheckPolicy
from tests.support.cpu import matrix_spec

TIMING = TimingPolicy(seconds=0.002, warmup_seconds=0.0, samples=5, cold_bytes=1 << 18, read=True, threads=1)


def test_a_job_verifies_and_times_a_matrix_beside_a_copy() -> None:
    spec, backend = matrix_spec("dequantize", shapes=("70x96", "33x20")), get_backend("cpu")
    schedule = backend.default(spec, "cpu")
    artifact = build(backend.lower(spec, schedule, "cpu"))
    jobs = [Job(spec, schedule, "cpu", artifact.path, work, CheckPolicy(workloads_only=True), TIMING) for work in spec.workloads]
    stages: list[str] = []
    for job in jobs:
        found = perform.perform(Job.from_json(job.to_json()), stages.append)
        assert (found.kind, found.detail) == ("ok", "")
        assert found.cost > 0
        assert found.read_us is not None
        assert found.accuracy["relative_l2"] == 0
        assert 0.003 < found.accuracy["max_abs_error"] < 0.004
    assert stages[:5] == ["load", "reference", "reference", "verify", "time"]
    assert stages[5] == "read", "whose memory is not the candidate's"
    assert [len(one.samples) for one in perform.perform_interleaved(jobs, 2, stages.append)] == [2, 2]
    assert isinstance(jobs[0].workload, MatrixShape)


@pytest.mark.parametrize(
    ("seconds", "shares", "rounds"),
    [(None, 1, 15), (100.0, 1, 15), (12.0, 2, 6), (12.0, 1, 12), (4.0, 2, 3), (-5.0, 1, 3)],
)
def test_a_workload_has_its_share_of_the_time_and_three_rounds_at_least(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, shares: int, rounds: int
) -> None:
    now, taken = [1000.0], 0
    monkeypatch.setattr(perform.time, "monotonic", lambda: now[0])
    for _ in perform.rounds_within(15, None if seconds is None else now[0] + seconds, shares):
        now[0] += 1.0
        taken += 1
    assert taken == rounds
