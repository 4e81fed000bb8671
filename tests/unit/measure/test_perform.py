"""What the worker process does, here in this one; `test_worker` has processes of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgen.lower.backend import get_backend
from kvgen.measure import perform
from kvgen.measure.measurement import Job, TimingPolicy
from kvgen.measure.timer import Power
from kvgen.spec import MatrixShape
from kvgen.spec.workloads import MOST_SPREAD, spread
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
    ("seconds", "rounds"),
    [(None, 15), (100.0, 15), (6.0, 6), (12.0, 12), (2.0, 3), (-5.0, 3)],
)
def test_a_workload_has_as_many_rounds_as_fit_and_three_at_least(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, rounds: int
) -> None:
    now, taken = [1000.0], 0
    monkeypatch.setattr(perform.time, "monotonic", lambda: now[0])
    for _ in perform.rounds_within(15, None if seconds is None else now[0] + seconds):
        now[0] += 1.0
        taken += 1
    assert taken == rounds


@pytest.mark.parametrize(("disturbed", "takes"), [(0, 1), (1, 2), (9, 3)])
def test_rounds_that_other_load_disturbs_are_repeated_and_the_steadiest_count(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, takes: int
) -> None:
    """Two candidates, of which the second is slow in one round of each of the first `disturbed` takes."""
    spec = matrix_spec("dequantize", shapes=("70x96",))
    schedules = list(get_backend("cpu").space(spec, "cpu").schedules())[:2]
    rounds = dict.fromkeys(schedules, 0)

    class Steady:
        shared_by = "inputs"

        def __init__(self, job: Job) -> None:
            self.schedule = job.schedule

        def inputs(self, cold: int | None) -> Any:
            return SimpleNamespace(nbytes=1, held_bytes=0, load="rested")

        def time(self, inputs: object, policy: TimingPolicy) -> tuple[tuple[float, ...], Power]:
            number, rounds[self.schedule] = rounds[self.schedule], rounds[self.schedule] + 1
            planted = self.schedule == schedules[1] and number % 4 == 2 and number // 4 < disturbed
            return (10.0 + number // 4 * 0.01 + 5.0 * planted,), Power()

        def read_us(self, inputs: object, policy: TimingPolicy) -> float:
            return 5.0

    monkeypatch.setattr(perform, "load_job", Steady)
    monkeypatch.setattr(perform, "_kept", {})
    jobs = [Job(spec, one, "cpu", Path("/nowhere"), spec.workloads[0], None, TIMING) for one in schedules]
    found = perform.perform_interleaved(jobs, 4, lambda _: None)
    assert [*rounds.values()] == [4 * takes] * 2
    worst = max(spread(one.samples) for one in found)
    assert (worst > MOST_SPREAD) == (disturbed > perform.RETAKES)
    assert {len(one.samples) for one in found} == {4}, "rounds of one take, which are pairs"
