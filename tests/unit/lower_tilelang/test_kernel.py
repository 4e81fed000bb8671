"""Lowered kernels emulated on the CPU, against the fp64 reference: formats, ragged lengths, splits, decode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvgen.lower.schedule import Value
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import normal, structured
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.tilelang import needs_tilelang
from tests.unit.lower_tilelang.emulate import Emulated, Step, unquantized_rows

needs_tilelang()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Make = Callable[..., Emulated]
CASES: tuple[tuple[str, dict[str, Value]], ...] = (
    ("k4v4:h8/2", {}),
    ("k16v16:bf16:h8/2:page128", {"kv_tile": 64, "stages": 2}),
    ("k2v4:token:sym:h4/2", {"kv_tile": 32, "reduction": "cluster"}),
    ("k2v8:token:kg64:vg32:bf16:page128:q2:h8/2", {"kv_tile": 64, "stages": 2}),
    ("k4v8:h10/2:page256", {"form": "gemm", "warps": 4, "stages": 2, "kv_tile": 64}),
    ("k8v2:kg64:vg64:sym:h20/2:d64", {"block": 64, "kv_tile": 32, "stages": 2, "q_tiles": 2}),
    ("k8v8:vchannel:kg64:vg64:h4/2:d160", {"kv_tile": 64}),
    ("k4v4:vchannel:sym:kg512:vg512:h8/1:q2:d96", {"block": 512, "kv_tile": 64}),
)


SEEN: tuple[tuple[str, dict[str, Value]], ...] = (
    ("k4v4:h8/2:cap50:window40", {}),
    ("k8v4:token:h8/1:q4:page128:cap30:window64", {"kv_tile": 64, "q_tiles": 2}),
    ("k2v8:token:kg64:vg32:h4/1:q3:bf16:page256:window64", {"kv_tile": 32, "stages": 2}),
    ("k4v8:h8/2:q4:page128:cap30:window40", {"form": "gemm", "warps": 4, "stages": 2, "kv_tile": 64}),
)
"""Soft caps and sliding windows, smaller than a KV tile and larger."""

UNQUANTIZED: tuple[tuple[str, dict[str, Value]], ...] = (
    ("k8v4:token:h32/1:d64:q2:sink20:local7:rollback8:page128", {"kv_tile": 64}),
    ("k4v8:h4/2:d64:window200:local33:rollback4", {"kv_tile": 64, "stages": 2}),
)
"""Tokens that no block holds, with many query rows and behind a window."""


def reference(kernel: Emulated, lengths: list[int], *, hard: bool = False) -> tuple[ReferenceCache, torch.Tensor]:
    """A cache with these lengths, and queries. With a soft cap, scores reach it."""
    q_len = kernel.spec.attention.q_len
    inputs = (structured if hard else normal)(kernel.spec, len(lengths), max(lengths), q_len=q_len, seed=1)
    cache = ReferenceCache(kernel.spec, len(lengths), kernel.traits.tokens)
    cache.prefill(inputs.k, inputs.v, torch.tensor(lengths, dtype=torch.int32))
    return cache, inputs.q * (16 if kernel.spec.attention.softcap else 1)


def agree(step: Step, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Output and LSE are those of the reference, and every counter is back at zero."""
    limit = tolerance(step.q.dtype)
    assert relative_l2(step.out, want[0]) <= limit
    seen = torch.isfinite(want[1])
    assert torch.equal(torch.isfinite(step.lse), seen)
    assert relative_l2(step.lse[seen], want[1][seen]) <= limit
    assert not step.counters.any()


@pytest.mark.parametrize(("words", "launch"), CASES)
@pytest.mark.parametrize(("lengths", "splits", "hard"), [([300, 0, 1, 128], 1, False), ([513, 127], 3, True)])
def test_attend_agrees_with_the_reference(
    kernel: Make, words: str, launch: dict[str, Value], lengths: list[int], splits: int, hard: bool
) -> None:
    built = kernel(words, **launch)
    cache, q = reference(built, lengths, hard=hard)
    step = Step(built, cache, q, splits)
    step.run()
    agree(step, cache.attend(q))


