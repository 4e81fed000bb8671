"""Packing on the GPU, bit for bit: ragged appends in pieces, pages, hard values, and the flush of decode."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.verify.packing import pack_blocks, to_blocks
from tests.gpu.oracle import poisoned
from tests.support.kernel_cases import KernelCase, variant
from tests.support.packed import hard_values, meaningful_bytes, sequence_blocks

KERNEL_CASES = [
    *[KernelCase(words) for words in (
        "k4v4", "k8v8", "k2v2", "k8v4", "k8v2:kg64:vg32", "k2v2:kg32:vg32", "k2v2:sym:vg64", "k8v8:sym", "k4v4:token", "k8v8:token:sym",
        "k4v4:bf16:token:kg32:vg32", "k2v2:bf16", "k8v8:d96", "k2v2:d256", "k4v4:d64", "k16v4", "k16v16:bf16", "k4v4:page64:kg64",
        "k2v2:page64:token", "k4v4:page256", "k2v2:boost1/8", "k2v2:boost1/4range:kg32:page64", "k2v2:boost1/2:bf16:d96",
        "k8v8:vchannel:sym", "k2v2:kg16:vchannel:vg16", "k4v4:kg512:vchannel:vg512", "k2v8:kg16:bf16:sym:vchannel:vg64",
    )],
    KernelCase("k4v4", target="sm80"), KernelCase("k8v8", target="sm89"), KernelCase("k2v2", target="sm80"),
]  # fmt: skip

BEHIND = 3
"""Tokens of k and v that do not count."""


def inputs(v: Variant, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hard K and V on the CPU."""
    shape = (batch, tokens, v.spec.attention.kv_heads, v.layout.head_dim)
    return hard_values(shape, v.dtype, seed), hard_values(shape, v.dtype, seed + 1)


def append(v: Variant, cache: KVCache, k: torch.Tensor, x: torch.Tensor, done: list[int], counts: list[int]) -> None:
    """Append `counts[b]` tokens of k[b], x[b] from `done[b]`, as strided views with NaN behind; counts them in `done`."""
    batch, _, heads, dim = k.shape
    shape = (batch, heads, max(counts) + BEHIND, dim)
    fresh = [torch.full(shape, torch.nan, dtype=v.dtype, device="cuda").transpose(1, 2) for _ in range(2)]
    for b, count in enumerate(counts):
        for new, old in zip(fresh, (k, x), strict=True):
            new[b, :count] = old[b, done[b] : done[b] + count].cuda()
        done[b] += count
    v.prefill(cache, *fresh, torch.tensor(counts, dtype=torch.int32, device="cuda"))


def assert_holds(v: Variant, cache: KVCache, k: torch.Tensor, x: torch.Tensor, lengths: list[int]) -> None:
    """The cache holds these tokens, to the bit, and nothing else was written."""
    n, kept = v.layout.tokens, meaningful_bytes(v.layout)
    assert cache.lengths.tolist() == lengths
    packed, table = cache.packed.cpu(), None if cache.block_table is None else cache.block_table.cpu()
    for b, length in enumerate(lengths):
        full = length // n
        found = sequence_blocks(packed, table, b)
        expected = pack_blocks(v.layout, *(to_blocks(t[b : b + 1, : full * n], n)[0] for t in (k, x)))
        assert torch.equal(found[:, :full, kept], expected[..., kept])
        assert bool((found[:, full:] == 255).all()), "blocks that are not full stay as they were"
        for residual, t in ((cache.k_residual, k), (cache.v_residual, x)):
            assert torch.equal(residual[b, :, : length % n].cpu(), t[b, full * n : length].transpose(0, 1))


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_appending_in_pieces_gives_the_bytes_of_the_reference(case: KernelCase) -> None:
    v = variant(case)
    n = v.layout.tokens
    pieces = [[n // 2, 0, 9 * n, 1], [n // 2, 3, 5, n - 1], [0, 0, 0, 0], [n + 1, n - 2, n - 5, 3 * n + 7], [2, 1, 0, 2 * n - 7]]
    total = [sum(counts) for counts in zip(*pieces, strict=True)]
    k, x = inputs(v, len(total), max(total), seed=0)
    cache, done = poisoned(v, len(total), sum(max(piece) + BEHIND for piece in pieces)), [0] * len(total)
    for piece in pieces:
        append(v, cache, k, x, done, piece)
    assert_holds(v, cache, k, x, total)


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_decode_flushes_the_bytes_that_packing_makes(case: KernelCase) -> None:
    v = variant(case)
    n = v.layout.tokens
    lengths = [n - 2, 0, 2 * n + 1]
    k, x = inputs(v, 3, 3 * n + 2, seed=6)
    cache, done = poisoned(v, 3, 6 * n), [0, 0, 0]
    append(v, cache, k, x, done, lengths)
    q = torch.zeros(3, 1, v.spec.attention.q_heads, v.layout.head_dim, dtype=v.dtype, device="cuda")
    for _ in range(n):
        fresh = [torch.stack([t[b, done[b]] for b in range(3)]).unsqueeze(1).cuda() for t in (k, x)]
        v.decode(q, *fresh, cache)
        done = [length + 1 for length in done]
    assert_holds(v, cache, k, x, done)
