"""The CUDA attention kernel emulated on the CPU, against the fp64 reference: formats, lengths alike and not, splits, decode, flushes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.schedule import Value
from kvgen.reference.cache import ReferenceCache
from kvgen.reference.data import normal, structured
from kvgen.reference.tolerance import relative_l2, tolerance
from tests.support.packed import meaningful_bytes, sequence_blocks
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch, packed_cache

Case = tuple[str, int, dict[str, Value]]
Make = Callable[[Case], Emulated]
CASES: tuple[Case, ...] = (
    ("k4v4:h8/2", 128, {"kv_tile": 128}),
    ("k2v2:h8/2:kg64:vg64", 64, {"reduction": "two_level"}),
    ("k8v8:h4/4:kg64:d64", 64, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v2:token:bf16:h10/2:d64", 64, {"warps": 4, "ctas_per_sm": 2}),
    ("k4v4:h24/2:sym:d96", 128, {"kv_tile": 128}),
    ("k8v4:q3:h8/2:page128:kg32", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v8:token:page16:h4/2:d64", 16, {"kv_tile": 128}),
    ("k2v4:token:kg32:vg32:page96:q2:h4/2:d64", 32, {"reduction": "two_level"}),
    ("k16v16:h4/2:d64", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v4:h8/2:kg64:vg64", 64, {"reduction": "cluster2"}),
    ("k2v4:q5:h8/2:page128:d64:kg64", 64, {"reduction": "cluster4"}),
    ("k4v4:h16/2:kg64", 64, {"kv_tile": 32, "tiles_in_flight": 2, "reduction": "shares"}),
    ("k4v2:token:bf16:page16:h4/2:d64", 16, {"warps": 4, "ctas_per_sm": 2, "reduction": "shares"}),
)
DECODED = (*CASES[:4], *CASES[5:8], *CASES[9:])
ALIKE, UNLIKE = (300, 290, 310), (2100, 0, 1, 128, 700)
"""UNLIKE: one is longer than the mean by more than an eighth and 1024 tokens."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder: Path = tmp_path_factory.mktemp("attend")

    @cache
    def compiled(index: int) -> Emulated:
        words, block, changes = CASES[index]
        return Emulated(spec_of(words, "sm90", [workload_of("2x256")]), block, launch(**changes), folder / str(index))

    return lambda case: compiled(CASES.index(case))


def reference(built: Emulated, lengths: tuple[int, ...], *, hard: bool = False, seed: int = 1) -> tuple[ReferenceCache, torch.Tensor]:
    """A cache with these lengths, and queries."""
    inputs = (structured if hard else normal)(built.spec, len(lengths), max(1, *lengths), q_len=built.spec.attention.q_len, seed=seed)
    held = ReferenceCache(built.spec, len(lengths), built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(lengths, dtype=torch.int32))
    return held, inputs.q


