"""The CUDA attention kernels emulated on the CPU, against the fp64 reference: formats, both schedulers, splits, decode, flushes."""

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
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import normal
from kvgen.verify.tolerance import relative_l2, tolerance, worst_relative_l2
from tests.support.packed import sequence_blocks
from tests.unit.lower_cuda.attend_checks import agree, cached, cleared, fresh, reference
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

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
    ("k4v4:h16/2:kg64", 64, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v2:token:bf16:page16:h4/2:d64", 16, {"warps": 4, "ctas_per_sm": 2}),
    ("k4v4:h8/2:cap30:kg64", 64, {"kv_tile": 64}),
    ("k4v4:h8/2:window100:kg64", 64, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v8:token:page16:h4/2:d64:window100:q3:cap20", 16, {"kv_tile": 64, "tiles_in_flight": 2}),
    ("k4v4:token:page64:h4/2:d64:window200", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v4:token:page16:h4/2:d64:window5", 16, {"kv_tile": 64}),
    ("k2v2:h8/2:boost1/8", 128, {"kv_tile": 128}),
    ("k2v4:h16/2:d96:kg64:page128:boost1/2range", 128, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k2v2:h8/2:d64:bf16:q3:kg32:boost1/4static", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k8v8:h4/4:vchannel:sym:d64", 128, {"kv_tile": 64}),
    ("k2v2:h8/2:vchannel:kg16:vg16:d64:page128", 64, {"kv_tile": 64}),
    ("k8v4:q4:h4/2:vchannel:kg16:vg512:d64", 512, {"kv_tile": 128}),
    ("k4v4:h8/2:d80", 128, {"kv_tile": 64, "exact_q": False}),
    ("k2v2:h8/2:kg64:d128", 64, {"kv_tile": 64, "exact_q": False}),
    ("k4v4:h8/2:kg64:d64", 128, {"kv_tile": 128, "tiles_in_flight": 2, "exact_q": False}),
    ("k4v4:h16/2:d48", 128, {"kv_tile": 64, "exact_q": False}),
    ("k2v4:q4:h16/4:kg32:d64", 64, {"kv_tile": 64, "exact_q": False}),
    ("k4v2:q2:h20/2:kg64:sym:d64", 128, {"kv_tile": 128, "exact_q": False}),
    ("k4v4:token:page64:h4/2:d64", 16, {"kv_tile": 64}),
    ("k4v4:h8/2:kg48:d64", 96, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k2v4:h16/2:vchannel:kg48:vg96:d64:page384", 192, {"kv_tile": 64}),
    ("k8v8:q3:h4/2:vchannel:kg96:vg48:sym:d48", 384, {"kv_tile": 128}),
    ("k4v2:h8/2:vchannel:kg160:vg80:d64", 320, {"kv_tile": 64, "exact_q": False}),
    ("k2v2:h8/2:boost1/4:kg96:d64", 192, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k2v2:h8/2:vchannel:kg192:vg192:d64", 384, {"kv_tile": 128, "tiles_in_flight": 1}),
    ("k4v4:h8/2:kg64:d48", 64, {"copy": "bulk_tile"}),
    ("k2v4:h8/2:vchannel:kg48:vg48:d64", 192, {"tiles_in_flight": 2, "copy": "bulk_stage"}),
    ("k4v8:token:page16:h4/2:d64", 16, {"tiles_in_flight": 2, "copy": "bulk_tile"}),
)
PER_CHANNEL = (*CASES[21:24], *CASES[32:35])
PLAIN, SYMMETRIC, HEADED, GATHERED = CASES[0], CASES[4], CASES[11], CASES[12]
CAPPED, WINDOWED, GATHERED_WINDOW, PAGED_WINDOW, NARROW_WINDOW = CASES[13:18]
DECODED = (*CASES[:4], *CASES[5:8], *CASES[9:23], *CASES[31:])
EQUAL, RAGGED = (300, 290, 310), (2100, 0, 1, 128, 700)
by_words = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
by_scheduler = pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder: Path = tmp_path_factory.mktemp("attend")

    @cache
    def compiled(index: int) -> Emulated:
        words, block, changes = CASES[index]
        return Emulated(spec_of(words, "sm90", [workload_of("2x256")]), block, launch(**changes), folder / str(index))

    return lambda case: compiled(CASES.index(case))


@pytest.mark.parametrize(("case", "tokens"), [(PLAIN, 33), (CASES[1], 9), (CASES[2], 16)])
def test_a_plan_counts_unquantized_tokens_by_their_bytes(kernel: Make, case: Case, tokens: int) -> None:
    """As many tokens of 16-bit K and V as have the bytes of a KV tile: of 16896 (128 tokens), 4608 (64) and 4224 (32 of head_dim 64)."""
    assert kernel(case).plan_shape(3, 1, False).tile_residual == tokens


@by_scheduler
@by_words
@pytest.mark.parametrize(("lengths", "processors", "hard"), [(EQUAL, 4, True), (RAGGED, 7, False)], ids=["equal", "ragged"])
def test_attend_agrees_with_the_reference(
    kernel: Make, case: Case, lengths: tuple[int, ...], processors: int, hard: bool, planned: bool
) -> None:
    built = kernel(case)
    held, q = reference(built, lengths, hard=hard)
    step = Step(built, held, q, processors=processors, planned=planned)
    step.run()
    agree(step, held.attend(q))


@by_scheduler
@pytest.mark.parametrize("per_sm", [100_000, 160_000])
def test_a_launch_leaves_no_memory_for_a_second_cta(kernel: Make, planned: bool, per_sm: int) -> None:
    built = kernel(PLAIN)  # one CTA per SM
    held, q = reference(built, EQUAL)
    step = Step(built, held, q, planned=planned)
    built.library.limit_memory(per_sm)
    try:
        step.run()
    finally:
        built.library.limit_memory(0)
    assert per_sm // built.library.launched_bytes() == 1
    agree(step, held.attend(q))


@by_scheduler
@pytest.mark.parametrize("case", [*CASES[:4], PER_CHANNEL[0]], ids=lambda case: case[0])
@pytest.mark.parametrize(
    ("lengths", "processors"),
    [((77,), 5), ((1500, 0, 0, 0), 4), ((0, 77, 0, 0, 0), 1)],
    ids=["short", "empty", "more empty ones than CTAs"],
)
def test_a_short_sequence_and_empty_ones_agree(kernel: Make, case: Case, lengths: tuple[int, ...], processors: int, planned: bool) -> None:
    built = kernel(case)
    held, q = reference(built, lengths)
    step = Step(built, held, q, processors=processors, planned=planned)
    step.run()
    agree(step, held.attend(q))


@pytest.mark.parametrize("case", PER_CHANNEL, ids=lambda case: case[0])
def test_every_row_agrees_with_v_per_channel(kernel: Make, case: Case) -> None:
    """Each by itself: groups of tokens whose scales differ widely, and a maximum that moves within them."""
    built = kernel(case)
    held, q = reference(built, (2100,), hard=True, seed=4)
    step = Step(built, held, q)
    step.run()
    assert worst_relative_l2(step.out, held.attend(q)[0]) <= tolerance(q.dtype)


@by_scheduler
@pytest.mark.parametrize("case", [PLAIN, CASES[1], CASES[3], GATHERED_WINDOW], ids=lambda case: case[0])
def test_constant_values_bound_weights_too(kernel: Make, case: Case, planned: bool) -> None:
    """Groups of V whose scale is 0: their weights are 0 however far a score lies above the running maximum, which must rise anyway.

    No residual tells a warp how large scores are.
    """
    built, lengths = kernel(case), (256, 128, 384)
    inputs = normal(built.spec, 3, max(lengths), q_len=built.spec.attention.q_len, seed=1)
    held = ReferenceCache(built.spec, 3, built.layout.tokens)
    held.prefill(inputs.k, inputs.v[..., :1].expand_as(inputs.v), torch.tensor(lengths, dtype=torch.int32))
    step = Step(built, held, inputs.q, planned=planned)
    step.run()
    agree(step, held.attend(inputs.q))


@by_scheduler
def test_symmetric_values_of_zero_stay_zero(kernel: Make, planned: bool) -> None:
    """The kernel computes with another scale than 0, of which their code must be a zero too."""
    built, lengths = kernel(SYMMETRIC), (256, 128, 384)
    inputs = normal(built.spec, 3, max(lengths), q_len=built.spec.attention.q_len, seed=1)
    inputs.v[:, 16:] = 0
    held = ReferenceCache(built.spec, 3, built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(lengths, dtype=torch.int32))
    step = Step(built, held, inputs.q, planned=planned)
    step.run()
    agree(step, held.attend(inputs.q))


@by_scheduler
@pytest.mark.parametrize(
    ("lengths", "backwards"), [((127, 128, 255, 254), False), ((1535, 0, 127, 126), True)], ids=["equal", "ragged, backwards"]
)
@pytest.mark.parametrize("case", DECODED, ids=lambda case: case[0])
def test_decode_attends_appends_and_packs_what_became_full(
    kernel: Make, case: Case, lengths: tuple[int, ...], backwards: bool, planned: bool
) -> None:
    """CTAs in either order: any may be the last to complete a head. The static scheduler advances lengths, a plan leaves them."""
    built = kernel(case)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, backwards=backwards, planned=planned)
    step.run()
    agree(step, held.decode(q, *new))
    after = held.lengths.tolist()
    assert step.lengths.tolist() == (list(lengths) if planned else after)
    assert step.overflow.item() == 0
    cached(step, held, lengths, after)


@by_scheduler
@pytest.mark.parametrize("case", [PLAIN, CASES[5], CASES[9], GATHERED, PAGED_WINDOW], ids=lambda case: case[0])
def test_a_sequence_without_room_is_left_as_it_is(kernel: Make, case: Case, planned: bool) -> None:
    """Nothing of it is written, in memory that it has, and the static kernel tells the host; a plan's maker has told it before."""
    built = kernel(case)
    lengths, q_len = (1279, 127, 1280, 1279 - built.spec.attention.q_len + 1), built.spec.attention.q_len
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, planned=planned, limit=1279)
    before = Step(built, held, q, new)
    before.prepare()
    step.run()
    cleared(step)
    overflowing = [b for b, length in enumerate(lengths) if length + q_len > 1279]
    works = [b for b in range(len(lengths)) if b not in overflowing]
    assert works
    assert len(overflowing) >= 2
    assert step.overflow.item() == (0 if planned else 1)
    assert torch.equal(step.lengths, held.lengths + (0 if planned else q_len) * torch.tensor([b in works for b in range(len(lengths))]))
    assert step.out[overflowing].isnan().all()
    assert step.lse[overflowing].isnan().all()
    for now, then in zip((*step.residual, *blocks_of(step)), (*before.residual, *blocks_of(before)), strict=True):
        for b in overflowing:
            assert torch.equal(now[b].view(torch.uint8), then[b].view(torch.uint8))
    counts = torch.tensor([q_len * (b in works) for b in range(len(lengths))], dtype=torch.int32)
    held.append(*new, counts)
    want, lse = held.attend(q)
    held.flush()
    assert relative_l2(step.out[works], want[works]) <= tolerance(q.dtype)
    assert relative_l2(step.lse[works], lse[works]) <= tolerance(q.dtype)
    cached(step, held, lengths, held.lengths.tolist())


def blocks_of(step: Step) -> tuple[list[torch.Tensor]]:
    """Packed blocks of every sequence."""
    return ([sequence_blocks(step.packed, step.table, b) for b in range(len(step.lengths))],)


@pytest.mark.parametrize("case", [PLAIN, CASES[5], GATHERED_WINDOW], ids=lambda case: case[0])
def test_a_plan_that_skips_empty_sequences_gives_them_zeros_and_appends_nothing(kernel: Make, case: Case) -> None:
    built = kernel(case)
    lengths = (0, 300, 0, 0, 127, 0)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, planned=True, skip_empty=True)
    step.run()
    held.append(*new, q.shape[1] * (held.lengths > 0))
    want = held.attend(q)
    held.flush()
    agree(step, want)
    for b, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(step.out[b], torch.zeros_like(step.out[b]))
            assert (step.lse[b] == -torch.inf).all()
            assert all(residual[b].isnan().all() for residual in step.residual)
    cached(step, held, lengths, held.lengths.tolist())


@by_scheduler
@pytest.mark.parametrize("lengths", [EQUAL, (2100, 0, 128)], ids=["equal", "ragged"])
@pytest.mark.parametrize("case", [PLAIN, CASES[9], HEADED, CAPPED], ids=lambda case: case[0])
def test_a_nan_in_q_stays_in_its_head(kernel: Make, case: Case, lengths: tuple[int, ...], planned: bool) -> None:
    """Neither 0 and -inf, nor a NaN for the heads whose weights the same lanes hold."""
    built = kernel(case)
    held, q = reference(built, lengths)
    clean = held.attend(q)
    q = q.clone()
    q[0, 0, 1, 5] = torch.nan
    step = Step(built, held, q, planned=planned)
    step.run()
    assert step.out[0, 0, 1].isnan().all()
    assert step.lse[0, 1, 0].isnan()
    step.out[0, 0, 1], step.lse[0, 1, 0] = clean[0][0, 0, 1].to(q.dtype), clean[1][0, 1, 0]
    agree(step, clean)


def test_a_scale_too_large_for_float16_products_gives_nan_and_no_wrong_number(tmp_path: Path) -> None:
    """Where products are of integers; others become infinite first."""
    spec, block = spec_of("k2v2:h8/2:kg64:d64", "sm90", [workload_of("2x256")]), 64
    emulated = Emulated(spec, block, launch(kv_tile=64, exact_q=False), tmp_path)
    inputs = normal(spec, 1, 200, seed=1)
    for largest, finite in ((7000.0, True), (30000.0, False)):
        k, q = inputs.k.clone(), inputs.q * 1e-5
        k[..., 5] = (torch.rand(k.shape[:-1], generator=torch.Generator().manual_seed(2)) * 2 - 1).half() * largest
        q[..., 5] = 16.0 / largest
        held = ReferenceCache(spec, 1, block)
        held.prefill(k, inputs.v)
        step = Step(emulated, held, q)
        step.run()
        if finite:
            assert relative_l2(step.out, held.attend(q)[0]) <= tolerance(torch.float16)
        else:
            assert bool(torch.isnan(step.out).all())


@by_scheduler
@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
def test_a_nan_in_a_new_token_reaches_its_heads_and_no_others(kernel: Make, which: int, planned: bool) -> None:
    built = kernel(PLAIN)
    held, q = reference(built, (100, 90, 110))
    new = tuple(x.clone() for x in fresh(built, 3))
    new[which][1, 0, 0, 3] = torch.nan
    group = built.spec.attention.q_heads // built.spec.attention.kv_heads
    step = Step(built, held, q, (new[0], new[1]), planned=planned)
    step.run()
    spoiled = torch.zeros(step.out.shape, dtype=torch.bool)
    spoiled[(1, 0, slice(0, group)) if which == 0 else (1, 0, slice(0, group), 3)] = True
    assert torch.equal(step.out.isnan(), spoiled)


@pytest.mark.parametrize(("case", "planned"), [(PLAIN, True), (GATHERED, True), (GATHERED, False)], ids=str)
def test_more_than_128_sequences(kernel: Make, case: Case, planned: bool) -> None:
    built = kernel(case)
    lengths = (*(i % 5 for i in range(127)), 0, 3000, 129, 1)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, planned=planned)
    step.run()
    agree(step, held.decode(q, *new))
    assert step.lengths.tolist() == (list(lengths) if planned else held.lengths.tolist())


