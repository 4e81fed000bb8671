"""The CUDA attention kernels emulated on the CPU, against the fp64 reference: formats, shapes, both schedulers, splits, decode, flushes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.format.rotation import rotate_back
from kvgen.lower.schedule import Value
from kvgen.verify.data import normal
from kvgen.verify.reference import rotated_query
from kvgen.verify.tolerance import relative_l2, tolerance, worst_relative_l2
from tests.lives.emulated import StepLife
from tests.support.packed import sequence_blocks
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda.attend_checks import agree, cached, cleared, fresh, reference
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

Make = Callable[[str], Emulated]
TWO: dict[str, Value] = {"kv_tile": 32, "tiles_in_flight": 2}
CASES: dict[str, tuple[int, dict[str, Value]]] = {
    "k4v4:h8/2": (128, {"kv_tile": 128}),
    "k2v2:h8/2:kg64:vg64": (64, {}),
    "k8v8:h4/4:kg64:d64": (64, TWO),
    "k4v2:token:bf16:h10/2:d64": (64, {"warps": 4, "ctas_per_sm": 2}),
    "k4v4:h24/2:sym:d96": (128, {"kv_tile": 128}),
    "k8v4:q3:h8/2:page128:kg32": (32, TWO),
    "k2v4:token:kg32:vg32:page96:q2:h4/2:d64": (32, {}),
    "k16v16:h4/2:d64": (32, TWO),
    "k4v4:h8/2:kg64:vg64": (64, {"reduction": "cluster2"}),
    "k2v4:q5:h8/2:page128:d64:kg64": (64, {"reduction": "cluster4"}),
    "k4v4:h16/2:kg64": (192, {"kv_tile": 32, "tiles_in_flight": 3}),
    "k4v2:token:bf16:page16:h4/2:d64": (16, {"warps": 4, "ctas_per_sm": 2}),
    "k4v4:h8/2:cap30:kg64": (64, {"kv_tile": 64}),
    "k4v4:h8/2:window100:kg64": (64, TWO),
    "k4v8:token:page16:h4/2:d64:window100:q3:cap20": (16, {"kv_tile": 64, "tiles_in_flight": 2}),
    "k4v4:token:page16:h4/2:d64:window5": (16, {"kv_tile": 64}),
    "k2v2:h8/2:boost1/8": (128, {"kv_tile": 128}),
    "k2v2:h8/2:d64:bf16:q3:kg32:boost1/4static": (32, TWO),
    "k8v8:h4/4:vchannel:sym:d64": (128, {"kv_tile": 64}),
    "k2v2:h8/2:vchannel:kg16:vg16:d64:page128": (64, {"kv_tile": 64}),
    "k4v4:h8/2:kg64:d64": (128, {"kv_tile": 128, "tiles_in_flight": 2, "exact_q": False}),
    "k2v2:h8/2:kg64:d64": (64, {"kv_tile": 64, "exact_q": False}),
    "k2v4:h16/2:vchannel:kg48:vg96:d64:page384": (192, {"kv_tile": 64}),
    "k4v4:h8/2:kg64:d48": (64, {"copy": "bulk_tile"}),
    "k2v4:h8/2:vchannel:kg48:vg48:d64": (192, {"tiles_in_flight": 2, "copy": "bulk_stage"}),
    "k4v8:token:page16:h4/2:d64": (16, {"tiles_in_flight": 2, "copy": "bulk_tile"}),
    "k4v4:token:bf16:h8/2:krot128:vrot128": (32, TWO),
    "k8v8:token:d64:h4/2:krot64u:vrot64u:q8:rollback8": (32, TWO),
    "knvfp4vnvfp4:h8/2:krot128:vrot32": (32, TWO),
    "k4v2:h16/2:kg64:d80:krot16u:vrot16:vg80:q2": (64, {**TWO, "reduction": "cluster2"}),
    "k2v4:h32/2:d64:q3:vchannel:kg32:vg32:vrot64:local20:sinks": (32, {**TWO, "warps": 4}),
    # rows of partial results of which an odd number fills no 16 bytes with their maxima and sums
    "k4v4:h5/1": (128, {"kv_tile": 64}),
    # runs of 16 channels
    "k8v8:token:d112:h5/1:sym:page32": (32, {"kv_tile": 64}),
    "k2v4:token:d144:kg16:vg48:h2/2": (64, {"kv_tile": 64, "reduction": "cluster2"}),
    "k4v2:token:d16:page16:h4/2": (16, {"kv_tile": 64}),
    "k2v4:d112:h16/1:kg32:boost3/7range": (64, {**TWO, "exact_q": False}),
    # wide heads, whose residual stays in memory
    "k4v8:bf16:d512:h8/1:kg32:vg128": (32, {"kv_tile": 32}),
    # floats
    "knvfp4vmxfp4:h8/2:page16:d64:q2": (16, {"kv_tile": 64}),
    "kmxfp4vnvfp4:h8/2:d96": (64, TWO),
    "kmxfp4vnvfp4:bf16:h16/2:page16:d64:q2:arrival": (16, {"kv_tile": 64}),
    "ke4m3ve5m2:h4/4:vchannel:kg32:vg64:d80": (64, TWO),
    # static scales
    "k4v8:kscale-channel:vscale-head:h8/2:d64": (64, {"kv_tile": 64}),
    "ke4m3ve4m3:kscale-channel:vscale-channel:h16/2:d64:page32": (32, {"kv_tile": 32, "tiles_in_flight": 2}),
    "knvfp4vnvfp4:kscale-head:vscale-head:h8/2:d64": (32, {"kv_tile": 64}),
    # runs of query rows
    "k4v4:vchannel:d112:h64/2:kg64:vg32": (64, TWO),
    "k8v4:d80:q8:h32/2:kg32:sink5:local20:rollback8:sinks": (32, TWO),
    "k4v8:token:q5:h20/1:d144:page16:window100:cap20": (16, {"kv_tile": 32, "reduction": "cluster2"}),
    # tokens that are quantized as they arrive
    "k4v4:token:h8/2:krot128:vrot32u:arrival": (128, {"kv_tile": 128}),
    "k4v2:token:page16:h4/2:d64:q3:bf16:arrival": (16, {"kv_tile": 64, "tiles_in_flight": 2}),
    "k4ve4m3:kscale-channel:vscale-head:bf16:h8/2:d64:page32:q2:arrival": (32, {"kv_tile": 64}),
    "k16v16:page32:h16/2:d64:window100:cap20:sinks:arrival": (32, {"kv_tile": 32, "reduction": "cluster2"}),
    # unquantized tokens and learned sinks
    "k2v2:h8/2:d64:kg64:vg64:boost1/4:sink32:local128:page128": (64, {}),
    "k4v8:token:page16:h4/2:d64:sink40:rollback30:q3:sinks": (16, {"kv_tile": 64, "tiles_in_flight": 2}),
    "k4v4:token:page64:h4/2:d64:window200:local70:sinks": (32, {"kv_tile": 32}),
}
NAMES = tuple(CASES)
PLAIN, NARROW, _, PER_TOKEN, SYMMETRIC, PAGED = NAMES[:6]
CLUSTERED, HEADED, GATHERED, CAPPED, GATHERED_WINDOW = NAMES[8], NAMES[10], NAMES[11], NAMES[12], NAMES[14]
RUNS = NAMES[NAMES.index("k4v4:vchannel:d112:h64/2:kg64:vg32") :][:3]
UNQUANTIZED = [name for name in NAMES if "sink" in name or "local" in name]
ROLLBACK = [name for name in UNQUANTIZED if "rollback" in name and name not in RUNS]
EQUAL, RAGGED = (300, 290, 310), (1100, 0, 1, 128, 300)
by_scheduler = pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("attend")

    @cache
    def compiled(name: str) -> Emulated:
        block, changes = CASES[name]
        return Emulated(spec_of(name, "sm90", [workload_of("2x256")]), block, launch(**changes), folder / str(NAMES.index(name)))

    return compiled


def logits(built: Emulated) -> torch.Tensor | None:
    """Learned sinks, two of them far below and far above all scores."""
    if not built.spec.attention.sinks:
        return None
    sinks = torch.randn(built.spec.attention.q_heads, generator=torch.Generator().manual_seed(5))
    sinks[:2] = torch.tensor([-3e4, 3e4])
    return sinks


def borders(built: Emulated) -> tuple[int, ...]:
    """Lengths at which a token fills the sink, the local tokens or a block, beside them, and far beyond."""
    cache, block = built.spec.cache, built.layout.tokens
    sink, first = cache.sink, cache.sink + cache.local + block
    return tuple(max(n, 0) for n in (0, 1, sink - 2, sink, sink + 1, first - 1, first, first + block - 1, 9 * block + 5, 1300))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("lengths", "processors", "planned"), [(EQUAL, 4, False), (RAGGED, 16, True)], ids=["static", "planned"])
def test_attend_agrees_with_the_reference(kernel: Make, name: str, lengths: tuple[int, ...], processors: int, planned: bool) -> None:
    built = kernel(name)
    held, q = reference(built, lengths, hard=lengths == EQUAL)
    step = Step(built, held, q, processors=processors, planned=planned, in_slots=planned, sinks=logits(built))
    step.run()
    agree(step, held.attend(q, sinks=logits(built)))


def test_a_rotated_query_is_rounded_before_the_factor(kernel: Make) -> None:
    """The reference of a GPU rounds it there too: with the other place single rows are off by .0015."""
    built = kernel("k4v4:token:h8/2:krot128:vrot32u:arrival")
    held, q = reference(built, EQUAL, hard=True)
    step, rotation = Step(built, held, q), built.layout.key.rotation
    step.run()
    want, _ = held.attend(rotate_back(rotated_query(q, rotation, early=True), rotation))
    assert worst_relative_l2(step.out, want) < 5e-4


@by_scheduler
@pytest.mark.parametrize("name", NAMES)
def test_decode_attends_appends_and_packs_what_became_full(kernel: Make, name: str, planned: bool) -> None:
    """CTAs in either order: any may be the last to complete a head, and no block is packed before all runs of rows have read it.

    The static scheduler advances lengths, a plan leaves them; with one, residuals are found by their slots.
    """
    built = kernel(name)
    n = built.layout.tokens
    lengths = (
        borders(built) if name in UNQUANTIZED else (12 * n - 1 if n < 128 else 1535, 0, n - built.spec.attention.q_len, n - 1, 2 * n - 1)
    )
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, processors=7, backwards=planned, planned=planned, in_slots=planned, sinks=logits(built))
    step.run()
    agree(step, held.decode(q, *new, sinks=logits(built)))
    after = held.lengths.tolist()
    assert step.lengths.tolist() == (list(lengths) if planned else after)
    assert step.overflow.item() == 0
    cached(step, held, lengths, after)


@pytest.mark.parametrize("name", [PLAIN, CLUSTERED, GATHERED, GATHERED_WINDOW, *RUNS[1:], *ROLLBACK])
def test_random_steps_agree_with_the_reference(kernel: Make, name: str) -> None:
    """Any lengths and numbers of queries, on devices of several sizes, and tokens that are taken back and appended anew.

    Equal bits in either order of CTAs, and whatever is in memory before griddepcontrol.wait.
    """
    for number in range(2):
        StepLife(kernel(name), Random(number)).live()


@by_scheduler
@pytest.mark.parametrize(("name", "zero"), [(PLAIN, False), (NARROW, False), (PER_TOKEN, False), (SYMMETRIC, True)])
def test_groups_of_one_value_bound_weights_too(kernel: Make, name: str, zero: bool, planned: bool) -> None:
    """Groups of V whose scale is 0: their weights are 0 however far a score lies above the running maximum, which must rise anyway.

    No residual tells a warp how large scores are. Zeros of a symmetric V stay zeros.
    """
    built, lengths = kernel(name), (256, 128, 384)
    inputs = normal(built.spec, 3, max(lengths), q_len=built.spec.attention.q_len, seed=1)
    held = ReferenceCache(built.spec, 3, built.layout.tokens)
    values = inputs.v * (torch.arange(max(lengths)) < 16)[:, None, None] if zero else inputs.v[..., :1].expand_as(inputs.v)
    held.prefill(inputs.k, values, torch.tensor(lengths, dtype=torch.int32))
    step = Step(built, held, inputs.q, planned=planned)
    step.run()
    agree(step, held.attend(inputs.q))


@by_scheduler
@pytest.mark.parametrize("name", [PLAIN, PAGED, CLUSTERED, GATHERED])
def test_a_sequence_without_room_is_left_as_it_is(kernel: Make, name: str, planned: bool) -> None:
    """Nothing of it is written, in memory that it has, and the static kernel tells the host; a plan's maker has told it before."""
    built = kernel(name)
    lengths, q_len = (1279, 127, 1280, 1279 - built.spec.attention.q_len + 1), built.spec.attention.q_len
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step, before = Step(built, held, q, new, planned=planned, limit=1279), Step(built, held, q, new)
    before.prepare()
    step.run()
    cleared(step)
    overflowing = [b for b, length in enumerate(lengths) if length + q_len > 1279]
    works = [b for b in range(len(lengths)) if b not in overflowing]
    assert step.overflow.item() == (0 if planned else 1)
    assert step.out[overflowing].isnan().all()
    assert step.lse[overflowing].isnan().all()
    for b in overflowing:
        for now, then in zip(step.residual, before.residual, strict=True):
            assert torch.equal(now[b].view(torch.uint8), then[b].view(torch.uint8))
        assert torch.equal(sequence_blocks(step.packed, step.table, b), sequence_blocks(before.packed, before.table, b))
    held.append(*new, torch.tensor([q_len * (b in works) for b in range(len(lengths))], dtype=torch.int32))
    want, _ = held.attend(q)
    held.flush()
    assert step.lengths.tolist() == (list(lengths) if planned else held.lengths.tolist())
    assert relative_l2(step.out[works], want[works]) <= tolerance(q.dtype)
    cached(step, held, lengths, held.lengths.tolist())


