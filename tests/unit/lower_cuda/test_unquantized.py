"""Sink, local and rollback tokens, and learned sinks, in the emulated CUDA kernels: attend, decode, flush, crop, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.format.layout import packed_layout
from kvgen.lower.schedule import Value
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import normal
from kvgen.verify.quantize import torch_dtype
from tests.support.packed import meaningful_bytes, sequence_blocks
from tests.unit.lower_cuda import emulate
from tests.unit.lower_cuda.attend_checks import agree, cached, fresh, reference
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

Case = tuple[str, int, dict[str, Value]]
CASES: tuple[Case, ...] = (
    ("k2v2:h8/2:d64:kg64:vg64:boost1/4:sink32:local128:page128", 64, {"reduction": "two_level"}),
    ("k4v4:h4/2:d64:kg32:sink21:local5:rollback8:q4", 32, {"kv_tile": 32, "tiles_in_flight": 2}),
    ("k4v8:token:page16:h4/2:d64:sink40:rollback30:q3:sinks", 16, {"kv_tile": 64, "tiles_in_flight": 2}),
    ("k4v4:token:page64:h4/2:d64:window200:local70:sinks", 32, {"kv_tile": 32}),
    ("k8v4:h4/2:d64:kg64:sink3:sinks", 64, {"reduction": "cluster2"}),
)
SINKS = [case for case in CASES if "sinks" in case[0]]
ROLLED = [case for case in CASES if "rollback" in case[0]]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
by_scheduler = pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Emulated]:
    folder: Path = tmp_path_factory.mktemp("unquantized")

    @cache
    def compiled(index: int) -> Emulated:
        words, block, changes = CASES[index]
        return Emulated(spec_of(words, "sm90", [workload_of("2x256")]), block, launch(**changes), folder / str(index))

    return lambda case: compiled(CASES.index(case))


def boundaries(built: Emulated) -> tuple[int, ...]:
    """Lengths at which a token fills the sink, the local tokens or a block, beside them, and far beyond."""
    cache, block = built.spec.cache, built.layout.tokens
    sink, first = cache.sink, cache.sink + cache.local + block
    return (0, 1, sink - 2, sink, sink + 1, first - 1, first, first + block - 1, 9 * block + 5, 1300)


def lengths_of(built: Emulated) -> tuple[int, ...]:
    return tuple(max(length, 0) for length in boundaries(built))


def logits(built: Emulated, seed: int = 5) -> torch.Tensor | None:
    """Learned sinks, two of them far below and far above all scores."""
    if not built.spec.attention.sinks:
        return None
    sinks = torch.randn(built.spec.attention.q_heads, generator=torch.Generator().manual_seed(seed))
    sinks[:2] = torch.tensor([-3e4, 3e4])
    return sinks


@by_scheduler
@by_case
def test_attend_agrees_at_every_boundary(kernel: Callable[[Case], Emulated], case: Case, planned: bool) -> None:
    """Several splits, in either order of CTAs, with any lengths before griddepcontrol.wait: the same bits."""
    built = kernel(case)
    held, q = reference(built, lengths_of(built), hard=True)
    sinks = logits(built)
    steps = [
        Step(built, held, q, processors=9, planned=planned, sinks=sinks, backwards=other, first_load_is_current=other)
        for other in (False, True)
    ]
    for step in steps:
        step.run()
    agree(steps[0], held.attend(q, sinks=sinks))
    assert torch.equal(steps[0].out.view(torch.int16), steps[1].out.view(torch.int16))


@by_scheduler
@by_case
def test_decode_appends_and_packs_at_every_boundary(kernel: Callable[[Case], Emulated], case: Case, planned: bool) -> None:
    """New tokens in the sink, behind it and in a block that the step packs; blocks that lie wholly in the residual."""
    built = kernel(case)
    lengths, sinks = lengths_of(built), logits(built)
    held, q = reference(built, lengths)
    new = fresh(built, len(lengths))
    step = Step(built, held, q, new, processors=7, planned=planned, sinks=sinks)
    step.run()
    agree(step, held.decode(q, *new, sinks=sinks))
    after = held.lengths.tolist()
    assert (held.blocks > torch.tensor([held.rows.packed_blocks(length) for length in lengths])).sum() >= 2
    assert step.lengths.tolist() == (list(lengths) if planned else after)
    cached(step, held, lengths, after)


@by_scheduler
@pytest.mark.parametrize("case", ROLLED, ids=lambda case: case[0])
def test_tokens_are_taken_back_and_appended_anew(kernel: Callable[[Case], Emulated], case: Case, planned: bool) -> None:
    """Rows keep the tokens of blocks that are packed, taken back and packed again. Each step starts from what the one before must leave."""
    built = kernel(case)
    most, block, sinks = built.spec.cache.rollback, built.layout.tokens, logits(built)
    first = built.spec.cache.sink + built.spec.cache.local + block
    held, _ = reference(built, (first - 2, first + block - 1, first + 3 * block + 1, 5))
    random = torch.Generator().manual_seed(3)
    for number in range(7):
        before = tuple(held.lengths.tolist())
        _, q = reference(built, before, seed=number)
        new = fresh(built, len(before))
        step = Step(built, held, q, new, planned=planned, sinks=sinks)
        step.run()
        agree(step, held.decode(q, *new, sinks=sinks))
        cached(step, held, before, held.lengths.tolist())
        taken = torch.randint(0, 7, (len(before),), generator=random) if number else torch.full((len(before),), most)
        held.crop(torch.minimum(taken, held.lengths - held._least.clamp(min=0)).clamp(min=0).to(torch.int32))


@pytest.mark.parametrize("case", SINKS, ids=lambda case: case[0])
def test_a_query_that_sees_nothing_gives_its_sink(kernel: Callable[[Case], Emulated], case: Case) -> None:
    built = kernel(case)
    sinks = logits(built)
    assert sinks is not None
    sinks[-1] = -torch.inf
    held, q = reference(built, (0, 300))
    for planned in (False, True):
        step = Step(built, held, q, planned=planned, sinks=sinks)
        step.run()
        agree(step, held.attend(q, sinks=sinks))
        assert torch.equal(step.out[0], torch.zeros_like(step.out[0]))
        assert torch.allclose(step.lse[0, :, 0], sinks, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "block"),
    [("k2v2:h2/2:d64:kg32:vg32:sink21:local40:rollback30:q4", 64), ("k4v4:token:bf16:h2/2:d64:page64:sink32:local7", 16)],
)
def test_prefill_in_pieces_packs_and_keeps_what_the_reference_does(words: str, block: int, tmp_path: Path) -> None:
    """Blocks that come wholly or partly from rows that the call overwrites, tokens taken back in between; then all is unpacked."""
    spec = spec_of(words, "sm90", [workload_of("2x256")])
    layout, dtype, batch = packed_layout(spec, block, "mma"), torch_dtype(spec.attention.dtype), 3
    pieces = [[19, 0, 5 * block], [1, 21, 3], [block, 2 * block + 40, 0], [7, 30, 6 * block], [2 * block, 3 * block, 41]]
    held = ReferenceCache(spec, batch, block)
    module = emulate.Emulated(layout, dtype, tmp_path, held.rows)
    longest, heads, dim = 16 * block, spec.attention.kv_heads, spec.attention.head_dim
    packed, table = torch.full((batch, heads, 16, layout.block_bytes), 255, dtype=torch.uint8), None
    if page := spec.cache.page:
        table = torch.randperm(batch * longest // page, generator=torch.Generator().manual_seed(1)).int().reshape(batch, -1)
        packed = packed.reshape(table.numel(), heads, page // block, layout.block_bytes)
    rows = [torch.full((batch, heads, held.rows.rows, dim), torch.nan, dtype=dtype) for _ in range(2)]
    mine = emulate.Cache(packed, *rows, torch.zeros(batch, dtype=torch.int32), table)
    kept = meaningful_bytes(layout)
    for number, piece in enumerate(pieces):
        inputs, counts = normal(spec, batch, max(piece) + 1, seed=number), torch.tensor(piece, dtype=torch.int32)
        module.pack(mine, inputs.k, inputs.v, counts, backwards=number % 2 == 0)
        held.prefill(inputs.k, inputs.v, counts)
        assert torch.equal(mine.lengths, held.lengths)
        for found, expected in zip(rows, held.residual(), strict=True):
            used = expected.ne(0).any(-1)
            assert torch.equal(found[used], expected[used])
        for b, full in enumerate(held.blocks.tolist()):
            found = sequence_blocks(packed, table, b)
            assert torch.equal(found[:, :full, kept], held.packed(layout)[b, :, :full][..., kept])
        if spec.cache.rollback and number in (0, 2):
            held.crop(torch.minimum(held.lengths, torch.tensor([30, 2, 29] if number == 0 else [30, 5, 2])))
            mine.lengths.copy_(held.lengths)
    out = [torch.full((batch, int(held.lengths.max()) + 2, heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    module.unpack(mine, *out)
    for found, exact in zip(out, held.keys_values(), strict=True):
        for b, length in enumerate(held.lengths.tolist()):
            assert torch.equal(found[b, :length], exact[b, :length].float().to(dtype))
            assert (found[b, length:] == 7.0).all()
