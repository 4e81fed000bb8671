"""A worker's job over a matrix: verified, timed beside a copy."""

from __future__ import annotations

import pytest
import torch

from kvgen.errors import CheckError
from kvgen.lower.backends import get_backend
from kvgen.measure.inputs import CALLS, MatrixInputs, call_bytes
from kvgen.measure.measurement import Job, TimingPolicy
from kvgen.measure.perform import perform, perform_interleaved
from kvgen.spec import MatrixShape
from kvgen.toolchain import build
from kvgen.verify import CheckPolicy
from kvgen.verify.matrix import MatrixCheck, MatrixWorkloadCheck
from tests.support.matrix import cpu_matrix, matrix_spec

TIMING = TimingPolicy(seconds=0.002, warmup_seconds=0.0, samples=5, cold_bytes=1 << 18, read=True, threads=1)


def test_a_job_verifies_and_times_a_matrix_beside_a_copy() -> None:
    spec, backend = matrix_spec("dequantize", shapes=("70x96", "33x20")), get_backend("cpu")
    schedule = backend.default(spec, "cpu")
    artifact = build(backend.lower(spec, schedule, "cpu"))
    job = Job(spec, schedule, "cpu", artifact.path, spec.workloads, CheckPolicy(workloads_only=True), TIMING)
    job = Job.from_json(job.to_json())
    assert job.spec == spec
    outcome = perform(job, lambda _: None)
    assert outcome.kind == "ok", outcome.detail
    assert [timing.workload.key for timing in outcome.timings] == ["70x96", "33x20"]
    assert all(timing.us > 0 and timing.read_us is not None and timing.read_us > 0 for timing in outcome.timings)
    assert outcome.accuracy["relative_l2"] == 0
    assert 0.003 < outcome.accuracy["max_abs_error"] < 0.004
    (again,) = perform_interleaved([job], 2, lambda _: None)
    assert [len(timing.samples) for timing in again.timings] == [2, 2]


@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_timed_over_inputs_of_its_own(call: str) -> None:
    variant, shape = cpu_matrix(), MatrixShape(tokens=40, channels=30)
    inputs = MatrixInputs(variant, shape, "cpu", cold=3 * call_bytes(variant.spec, shape, "quantize"))
    assert len(inputs.matrices) == 3
    assert inputs.held_bytes == 3 * (40 * 30 * 5)
    if call == "dequantize":
        inputs.outs = [torch.empty_like(x) for x in inputs.matrices]
    assert min(inputs.time(variant, TIMING, call)) > 0


def test_what_a_call_moves() -> None:
    spec, shape = matrix_spec(dtype="float16"), MatrixShape(tokens=10, channels=4)
    assert [call_bytes(spec, shape, call) for call in CALLS] == [136, 136, 96]


def test_a_wrong_code_at_a_workload_is_found() -> None:
    variant = cpu_matrix()
    inputs = MatrixInputs(variant, MatrixShape(tokens=20, channels=6), "cpu", cold=0)
    check = MatrixWorkloadCheck(MatrixCheck(variant, "cpu", CheckPolicy()), "20x6", inputs.matrices[0], inputs.codes[0], inputs.outs[0])
    check.run()
    inputs.matrices[0][3, 2] = torch.nan  # the reference and the module differ in what they make of it
    with pytest.raises(CheckError, match="at 20x6"):
        check.again()