@pytest.mark.parametrize("name", [PLAIN, PAGED, GATHERED_WINDOW])
def test_a_plan_that_skips_empty_sequences_gives_them_zeros_and_appends_nothing(kernel: Make, name: str) -> None:
    built, lengths = kernel(name), (0, 300, 0, 0, 127, 0)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, planned=True, skip_empty=True)
    step.run()
    held.append(*new, q.shape[1] * (held.lengths > 0))
    want = held.attend(q)
    held.flush()
    agree(step, want)
    assert all(residual[b].isnan().all() for residual in step.residual for b, length in enumerate(lengths) if length == 0)
    cached(step, held, lengths, held.lengths.tolist())


@by_scheduler
@pytest.mark.parametrize("name", [CLUSTERED, HEADED, CAPPED])
def test_a_nan_in_q_stays_in_its_head(kernel: Make, name: str, planned: bool) -> None:
    """Neither 0 and -inf, nor a NaN for the heads whose weights the same lanes hold."""
    built = kernel(name)
    held, q = reference(built, (1100, 0, 128))
    clean = held.attend(q)
    q = q.clone()
    q[0, 0, 1, 5] = torch.nan
    step = Step(built, held, q, planned=planned)
    step.run()
    assert step.out[0, 0, 1].isnan().all()
    assert step.lse[0, 1, 0].isnan()
    step.out[0, 0, 1], step.lse[0, 1, 0] = clean[0][0, 0, 1].to(q.dtype), clean[1][0, 1, 0]
    agree(step, clean)