def agree(step: Step, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Output and LSE are the reference's, and counters are back at zero."""
    limit = tolerance(step.q.dtype)
    assert relative_l2(step.out, want[0]) <= limit
    seen = torch.isfinite(want[1])
    assert torch.equal(torch.isfinite(step.lse), seen)
    assert relative_l2(step.lse[seen], want[1][seen]) <= limit
    cells = len(step.lengths) * step.kernel.spec.attention.kv_heads
    words = step.workspace.view(torch.int32)
    assert not words[: 4 + 33 * cells].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize(
    ("lengths", "processors", "hard"), [(ALIKE, 4, True), ((77,), 5, False), (UNLIKE, 7, False), ((1500, 0, 0, 0), 4, False)]
)
def test_attend_agrees_with_the_reference(kernel: Make, case: Case, lengths: tuple[int, ...], processors: int, hard: bool) -> None:
    built = kernel(case)
    held, q = reference(built, lengths, hard=hard)
    step = Step(built, held, q, processors=processors)
    step.run()
    agree(step, held.attend(q))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("lengths", [(127, 128, 255, 254), (1535, 0, 127, 126)], ids=["alike", "unlike"])
@pytest.mark.parametrize("case", DECODED, ids=lambda case: case[0])
def test_decode_attends_appends_and_packs_what_became_full(kernel: Make, case: Case, lengths: tuple[int, ...], backwards: bool) -> None:
    """CTAs in either order: whoever is the last to arrive completes a head, and to read the lengths advances them."""
    built = kernel(case)
    held, q = reference(built, lengths)
    tokens, q_len = built.layout.tokens, q.shape[1]
    new = normal(built.spec, len(lengths), q_len, q_len=q_len, seed=2)
    step = Step(built, held, q, (new.k, new.v), backwards=backwards)
    step.run()
    agree(step, held.decode(q, new.k, new.v))
    after = [length + q_len for length in lengths]
    assert step.lengths.tolist() == held.lengths.tolist() == after
    for mine, expected in zip(step.residual, held.residual(), strict=True):
        for b, length in enumerate(after):
            assert torch.equal(mine[b, :, : length % tokens], expected[b, :, : length % tokens])
    expected, _ = packed_cache(built, held, max(after))
    meaningful = meaningful_bytes(built.layout)
    for b, (old, length) in enumerate(zip(lengths, after, strict=True)):
        if length // tokens > old // tokens:
            one, other = (sequence_blocks(packed, step.table, b)[:, old // tokens] for packed in (step.packed, expected))
            assert torch.equal(one[:, meaningful], other[:, meaningful])


@pytest.mark.parametrize("lengths", [(300, 290, 310), (2100, 0, 128)], ids=["alike", "unlike"])
@pytest.mark.parametrize("case", [CASES[0], CASES[9], CASES[11]], ids=lambda case: case[0])
def test_a_nan_in_q_stays_in_its_head(kernel: Make, case: Case, lengths: tuple[int, ...]) -> None:
    """Neither 0 and -inf, nor a NaN for the heads whose weights the same lanes hold."""
    built = kernel(case)
    held, q = reference(built, lengths)
    clean = held.attend(q)
    q = q.clone()
    q[0, 0, 1, 5] = torch.nan
    step = Step(built, held, q)
    step.run()
    assert step.out[0, 0, 1].isnan().all()
    assert step.lse[0, 1, 0].isnan()
    step.out[0, 0, 1], step.lse[0, 1, 0] = clean[0][0, 0, 1].to(q.dtype), clean[1][0, 1, 0]
    agree(step, clean)


@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
def test_a_nan_in_a_new_token_reaches_its_heads_and_no_others(kernel: Make, which: int) -> None:
    built = kernel(CASES[0])
    held, q = reference(built, (100, 90, 110))
    new = normal(built.spec, 3, 1, q_len=1, seed=2)
    fresh = (new.k.clone(), new.v.clone())
    fresh[which][1, 0, 0, 3] = torch.nan
    group = built.spec.attention.q_heads // built.spec.attention.kv_heads
    step = Step(built, held, q, fresh)
    step.run()
    spoiled = torch.zeros(step.out.shape, dtype=torch.bool)
    spoiled[(1, 0, slice(0, group)) if which == 0 else (1, 0, slice(0, group), 3)] = True
    assert torch.equal(step.out.isnan(), spoiled)


@pytest.mark.parametrize("case", [CASES[0], CASES[11]], ids=lambda case: case[0])
def test_more_sequences_than_warps_keep_lengths_of(kernel: Make, case: Case) -> None:
    """A warp copies 128 lengths; those that follow, here the longest of all, it reads where they lie."""
    built = kernel(case)
    held, q = reference(built, (*(i % 5 for i in range(127)), 0, 3000, 129, 1))
    step = Step(built, held, q)
    step.run()
    agree(step, held.attend(q))


def test_a_launch_refuses_what_an_int_cannot_count(kernel: Make) -> None:
    """Tokens of all sequences; in shares, units of all heads. What the cache has no room for does not count."""
    built = kernel(CASES[12])
    million = 2**20 // built.layout.tokens
    assert built.library.countable(1024, 8, million, 2**24)
    assert built.library.countable(1024, 8, 2 * million, 2**20)
    assert not built.library.countable(1024, 8, 2 * million, 2**24)
    assert not built.library.countable(1024, 128, million, 2**24)


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[11], CASES[12]], ids=lambda case: case[0])
def test_a_launch_asks_ahead_for_what_it_will_read(kernel: Make, case: Case) -> None:
    """Not for more than there is. The emulator refuses what lies elsewhere; before the turn it shows lengths and pages that are not so."""
    built = kernel(case)
    held, q = reference(built, (1300, 1290, 1310))
    step = Step(built, held, q)
    step.run()
    agree(step, held.attend(q))
    there = sum(x.nbytes for x in (step.packed, *step.residual))
    assert 0 < built.library.asked_ahead() <= there


@pytest.mark.parametrize("lengths", [UNLIKE, (1300, 1290, 1310), (0, 5, 0)])
@pytest.mark.parametrize("case", [CASES[11], CASES[12]], ids=lambda case: case[0])
def test_shares_found_before_the_turn_are_those_found_after(kernel: Make, case: Case, lengths: tuple[int, ...]) -> None:
    """Whether lengths are at first what they will be, and anything at a second look, or anything at once: the same bits."""
    built = kernel(case)
    held, q = reference(built, lengths)
    outs = []
    for truth in (False, True):
        built.library.show(truth)
        step = Step(built, held, q, processors=7)
        try:
            step.run()
        finally:
            built.library.show(False)
        agree(step, held.attend(q))
        outs.append(step.out)
    assert torch.equal(*outs)


@pytest.mark.parametrize(("processors", "asked"), [(9, True), (2, False)])
def test_residuals_are_asked_for_where_all_parts_run_at_once(kernel: Make, processors: int, asked: bool) -> None:
    """Sequences of less than a block: there is nothing else to ask for."""
    built = kernel(CASES[0])
    held, q = reference(built, (100, 90, 110))
    step = Step(built, held, q, processors=processors)
    step.run()
    agree(step, held.attend(q))
    assert (built.library.asked_ahead() > 0) == asked


@pytest.mark.parametrize(("lengths", "several"), [((1250,) * 4, False), ((5000, 0, 0, 0), True), ((0, 0, 0, 5000), True)])
def test_a_sequence_much_longer_than_others_is_cut_where_they_are_not(kernel: Make, lengths: tuple[int, ...], several: bool) -> None:
    """Partial results are in the workspace, which was NaN, only if some head has several parts: of equal lengths none has."""
    built = kernel(CASES[0])
    held, q = reference(built, lengths)
    step = Step(built, held, q)
    step.run()
    agree(step, held.attend(q))
    counters = 4 + 33 * len(lengths) * built.spec.attention.kv_heads
    assert bool(torch.isfinite(step.workspace[-(-counters // 64) * 64 :]).any()) == several


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6]], ids=lambda case: case[0])
def test_any_lengths_agree_with_the_reference(kernel: Make, case: Case) -> None:
    """Empty sequences, whole blocks and what lies between, on devices of several sizes; a batch of equal calls gives equal bits."""
    built = kernel(case)
    size = st.one_of(st.sampled_from([0, 1, built.layout.tokens - 1, built.layout.tokens]), st.integers(0, 500), st.integers(1500, 2500))

    @settings(max_examples=12, deadline=None, database=None)
    @given(st.lists(size, min_size=1, max_size=5), st.integers(1, 9), st.booleans())
    def check(lengths: list[int], processors: int, backwards: bool) -> None:
        held, q = reference(built, tuple(lengths), seed=3)
        steps = [Step(built, held, q, processors=processors, backwards=order) for order in (backwards, not backwards)]
        for step in steps:
            step.run()
        agree(steps[0], held.attend(q))
        assert torch.equal(steps[0].out.view(torch.int16), steps[1].out.view(torch.int16))

    check()
