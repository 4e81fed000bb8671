from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvgen.lower.base import FUNCTIONS
from kvgen.measure.bytes import half_full
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.job import TimingPolicy
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload
from tests.support.naive import BLOCK, naive_artifact, naive_layout, naive_spec


@pytest.mark.parametrize("kv_len", [4 * BLOCK, 3 * BLOCK + 5, 1])
def test_decode_is_timed_over_a_block_of_steps_around_the_length(kv_len: int) -> None:
    """As many bytes as `attend` reads: a block that began at the workload's length would hold half a block more."""
    module, spec = load(naive_artifact().path), naive_spec()
    passed: list[int] = []

    def decode(*args: torch.Tensor) -> None:
        passed.append(int(args[6][0]))
        module.decode(*args)

    functions = {name: getattr(module, name) for name in FUNCTIONS} | {"decode": decode}
    variant = Variant(spec, naive_layout(spec), SimpleNamespace(**functions, set_threads=None))  # type: ignore[arg-type]
    inputs = WorkloadInputs(variant, Workload(batch=2, kv_len=kv_len), "cpu", cold=1)
    samples = inputs.time(variant, TimingPolicy(call="decode", seconds=0.01, warmup_seconds=0.0, samples=2))
    length = half_full(variant.spec, variant.layout, kv_len)
    start = max(0, length - BLOCK // 2)
    assert len(passed) % BLOCK == 0
    assert passed[:BLOCK] == passed[-BLOCK:] == list(range(start, start + BLOCK))
    assert min(samples) > 0
