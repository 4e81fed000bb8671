from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvgen.format.sizes import half_full, must_read
from kvgen.lower.base import FUNCTIONS
from kvgen.measure import inputs as measured
from kvgen.measure.inputs import NoRoom, WorkloadInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload
from kvgen.spec.traffic import parse, sequence_lengths
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


def naive_variant() -> Variant:
    spec = naive_spec()
    return Variant(spec, naive_layout(spec), load(naive_artifact().path))


def test_unequal_lengths_are_those_of_the_workload_in_every_copy_and_after_decode() -> None:
    variant, work = naive_variant(), parse("3x20-200")
    inputs = WorkloadInputs(variant, work, "cpu", cold=1 << 20)
    wanted = sequence_lengths(work)
    assert len(inputs.caches) > 1
    assert inputs.nbytes == must_read(variant.spec, variant.layout, wanted)
    inputs.time(variant, TimingPolicy(call="decode", seconds=0.01, warmup_seconds=0.0, samples=2))
    for cache in inputs.caches:
        assert cache.lengths.tolist() == wanted
        assert (cache.bound, cache.sequences.uniform) == (200, False)


def test_given_lengths_stand_in_for_the_workloads() -> None:
    inputs = WorkloadInputs(naive_variant(), Workload(batch=2, kv_len=100), "cpu", cold=1, lengths=[100, 7])
    assert inputs.caches[0].lengths.tolist() == [100, 7]


def test_caches_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(NoRoom, match=r"the caches of 4x4096 take 0.0 GB, and 0.0 GB are free"):
        WorkloadInputs(naive_variant(), Workload(batch=4, kv_len=4096), "cpu", cold=1)
    WorkloadInputs(naive_variant(), Workload(batch=1, kv_len=64), "cpu", cold=1)


def test_a_sustained_workload_is_timed_under_load_unless_the_policy_says_for_how_long() -> None:
    rested, sustained = TimingPolicy(), TimingPolicy(sustained_seconds=2.0)
    assert rested.under("rested") == rested
    assert rested.under("sustained").sustained_seconds > 0
    assert sustained.under("sustained") == sustained.under("rested") == sustained
