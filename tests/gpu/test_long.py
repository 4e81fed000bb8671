"""Long caches: windows whose blocks take few places in turn, a million tokens, more than 2^31 bytes, a thousand sequences; against fp64."""

from __future__ import annotations

import pytest
import torch

from kvgen.format.residual import first_held, window_places
from kvgen.verify.packing import unpack_blocks
from kvgen.verify.reference import attend as reference_attend
from tests.gpu.oracle import agree, check_decode, contents, filled, normal, poisoned, with_new
from tests.support.kernel_cases import KernelCase, variant

WINDOWS = [
    KernelCase("k4v4:window100"), KernelCase("k8v8:token:bf16:q3:window1000"), KernelCase("k4v4:kg64:window100:q2", "w8u2d2.bulk"),
    KernelCase("k2v2:window300:h8/1"), KernelCase("k4v4:d64:window128:h16/2:cap30"), KernelCase("k16v16:window500"),
]  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_life_much_longer_than_the_memory_of_a_window(case: KernelCase) -> None:
    """Prompts of more blocks than there are places, steps with a plan and without across blocks, chunks, and what `unpack` gives."""
    v = variant(case)
    a, n = v.spec.attention, v.layout.tokens
    cache = poisoned(v, 4, 20000, seed=1)
    assert cache.packed.shape[2] == window_places(v.spec, n)
    for seed, counts in enumerate(([0, n - 1, 3000, 700], [5, 5000, 0, 2 * n])):
        k, x = (normal(2 * seed + s, 4, max(counts), a.kv_heads, a.head_dim, dtype=v.dtype) for s in (0, 1))
        v.prefill(cache, k, x, counts)
    for step in range(n):
        check_decode(v, cache, 1 + step % a.q_len, step, planned=step % 2 == 1)
    for q_len in (33, 2000, 3 * n):
        check_decode(v, cache, q_len, q_len)
    lengths = cache.lengths.tolist()
    got = [torch.full((4, max(lengths), a.kv_heads, a.head_dim), -77.0, dtype=v.dtype, device="cuda") for _ in range(2)]
    v.unpack(cache, *got)
    for b, length in enumerate(lengths):
        first = first_held(v.spec, n, length) * n
        assert 0 < first <= length - a.window - a.q_len + 1
        for mine, want in zip(got, contents(v.layout, cache, b, length), strict=True):
            assert bool((mine[b, :first] == -77).all())
            torch.testing.assert_close(mine[b, first:length].double().transpose(0, 1), want[:, first:], rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("words", ["k4v4", "k4v4:page128", "k8v8:token:page16"])
def test_a_million_tokens(words: str) -> None:
    """Offsets exceed 2^31 bytes. Some KV heads against fp64; all of them would be too many numbers."""
    v = variant(KernelCase(words))
    a, n, lengths = v.spec.attention, v.layout.tokens, [1_000_000, 5, (1 << 20) - 3, 999_937]
    cache = filled(v, lengths, 1 << 20, seed=1)
    assert cache.packed.numel() > 1 << 31
    q = normal(7, len(lengths), 1, a.q_heads, a.head_dim, dtype=v.dtype)
    out, lse = v.attend(q, cache, lse=True)
    for b, head in ((0, 0), (1, 3), (2, 7), (3, 5)):
        full, rest = divmod(lengths[b], n)
        packed, table = cache.packed, cache.block_table
        blocks = packed[b, head, :full] if table is None else packed[table[b].long(), head].flatten(0, 1)[:full]
        read = unpack_blocks(v.layout, blocks.contiguous(), v.dtype)
        k, x = (
            torch.cat([part.flatten(0, 1), residual[b, head, :rest].double()])[None, :, None]
            for part, residual in zip(read, (cache.k_residual, cache.v_residual), strict=True)
        )
        heads = slice(head * a.group, (head + 1) * a.group)
        want, want_lse = reference_attend(q[b : b + 1, :, heads], k, x)
        assert float((out[b, :, heads].double() - want[0]).norm() / want.norm()) <= 2e-3
        assert float((lse[b, heads] - want_lse[0]).abs().max()) <= 5e-3


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("words", ["k4v4:h8/1", "k8v8:token:page32:h6/2"])
def test_a_thousand_sequences(words: str) -> None:
    v = variant(KernelCase(words))
    a = v.spec.attention
    lengths = torch.randint(0, 700, (1024,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = filled(v, lengths, 800, seed=2)
    for step in range(2):
        held = {b: contents(v.layout, cache, b, lengths[b] + step) for b in range(0, 1024, 61)}
        q, k, x = (normal(10 * step + s, 1024, 1, h, a.head_dim, dtype=v.dtype) for s, h in enumerate((a.q_heads, a.kv_heads, a.kv_heads)))
        out, lse = v.decode(q, k, x, cache, lse=True)
        for b, seen in held.items():
            agree(v, out[b], lse[b], q[b], with_new(seen, (k, x), b))
    assert cache.lengths.tolist() == [length + 2 for length in lengths]