@by_scheduler
@pytest.mark.parametrize("case", [PLAIN, CASES[5], HEADED, GATHERED, PAGED_WINDOW], ids=lambda case: case[0])
def test_a_launch_prefetches_what_exists(kernel: Make, case: Case, planned: bool) -> None:
    """Before griddepcontrol.wait the emulator gives lengths, pages and plans that are not so, and refuses prefetches of other memory."""
    built = kernel(case)
    held, q = reference(built, (1300, 1290, 1310))
    for current in (True, False):
        step = Step(built, held, q, processors=7, planned=planned, first_load_is_current=current)
        step.run()
        agree(step, held.attend(q))
        there = sum(x.nbytes for x in (step.packed, *step.residual))
        assert built.library.prefetched() <= there
        if current and (planned or not built.spec.attention.window):
            assert built.library.prefetched() > 0


@pytest.mark.parametrize("lengths", [RAGGED, (1300, 1290, 1310), (0, 5, 0), (0, 0), (40,)])
@pytest.mark.parametrize("case", [PLAIN, HEADED, GATHERED, GATHERED_WINDOW], ids=lambda case: case[0])
def test_a_plan_that_was_read_early_decides_nothing(kernel: Make, case: Case, lengths: tuple[int, ...]) -> None:
    """Before griddepcontrol.wait a plan may be anything, and after it there are CTAs without work tiles: the same bits."""
    built = kernel(case)
    held, q = reference(built, lengths)
    outs = []
    for current in (False, True):
        step = Step(built, held, q, processors=40, planned=True, first_load_is_current=current)
        step.run()
        agree(step, held.attend(q))
        outs.append(step.out)
    assert torch.equal(*outs)


