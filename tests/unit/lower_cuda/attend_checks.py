"""What emulated steps are compared with: the fp64 reference's output, residuals and packed blocks."""

from __future__ import annotations

import torch

from kvgen.format.residual import window_places
from kvgen.verify.data import normal, structured
from kvgen.verify.packing import token_bits
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.packed import meaningful_bytes, sequence_blocks
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, block_place, packed_cache


def reference(built: Emulated, lengths: tuple[int, ...], *, hard: bool = False, seed: int = 1) -> tuple[ReferenceCache, torch.Tensor]:
    """A cache with these lengths, and queries."""
    inputs = (structured if hard else normal)(built.spec, len(lengths), max(1, *lengths), q_len=built.spec.attention.q_len, seed=seed)
    held = ReferenceCache(built.spec, len(lengths), built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(lengths, dtype=torch.int32))
    return held, inputs.q


def fresh(built: Emulated, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a step's tokens."""
    q_len = built.spec.attention.q_len
    inputs = normal(built.spec, batch, q_len, q_len=q_len, seed=2)
    return inputs.k, inputs.v


def agree(step: Step, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Output and LSE are the reference's, and counters are back at zero."""
    limit = tolerance(step.q.dtype)
    assert relative_l2(step.out, want[0]) <= limit
    seen = torch.isfinite(want[1])
    assert torch.equal(torch.isfinite(step.lse), seen)
    assert relative_l2(step.lse[seen], want[1][seen]) <= limit
    cleared(step)


def cleared(step: Step) -> None:
    """Counters are back at zero, those of larger batches too."""
    size = step.kernel.library.counter_bytes(step.kernel.spec.attention.kv_heads)
    assert not step.workspace.view(torch.uint8)[:size].any()


def cached(step: Step, held: ReferenceCache, before: tuple[int, ...], after: list[int]) -> None:
    """Residuals and the blocks that became full are those of the reference, which has made the step."""
    for mine, expected in zip(step.residual, held.residual(), strict=True):
        used = expected.ne(0).any(-1)
        assert torch.equal(mine[used], expected[used])
    expected, table = packed_cache(step.kernel, held, max(before) + step.q.shape[1])
    if held.rows.arrival:
        for b, (old, length) in enumerate(zip(before, after, strict=True)):
            for block in range(old // held.block, -(-length // held.block)):
                mine = token_bits(step.kernel.layout, torch.arange(held.block) < length - block * held.block)
                one, other = (p[whose, :, inner] for p in (step.packed, expected) for whose, inner in [block_place(p, table, b, block)])
                assert torch.equal(one & mine, other & mine)
                assert bool((one | mine).eq(255)[:, mine > 0].all()), "other tokens' bits stay"
        return
    meaningful, places = meaningful_bytes(step.kernel.layout), window_places(step.kernel.spec, held.block)
    for b, (old, length) in enumerate(zip(before, after, strict=True)):
        first = held.rows.packed_blocks(old)
        if held.rows.packed_blocks(length) > first:
            place = first % places if places else first
            one, other = (sequence_blocks(packed, table, b)[:, place] for packed in (step.packed, expected))
            assert torch.equal(one[:, meaningful], other[:, meaningful])