@pytest.mark.parametrize(("largest", "finite"), [(7000.0, True), (30000.0, False)])
def test_a_scale_too_large_for_float16_products_gives_nan_and_no_wrong_number(kernel: Make, largest: float, finite: bool) -> None:
    """Where products are of integers; others become infinite first."""
    built = kernel("k2v2:h8/2:kg64:d64")
    inputs = normal(built.spec, 1, 200, seed=1)
    k, q = inputs.k.clone(), inputs.q * 1e-5
    k[..., 5] = (torch.rand(k.shape[:-1], generator=torch.Generator().manual_seed(2)) * 2 - 1).half() * largest
    q[..., 5] = 16.0 / largest
    held = ReferenceCache(built.spec, 1, built.layout.tokens)
    held.prefill(k, inputs.v)
    step = Step(built, held, q)
    step.run()
    assert relative_l2(step.out, held.attend(q)[0]) <= tolerance(torch.float16) if finite else step.out.isnan().all()


@by_scheduler
@pytest.mark.parametrize("name", [PAGED, GATHERED])
def test_a_launch_prefetches_what_exists(kernel: Make, name: str, planned: bool) -> None:
    """Before griddepcontrol.wait the emulator gives lengths, pages, slots and plans that are wrong, and refuses other prefetches."""
    built = kernel(name)
    held, q = reference(built, (700, 690, 710))
    for current in (True, False):
        step = Step(built, held, q, processors=7, planned=planned, in_slots=True, first_load_is_current=current)
        step.run()
        agree(step, held.attend(q))
        assert built.library.prefetched() <= sum(x.nbytes for x in (step.packed, *step.residual))
    step = Step(built, held, q, processors=7, planned=planned, first_load_is_current=True)
    step.run()
    assert built.library.prefetched() > 0


@pytest.mark.parametrize("name", [PLAIN, CLUSTERED, RUNS[1]])
def test_a_workspace_serves_every_smaller_batch(kernel: Make, name: str) -> None:
    """Of any length. That none writes where a larger batch has counters is checked in every test of a step."""
    built = kernel(name)
    heads = built.spec.attention.kv_heads
    for processors in (4, 132):
        sizes = [
            built.library.workspace_bytes(processors, batch, heads, n) for batch in (1, 2, 3, 5, 8, 30, 31, 256, 2048) for n in (1, 9999)
        ]
        assert sizes == sorted(sizes)
