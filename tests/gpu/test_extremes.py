"""The largest of everything: a million tokens, caches beyond 2^31 bytes, a thousand sequences."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.attention import attend as reference_attend
from kvgen.verify.packing import unpack_blocks
from tests.gpu.oracle import contents
from tests.gpu.test_properties import agree, poisoned
from tests.support.kernel_cases import KernelCase, variant

CHUNK = 1 << 17

pytestmark = pytest.mark.usefixtures("most_of_the_memory")


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)


def check_head(v: Variant, cache: KVCache, b: int, head: int, length: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """One sequence's KV head against fp64; all heads of a million tokens would be too many numbers."""
    n, group = v.layout.tokens, v.spec.attention.group
    full, rest = divmod(length, n)
    if cache.block_table is None:
        blocks = cache.packed[b, head, :full]
    else:
        blocks = cache.packed[cache.block_table[b].long(), head].flatten(0, 1)[:full]
    read = unpack_blocks(v.layout, blocks.contiguous(), v.dtype)
    k, x = (
        torch.cat([part.flatten(0, 1), residual[b, head, :rest].double()])[None, :, None]
        for part, residual in zip(read, (cache.k_residual, cache.v_residual), strict=True)
    )
    heads = slice(head * group, (head + 1) * group)
    want, want_lse = reference_attend(q[b : b + 1, :, heads], k, x)
    error = float((out[b, :, heads].double() - want[0]).norm() / want.norm())
    assert error <= 2e-3
    assert float((lse[b, heads] - want_lse[0]).abs().max()) <= 5e-3


@pytest.mark.parametrize("words", ["k4v4", "k4v4:page128", "k8v8:token:page16"])
def test_a_million_tokens(words: str) -> None:
    """Offsets exceed 2^31 bytes, in the cache and in the tensors that fill it."""
    v = variant(KernelCase(words))
    a, lengths = v.spec.attention, [1_000_000, 5, (1 << 20) - 3, 999_937]
    cache = poisoned(v, len(lengths), 1 << 20, seed=1)
    for start in range(0, 1 << 20, CHUNK):
        k, x = (normal(start + s, len(lengths), CHUNK, a.kv_heads, a.head_dim, dtype=v.dtype) for s in (0, 1))
        v.prefill(cache, k, x, [min(CHUNK, max(0, length - start)) for length in lengths])
        del k, x
    cache.bound = max(lengths)
    assert cache.packed.numel() > 1 << 31
    q = normal(7, len(lengths), 1, a.q_heads, a.head_dim, dtype=v.dtype)
    out, lse = v.attend(q, cache, lse=True)
    for b, head in ((0, 0), (1, 3), (2, 7), (3, 5)):
        check_head(v, cache, b, head, lengths[b], q, out, lse)


@pytest.mark.parametrize("words", ["k4v4:h8/1", "k8v8:token:page32:h6/2"])
def test_a_thousand_sequences(words: str) -> None:
    v = variant(KernelCase(words))
    a = v.spec.attention
    lengths = torch.randint(0, 700, (1024,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = poisoned(v, 1024, 800, seed=2)
    k, x = (normal(s, 1024, 700, a.kv_heads, a.head_dim, dtype=v.dtype) for s in (1, 2))
    v.prefill(cache, k, x, lengths)
    for step in range(2):
        held = {b: contents(v.layout, cache, b, lengths[b] + step) for b in range(0, 1024, 61)}
        q, k, x = (normal(10 * step + s, 1024, 1, h, a.head_dim, dtype=v.dtype) for s, h in enumerate((a.q_heads, a.kv_heads, a.kv_heads)))
        out, lse = v.decode(q, k, x, cache, lse=True)
        for b, seen in held.items():
            new = [fresh[b].double().transpose(0, 1) for fresh in (k, x)]
            agree(v, out[b], lse[b], q[b], [torch.cat(pair, 1) for pair in zip(seen, new, strict=True)])
    assert cache.lengths.tolist() == [length + 2 for length in lengths]