@pytest.mark.parametrize(("words", "launch"), SEEN)
@pytest.mark.parametrize(("lengths", "splits"), [([300, 0, 3, 128, 400], 1), ([513, 130], 3)])
def test_soft_caps_and_windows_agree_with_the_reference(
    kernel: Make, words: str, launch: dict[str, Value], lengths: list[int], splits: int
) -> None:
    built = kernel(words, **launch)
    cache, q = reference(built, lengths)
    step = Step(built, cache, q, splits)
    step.run()
    agree(step, cache.attend(q))


@pytest.mark.parametrize(("words", "launch"), SEEN)
def test_decode_with_soft_caps_and_windows_flushes(kernel: Make, words: str, launch: dict[str, Value]) -> None:
    built = kernel(words, **launch)
    cache, q = reference(built, [511, 200, 383])
    new = normal(built.spec, 3, q.shape[1], q_len=q.shape[1], seed=2)
    step = Step(built, cache, q, 3, (new.k, new.v))
    step.run()
    agree(step, cache.decode(q, new.k, new.v))
    assert len(step.flushed) == 2 * built.traits.kv_heads
    assert step.lengths.tolist() == cache.lengths.tolist()


@pytest.mark.parametrize(("words", "launch"), UNQUANTIZED)
def test_unquantized_tokens_are_attended_and_kept_in_their_rows(kernel: Make, words: str, launch: dict[str, Value]) -> None:
    """By both schedulers: before, at and behind the end of the sink, and where a step fills a block."""
    built = kernel(words, **launch)
    rows, q_len, block = built.traits.rows, built.spec.attention.q_len, built.traits.tokens
    full = built.traits.unpacked + 2 * block
    lengths = [full - 1, 0, 130, full - block - 1, max(0, rows.sink - 1), full - q_len, full - block, 700]
    for workers in (0, 4):
        cache, q = reference(built, lengths)
        step = Step(built, cache, q, splits=2, workers=workers)
        step.run()
        agree(step, cache.attend(q))
        new = normal(built.spec, len(lengths), q_len, q_len=q_len, seed=2)
        step = Step(built, cache, q, 2, (new.k, new.v), workers=workers)
        step.run()
        agree(step, cache.decode(q, new.k, new.v))
        filled = {b for b, old in enumerate(lengths) if rows.packed_blocks(old + q_len) > rows.packed_blocks(old)}
        assert {0, 3, 5} <= filled
        assert len(step.flushed) == len(filled) * built.traits.kv_heads
        for held, expected in zip(step.residual, cache.residual(), strict=True):
            for b, old in enumerate(lengths):
                if b not in filled or rows.rollback:  # else `flush` stores the step's tokens, which is tested apart
                    own = unquantized_rows(rows, old + q_len)
                    assert torch.equal(held[b][:, own], expected[b][:, own])


@pytest.mark.parametrize(("words", "launch"), CASES[:5])
def test_decode_attends_to_new_tokens_and_keeps_them(kernel: Make, words: str, launch: dict[str, Value]) -> None:
    built = kernel(words, **launch)
    cache, q = reference(built, [200, 0, 130])
    new = normal(built.spec, 3, q.shape[1], q_len=q.shape[1], seed=2)
    step = Step(built, cache, q, 2, (new.k, new.v))
    step.run()
    agree(step, cache.decode(q, new.k, new.v))
    assert step.lengths.tolist() == cache.lengths.tolist()
    for held, expected in zip(step.residual, cache.residual(), strict=True):
        for b, length in enumerate(step.lengths.tolist()):
            rest = length % built.traits.tokens
            assert torch.equal(held[b, :, :rest], expected[b, :, :rest])


