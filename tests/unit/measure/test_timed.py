"""Faults that only show at the size that is timed: late splits, late sequences, late tokens, blocks that a step fills."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from kvgen.measure.compare import Comparison
from kvgen.measure.timed import TimedCheck, unequal

from kvgen.errors import CheckError
from kvgen.lower.base import FUNCTIONS
from kvgen.measure.inputs import WorkloadInputs
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload
from kvgen.verify import CheckPolicy
from kvgen.verify.check import check
from tests.support.cpu import spec_of as quantized
from tests.support.cpu import variant as compiled
from tests.support.naive import naive_artifact, naive_layout, naive_spec

LENGTHS, PACKED, RESIDUAL, OUT = 4, 1, 2, 7
"""Places of arguments of `attend`; those of `decode` are two further on, but for q."""
WORKLOADS = (Workload(batch=12, kv_len=96), Workload(batch=2, kv_len=4096))


def variant(**wrapped: Callable[..., object]) -> Variant:
    module = load(naive_artifact().path)
    functions = {name: getattr(module, name) for name in FUNCTIONS}
    for name, wrapper in wrapped.items():
        functions[name] = lambda *args, f=functions[name], w=wrapper: w(f, *args)
    spec = naive_spec()
    return Variant(spec, naive_layout(spec), SimpleNamespace(**functions, set_threads=None))  # type: ignore[arg-type]


def timed(workload: Workload, **wrapped: Callable[..., object]) -> TimedCheck:
    candidate = variant(**wrapped)
    found = TimedCheck(WorkloadInputs(candidate, workload, "cpu", cold=0), candidate, Comparison(candidate.spec, torch.device("cpu")))
    found.prepare()
    return found


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda work: work.key)
def test_a_right_module_passes_at_the_workload_and_leaves_its_caches_alone(workload: Workload) -> None:
    check = timed(workload)
    cache = check._caches[0]
    before = [None if x is None else x.clone() for x in cache.tensors[1:]]
    check.run()
    check.again()
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, cache.tensors[1:], strict=True) if a is not None and b is not None)


def wrong_sequence_11(f, q, *args) -> None:
    f(q, *args)
    if q.shape[0] > 11:
        args[OUT - 1][11] *= 1.1


def forgets_tokens_beyond_3000(f, q, packed, k_residual, v_residual, lengths, *args) -> None:
    short = torch.where(lengths > 3000, lengths - 32, lengths)
    f(q, packed, k_residual, v_residual, short, *args)


def flushes_nothing(f, q, k, v, packed, *args) -> None:
    before = packed.clone()
    f(q, k, v, packed, *args)
    packed.copy_(before)


def loses_what_follows_a_flush(f, q, k, v, packed, k_residual, *args) -> None:
    f(q, k, v, packed, k_residual, *args)
    k_residual[:, :, 0] = 0


def counts_one_token(f, q, k, v, packed, k_residual, v_residual, lengths, *args) -> None:
    f(q, k, v, packed, k_residual, v_residual, lengths, *args)
    lengths.sub_(q.shape[1] - 1)


def wrong_without_lse(f, *args) -> None:
    f(*args)
    if args[OUT + 3] is None:
        args[OUT + 2].mul_(1.12)


@pytest.mark.parametrize(
    ("workload", "function", "fault", "message"),
    [
        (WORKLOADS[1], "decode", wrong_without_lse, "decode at 2x4096, advance, LSE None: relative l2"),
        (WORKLOADS[0], "attend", wrong_sequence_11, "attend at 12x96"),
        (WORKLOADS[1], "attend", forgets_tokens_beyond_3000, "attend at 2x4096: relative l2"),
        (Workload(batch=2, kv_len=96, q_len=2), "decode", loses_what_follows_a_flush, "residual after decode"),
        (Workload(batch=2, kv_len=96, q_len=2), "decode", counts_one_token, "lengths are not 2 more"),
    ],
)
def test_what_small_lives_do_not_meet_is_found_at_the_workload(
    workload: Workload, function: str, fault: Callable[..., object], message: str
) -> None:
    with pytest.raises(CheckError, match=message):
        timed(workload, **{function: fault}).run()


def test_a_block_that_an_earlier_variant_packed_does_not_pass_for_the_next_ones() -> None:
    good = compiled(quantized())
    inputs = WorkloadInputs(good, Workload(batch=2, kv_len=100), "cpu", cold=0)
    functions = {name: getattr(good.module, name) for name in FUNCTIONS}
    decode = functions["decode"]
    functions["decode"] = lambda *args: flushes_nothing(decode, *args)
    broken = Variant(good.spec, good.layout, SimpleNamespace(**functions, set_threads=None))  # type: ignore[arg-type]
    before = inputs.caches[0].packed.clone()
    for candidate in (good, good):
        check = TimedCheck(inputs, candidate, Comparison(candidate.spec, torch.device("cpu")))
        check.prepare()
        check.run()
        assert torch.equal(inputs.caches[0].packed, before)
    with pytest.raises(CheckError, match="codes of key after decode"):
        TimedCheck(inputs, broken, Comparison(broken.spec, torch.device("cpu"))).run()


def test_a_fault_of_two_query_tokens_is_found_by_lives_and_reads() -> None:
    def last_query(f, q, *args) -> None:
        f(q, *args)
        if q.shape[1] > 1:
            args[OUT - 1][:, -1] *= 1.1

    with pytest.raises(CheckError):
        check(variant(attend=last_query), "cpu", CheckPolicy(long_tokens=100, most_tokens=1024))


def test_memory_overwritten_while_timing_is_found() -> None:
    check = timed(WORKLOADS[0])
    check.run()
    check._caches[0].k_residual.mul_(1.5)
    with pytest.raises(CheckError, match="after timing: the same inputs gave other bits"):
        check.again()


def test_unequal_lengths_hold_the_longest_and_fit() -> None:
    assert unequal(1, 1000) == []
    for lengths in unequal(24, 5000):
        assert len(lengths) == 24
        assert max(lengths) == 5000
        assert min(lengths) >= 1
