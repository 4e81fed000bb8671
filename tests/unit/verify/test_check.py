"""The checks pass a right module, and find a module that is wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvgen.errors import CheckError
from kvgen.lower.backend import FUNCTIONS
from kvgen.runtime.calls import Variant
from kvgen.spec import Workload
from kvgen.verify import CheckPolicy
from kvgen.verify.calls import CallCheck
from kvgen.verify.check import WorkloadCaches, WorkloadCheck, check
from kvgen.verify.lives import Lives
from kvgen.verify.sizes import Crowd, Far
from kvgen.verify.steps import Steps
from tests.support.cpu import spec_of as quantized
from tests.support.cpu import variant as compiled
from tests.support.naive import naive_variant

POLICY = CheckPolicy(long_tokens=200, most_tokens=1024)
OUT, LSE = 8, 9
"""Places of arguments of `attend`; those of `decode` are two further on."""
NO_LIMIT = 1 << 30
BATCHES = (Workload(batch=12, kv_len=96), Workload(batch=2, kv_len=4096), Workload(batch=2, kv_len=96, q_len=2))


@pytest.mark.parametrize("paged", [False, True])
def test_a_right_module_passes_and_its_errors_are_reported(paged: bool) -> None:
    accuracy = check(naive_variant(paged), "cpu", POLICY, BATCHES[:1])
    assert {"relative_l2", "worst_row", "lse_error", "unpack"} <= set(accuracy)
    assert 0 < accuracy["relative_l2"] < 1e-6
    assert accuracy["unpack"] == 0


def after(change: Callable[..., object]) -> Callable[..., object]:
    """The call, and then a change of its arguments."""

    def faulty(f: Callable[..., object], *args: torch.Tensor) -> None:
        f(*args)
        change(*args)

    return faulty


def replaced(place: int, value: object) -> Callable[..., object]:
    """The call with another argument at a place, which counts from the end where it is negative."""
    return lambda f, *args: f(*args[:place], value, *args[len(args) + place + 1 if place < 0 else place + 1 :])


def skips_last_head(f, *args) -> None:
    kept = args[OUT][-1, :, -1].clone()
    f(*args)
    args[OUT][-1, :, -1] = kept


def forgets_lengths(f, *args) -> None:
    before = args[6].clone()
    f(*args)
    args[6].copy_(before)


def noise(*args) -> None:
    noise.calls += 1
    args[OUT].add_(1e-7 * noise.calls)


noise.calls = 0


def wrong_lse(*args) -> None:
    if args[LSE] is not None:
        args[LSE].mul_(1.01)


def finite_lse_of_nothing(*args) -> None:
    if args[LSE] is not None:
        args[LSE].clamp_(min=-1e30)


def larger_without_lse(*args) -> None:
    if args[LSE + 2] is None:
        args[OUT + 2].mul_(1.12)


def spreads_nan(*args) -> None:
    if bool(args[OUT].isnan().any()):
        args[OUT][1] = torch.nan


def advances_empty(f, lengths, counts, tokens, *rest) -> None:
    f(lengths, torch.full_like(lengths, tokens) if counts is None else counts, tokens, *rest)


def touches_the_full(f, lengths, plan, q_len, append, skip_empty, limit, overflow) -> None:
    f(lengths.clamp(max=limit - q_len), plan, q_len, append, skip_empty, limit, overflow)


@pytest.mark.parametrize(
    ("kind", "function", "fault", "message"),
    [
        (Lives, "attend", after(lambda *args: args[OUT].mul_(1.001)), "attend of ragged, form 1: relative l2 is"),
        (Lives, "attend", skips_last_head, "attend of ragged, form 1: relative l2 is inf"),
        (Lives, "attend", after(noise), "the same inputs gave other bits"),
        (Lives, "attend", after(wrong_lse), "attend of ragged, form 1: lse error is"),
        (Lives, "attend", after(finite_lse_of_nothing), "LSE of a query that sees nothing is not -inf"),
        (Lives, "attend", after(lambda *args: args[OUT].add_(args[2].sum() * 0)), "relative l2 is inf"),  # reads what was never written
        (Lives, "attend", after(lambda *args: args[OUT][:, 1:].mul_(1.1)), "relative l2"),  # of two query tokens
        (Lives, "pack", forgets_lengths, "relative l2 is"),
        (Lives, "decode", after(lambda *args: args[OUT + 2].add_(0.01)), "decode 1 of ragged, turn 2: relative l2 is"),
        (Lives, "decode", after(larger_without_lse), "relative l2"),
        (Lives, "decode", replaced(15, 32**-0.5), "relative l2"),  # the default scale
        (Lives, "unpack", after(lambda *args: args[8][0, -1].fill_(1.0)), "positions that the cache does not hold were written"),
        (Steps, "decode", after(lambda *args: args[OUT + 2][:, 64:65].fill_(0)), "decode of 72 tokens"),
        (Steps, "plan", replaced(5, NO_LIMIT), "is not refused"),
        (Steps, "plan", replaced(4, 0), "step 1 over a plan"),  # empty sequences are in the plan
        (Steps, "plan", touches_the_full, "is not refused"),
        (Steps, "advance", replaced(3, NO_LIMIT), "is not refused"),
        (Steps, "advance", advances_empty, "lengths are"),
        (Steps, "decode", replaced(-1, 1), "lengths are"),  # advances in every layer
        (Steps, "decode", replaced(17, NO_LIMIT), "is not refused"),
        (Steps, "decode", replaced(-1, 0), "lengths are"),
        (Crowd, "pack", after(lambda *args: args[6][1100:].sub_(1)), "attend over 1203 sequences: relative l2"),
        (Far, "attend", after(lambda *args: args[OUT].nan_to_num_(0.0)), "a NaN in q: output that sees it is a number"),
        (Far, "attend", after(spreads_nan), "a NaN in q: output that does not see it has other bits"),
    ],
)
def test_a_fault_is_found(kind: type[CallCheck], function: str, fault: Callable[..., object], message: str) -> None:
    found = kind(naive_variant(**{function: fault}), "cpu", POLICY)
    found.prepare()
    with pytest.raises(CheckError, match=message):
        found.run()


def test_memory_overwritten_while_timing_is_found() -> None:
    variant = naive_variant()
    caches = WorkloadCaches(variant, BATCHES[0], "cpu", [90] * 12)
    found = WorkloadCheck(variant, caches)
    found.prepare()
    found.run()
    found.again()
    caches.caches[0].packed[0, 0, 0].view(torch.float32).mul_(1.5)
    with pytest.raises(CheckError, match="after timing: the same inputs gave other bits"):
        found.again()


def wrong_sequence_11(q, *args) -> None:
    if q.shape[0] > 11:
        args[OUT - 1][11] *= 1.1


def forgets_tokens_beyond_3000(f, q, packed, k_residual, v_residual, lengths, *args) -> None:
    f(q, packed, k_residual, v_residual, torch.where(lengths > 3000, lengths - 32, lengths), *args)


@pytest.mark.parametrize(
    ("workload", "function", "fault", "message"),
    [
        (BATCHES[1], "decode", after(larger_without_lse), "decode at 2x4096, advance, LSE None: relative l2"),
        (BATCHES[0], "attend", after(wrong_sequence_11), "attend at 12x96"),
        (BATCHES[1], "attend", forgets_tokens_beyond_3000, "attend at 2x4096: relative l2"),
        (BATCHES[2], "decode", after(lambda *args: args[4][:, :, 0].fill_(0)), "residual after decode"),
        (BATCHES[2], "decode", after(lambda *args: args[6].sub_(args[0].shape[1] - 1)), "lengths are"),
    ],
)
def test_what_small_lives_do_not_meet_is_found_at_the_workload(
    workload: Workload, function: str, fault: Callable[..., object], message: str
) -> None:
    variant = naive_variant(**{function: fault})
    found = WorkloadCheck(variant, WorkloadCaches(variant, workload, "cpu", [workload.kv_len] * workload.batch))
    found.prepare()
    with pytest.raises(CheckError, match=message):
        found.run()


def test_a_block_that_an_earlier_variant_packed_does_not_pass_for_the_next_ones() -> None:
    good = compiled(quantized())
    caches = WorkloadCaches(good, Workload(batch=2, kv_len=100), "cpu", [100, 100])
    functions = {name: getattr(good.module, name) for name in FUNCTIONS}

    def packs_nothing(q, k, v, packed, *args) -> None:
        before = packed.clone()
        good.module.decode(q, k, v, packed, *args)
        packed.copy_(before)

    broken = Variant(good.spec, good.layout, SimpleNamespace(**{**functions, "decode": packs_nothing}, set_threads=None))  # type: ignore[arg-type]
    before = [x.clone() for x in caches.caches[0].tensors[:4] if x is not None]
    for candidate in (good, good):
        found = WorkloadCheck(candidate, caches)
        found.prepare()
        found.run()
        now = [x for x in caches.caches[0].tensors[:4] if x is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), "the caches are left as they were"
    with pytest.raises(CheckError, match="codes of key after decode"):
        WorkloadCheck(broken, caches).run()