def test_a_full_residual_is_flushed_once_per_head(kernel: Make) -> None:
    built = kernel("k4v4:h8/2")
    cache, q = reference(built, [255, 256])
    new = normal(built.spec, 2, 1, seed=2)
    step = Step(built, cache, q, 3, (new.k, new.v))
    step.run()
    assert step.flushed == [(0, 0, 1), (0, 1, 1)]
    assert not step.counters.any()


def test_a_huge_scale_of_v_does_not_overflow(kernel: Make) -> None:
    built = kernel("k4v4:h8/2")
    q_len = built.spec.attention.q_len
    inputs = normal(built.spec, 1, 256, q_len=q_len, seed=5)
    inputs.v[:, 100] *= 15000.0
    inputs.v.clamp_(-60000, 60000)
    cache = ReferenceCache(built.spec, 1, 128)
    cache.prefill(inputs.k, inputs.v)
    step = Step(built, cache, inputs.q)
    step.run()
    agree(step, cache.attend(inputs.q))


@pytest.mark.parametrize(("words", "launch"), CASES[:1] + CASES[2:4] + CASES[5:6])
def test_sums_over_many_tokens_stay_near_zero(kernel: Make, words: str, launch: dict[str, Value]) -> None:
    """Tensor cores truncate when they accumulate, so sums that grew with the number of tokens would lose what is left of them in the
    end. With codes as they are, these errors are four times as large and more.
    """
    built = kernel(words, **launch)
    cache, q = reference(built, [2048])
    q = q * 0  # flat attention weights: the output is far smaller than a token's V
    step = Step(built, cache, q)
    with built.accumulators(13):
        step.run()
    assert relative_l2(step.out, cache.attend(q)[0]) <= 0.02


@pytest.mark.parametrize(("words", "launch"), [CASES[0], CASES[4]])
@pytest.mark.parametrize("workers", [0, 20])
def test_repeated_calls_agree_bit_for_bit(kernel: Make, words: str, launch: dict[str, Value], workers: int) -> None:
    """Over one workspace, with a call of another query between them. Most heads are split over three CTAs or more: if a call left their
    counter at another number than zero, a CTA that is not the last would combine partial results of the call before.
    """
    built = kernel(words, **launch)
    cache, q = reference(built, [1100, 129, 700])
    other = normal(built.spec, 3, 1, q_len=q.shape[1], seed=3).q
    first = Step(built, cache, q, splits=3, workers=workers)
    second = Step(built, cache, other, splits=3, workers=workers, previous=first)
    third = Step(built, cache, q, splits=3, workers=workers, previous=second)
    for step in (first, second, third):
        step.run()
    agree(second, cache.attend(other))
    assert torch.equal(first.out, third.out)
    assert torch.equal(first.lse, third.lse)


PLANNED = (CASES[0], SEEN[1], SEEN[2], CASES[2], CASES[4])
"""Windows, softcap, several runs of q rows, pages, both forms; the splits of a plan are no cluster."""


@pytest.mark.parametrize(("words", "launch"), PLANNED)
@pytest.mark.parametrize("workers", [3, 11])
def test_a_planned_attend_agrees_with_the_reference(kernel: Make, words: str, launch: dict[str, Value], workers: int) -> None:
    built = kernel(words, **launch)
    cache, q = reference(built, [1100, 0, 1, 128, 700])
    steps = [Step(built, cache, q, workers=workers) for _ in range(2)]
    for step in steps:
        step.run()
    agree(steps[0], cache.attend(q))
    assert torch.equal(steps[0].out, steps[1].out)
    assert torch.equal(steps[0].lse, steps[1].lse)