@pytest.mark.parametrize(("processors", "prefetched"), [(9, True), (2, False)])
def test_the_static_kernel_prefetches_residuals_where_all_splits_run_at_once(kernel: Make, processors: int, prefetched: bool) -> None:
    """Sequences of less than a block: there is nothing else to prefetch."""
    built = kernel(PLAIN)
    held, q = reference(built, (100, 90, 110))
    step = Step(built, held, q, processors=processors)
    step.run()
    agree(step, held.attend(q))
    assert (built.library.prefetched() > 0) == prefetched


@pytest.mark.parametrize(
    ("lengths", "planned", "split"), [((1250,) * 4, False, False), ((5000, 0, 0, 0), True, True), ((0, 0, 0, 5000), True, True)]
)
def test_a_plan_splits_a_sequence_much_longer_than_others(kernel: Make, lengths: tuple[int, ...], planned: bool, split: bool) -> None:
    """Partial results are in the workspace, which was NaN, only if some head has several splits."""
    built = kernel(PLAIN)
    held, q = reference(built, lengths)
    step = Step(built, held, q, planned=planned)
    step.run()
    agree(step, held.attend(q))
    counters = 4 + built.counters * len(lengths) * built.spec.attention.kv_heads
    assert bool(torch.isfinite(step.workspace[-(-counters // 64) * 64 :]).any()) == split


@by_scheduler
@pytest.mark.parametrize(
    "case", [PLAIN, CASES[6], HEADED, WINDOWED, GATHERED_WINDOW, PAGED_WINDOW, NARROW_WINDOW], ids=lambda case: case[0]
)
def test_any_lengths_agree_with_the_reference(kernel: Make, case: Case, planned: bool) -> None:
    """Empty sequences, whole blocks and what lies between, on devices of several sizes; equal bits in either order of CTAs."""
    built = kernel(case)
    size = st.one_of(st.sampled_from([0, 1, built.layout.tokens - 1, built.layout.tokens]), st.integers(0, 500), st.integers(1500, 2500))

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.lists(size, min_size=1, max_size=5), st.integers(1, 9), st.booleans(), st.booleans())
    def check(lengths: list[int], processors: int, backwards: bool, append: bool) -> None:
        held, q = reference(built, tuple(lengths), seed=3)
        new = fresh(built, len(lengths)) if append else None
        steps = [Step(built, held, q, new, processors=processors, backwards=order, planned=planned) for order in (backwards, not backwards)]
        for step in steps:
            step.run()
        agree(steps[0], held.attend(q) if new is None else held.decode(q, *new))
        assert torch.equal(steps[0].out.view(torch.int16), steps[1].out.view(torch.int16))
        assert torch.equal(steps[0].lse.view(torch.int32), steps[1].lse.view(torch.int32))

    check()


@by_scheduler
def test_a_cap_far_above_the_scores_changes_nothing(planned: bool, tmp_path: Path) -> None:
    """The largest cap of the spec language: an error that grew with the cap would be larger than the scores."""
    built = Emulated(spec_of("k4v4:h4/2:d64:kg64:cap1000000", "sm90", [workload_of("2x256")]), 64, launch(), tmp_path)
    held, q = reference(built, (200, 70))
    step = Step(built, held, q, planned=planned)
    step.run()
    agree(step, held.attend(q))
