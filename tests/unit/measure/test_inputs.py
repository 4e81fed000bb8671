from __future__ import annotations

import pytest
import torch

from kvgen.format.sizes import half_full, must_read
from kvgen.measure import inputs as measured
from kvgen.measure.inputs import MatrixInputs, NoRoom, WorkloadInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.runtime.matrix import MatrixVariant
from kvgen.spec import MatrixShape, Workload
from kvgen.spec.workloads import parse, sequence_lengths
from tests.support.cpu import cpu_matrix, matrix_spec
from tests.support.naive import BLOCK, naive_variant

DECODE = TimingPolicy(call="decode", seconds=0.01, warmup_seconds=0.0, samples=2)


@pytest.mark.parametrize("kv_len", [4 * BLOCK, 3 * BLOCK + 5, 1])
def test_decode_is_timed_over_a_block_of_steps_around_the_length(kv_len: int) -> None:
    """As many bytes as `attend` reads: a block that began at the workload's length would hold half a block more."""
    passed: list[int] = []

    def decode(f, *args: torch.Tensor) -> None:
        passed.append(int(args[6][0]))
        f(*args)

    variant = naive_variant(decode=decode)
    inputs = WorkloadInputs(variant, Workload(batch=2, kv_len=kv_len), "cpu", cold=1)
    assert min(inputs.time(variant, DECODE)) > 0
    start = max(0, half_full(variant.spec, variant.layout, kv_len) - BLOCK // 2)
    assert len(passed) % BLOCK == 0
    assert passed[:BLOCK] == passed[-BLOCK:] == list(range(start, start + BLOCK))


def test_unequal_lengths_are_those_of_the_workload_in_every_copy_and_after_decode() -> None:
    variant, work = naive_variant(), parse("3x20-200")
    inputs = WorkloadInputs(variant, work, "cpu", cold=1 << 20)
    assert len(inputs.caches) > 1
    assert inputs.nbytes == must_read(variant.spec, variant.layout, sequence_lengths(work))
    inputs.time(variant, DECODE)
    for cache in inputs.caches:
        assert cache.lengths.tolist() == sequence_lengths(work)
        assert (cache.bound, cache.sequences.uniform) == (200, False)
    given = WorkloadInputs(variant, Workload(batch=2, kv_len=100), "cpu", cold=1, lengths=[100, 7])
    assert given.caches[0].lengths.tolist() == [100, 7]


def test_caches_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(NoRoom, match=r"the caches of 4x4096 take 0.0 GB, and 0.0 GB are free"):
        WorkloadInputs(naive_variant(), Workload(batch=4, kv_len=4096), "cpu", cold=1)
    WorkloadInputs(naive_variant(), Workload(batch=1, kv_len=64), "cpu", cold=1)


@pytest.mark.parametrize("operation", ["quantize", "dequantize"])
def test_an_operation_on_a_matrix_is_timed_over_inputs_of_its_own(operation: str) -> None:
    variant, shape = MatrixVariant(matrix_spec(operation=operation), cpu_matrix().module), MatrixShape(tokens=40, channels=30)
    inputs = MatrixInputs(variant, shape, "cpu", cold=3 * (40 * 30 * 5 + 120))
    assert (len(inputs.matrices), inputs.nbytes) == (3, 40 * 30 * 5 + 120)
    assert inputs.held_bytes == 3 * 40 * 30 * (5 if operation == "quantize" else 9)
    assert min(inputs.time(variant, TimingPolicy(seconds=0.002, warmup_seconds=0.0, samples=5, threads=1))) > 0