@pytest.mark.parametrize(("words", "launch"), PLANNED)
@pytest.mark.parametrize("workers", [2, 9])
def test_a_planned_decode_keeps_tokens_and_flushes(kernel: Make, words: str, launch: dict[str, Value], workers: int) -> None:
    built = kernel(words, **launch)
    cache, q = reference(built, [1023, 200, 0, 383])
    new = normal(built.spec, 4, q.shape[1], q_len=q.shape[1], seed=2)
    step = Step(built, cache, q, fresh=(new.k, new.v), workers=workers)
    step.run()
    old = cache.lengths.tolist()
    agree(step, cache.decode(q, new.k, new.v))
    assert step.lengths.tolist() == old
    assert len(step.flushed) == len(set(step.flushed)) == 2 * built.traits.kv_heads
    if not built.traits.page_blocks:
        assert step.flushed == [(b, head, old[b] // built.traits.tokens) for b in (0, 3) for head in range(built.traits.kv_heads)]
    for held, expected in zip(step.residual, cache.residual(), strict=True):
        for b in (1, 2):
            rest = (old[b] + q.shape[1]) % built.traits.tokens
            assert torch.equal(held[b, :, :rest], expected[b, :, :rest])


@pytest.mark.parametrize("workers", [0, 5])
def test_learned_sinks_join_the_denominator_once(kernel: Make, workers: int) -> None:
    """However many splits there are, far above and below all scores, and where there is no token: the LSE is the sink then."""
    built = kernel("k8v4:h8/2:q2:window40:sinks", kv_tile=64)
    cache, q = reference(built, [513, 0, 130, 1])
    sinks = torch.tensor([-300.0, 300.0, -2.0, 0.0, 2.0, 4.0, 5.0, 8.0])
    step = Step(built, cache, q, 3, workers=workers, sinks=sinks)
    step.run()
    out, lse = cache.attend(q, sinks=sinks)
    assert relative_l2(step.out, out) <= tolerance(q.dtype)
    assert (step.lse - lse).abs().max() <= 1e-2
    assert torch.equal(step.lse[1], sinks[:, None].expand(-1, 2))


@pytest.mark.parametrize("workers", [0, 5])
def test_a_sequence_without_room_is_left_as_it_is(kernel: Make, workers: int) -> None:
    built = kernel("k4v4:h8/2")
    cache, q = reference(built, [300, 100, 299])
    new = normal(built.spec, 3, 1, seed=2)
    step = Step(built, cache, q, 2, (new.k, new.v), workers=workers, limit=300)
    step.run()
    assert step.overflow.tolist() == [0 if workers else 1], "with a plan, the plan's kernel reports it"
    assert step.lengths.tolist() == ([300, 100, 299] if workers else [300, 101, 300])
    want, _ = cache.decode(q, new.k, new.v)
    assert step.out[0].isnan().all()
    assert relative_l2(step.out[1:], want[1:]) <= tolerance(q.dtype)
    assert step.residual[0][0, :, 300 % built.traits.tokens :].isnan().all()
    assert not step.counters.any()


def test_lengths_advance_only_where_the_call_is_told_to(kernel: Make) -> None:
    built = kernel("k4v4:h8/2")
    cache, q = reference(built, [300, 100])
    new = normal(built.spec, 2, 1, seed=2)
    step = Step(built, cache, q, 2, (new.k, new.v), advance=False)
    step.run()
    assert step.lengths.tolist() == [300, 100]
    agree(step, cache.decode(q, new.k, new.v))


def test_a_planned_decode_skips_empty_sequences(kernel: Make) -> None:
    built = kernel("k4v4:h8/2")
    cache, q = reference(built, [300, 0, 0])
    new = normal(built.spec, 3, 1, seed=2)
    step = Step(built, cache, q, fresh=(new.k, new.v), workers=4, skip_empty=True)
    step.run()
    assert not step.out[1:].any()
    assert torch.equal(step.lse[1:], torch.full_like(step.lse[1:], -torch.inf))
    want, _ = cache.decode(q, new.k, new.v)
    assert relative_l2(step.out[:1], want[:1]) <= tolerance(q.dtype)
    assert step.residual[0][1:].isnan().all()
