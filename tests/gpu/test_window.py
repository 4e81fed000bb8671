"""Contiguous caches with a sliding window, whose blocks take few places in turn, over lives much longer than their memory; against fp64."""

from __future__ import annotations

import pytest
import torch

from kvgen.format.window import first_held, window_places
from tests.gpu.oracle import contents
from tests.gpu.test_extend import check_decode, normal
from tests.gpu.test_properties import agree, near, poisoned
from tests.support.kernel_cases import KernelCase, variant

CASES = [
    KernelCase("k4v4:window100"), KernelCase("k8v8:token:bf16:q3:window1000"), KernelCase("k4v4:kg64:window100:q2", "w8u2d2.bulk"),
    KernelCase("k2v2:window300:h8/1"), KernelCase("k4v4:d64:window128:h16/2:cap30"), KernelCase("k16v16:window500"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}-{case.backend}")
def test_a_long_life_in_few_blocks(case: KernelCase) -> None:
    """Prompts of more blocks than there are places, steps with a plan and without across many blocks, chunks, and what `unpack` gives."""
    v = variant(case)
    a, n = v.spec.attention, v.layout.tokens
    places = window_places(v.spec, n)
    cache = poisoned(v, 4, 20000, seed=1)
    assert cache.packed.shape[2] == places
    lengths = [0] * 4
    for seed, counts in enumerate(([0, n - 1, 3000, 700], [5, 5000, 0, 2 * n])):
        k, x = (normal(2 * seed + s, 4, max(counts), a.kv_heads, a.head_dim, dtype=v.dtype) for s in (0, 1))
        v.prefill(cache, k, x, counts)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    for step in range(3 * n // 2):
        q_len = 1 + step % a.q_len
        q, k, x = (normal(step + s, 4, q_len, h, a.head_dim, dtype=v.dtype) for s, h in enumerate((a.q_heads, a.kv_heads, a.kv_heads)))
        checked = step % 7 == 0 or any(length % n + q_len >= n for length in lengths)
        held = [contents(v.layout, cache, b, length) for b, length in enumerate(lengths)] if checked else []
        plan = v.plan(cache, q_len, uniform=False) if step % 2 else None
        out, lse = v.decode(q, k, x, cache, lse=True, plan=plan)
        if plan is not None:
            cache.advance(q_len)
        for b, old in enumerate(held):
            new = [fresh[b].double().transpose(0, 1) for fresh in (k, x)]
            agree(v, out[b], lse[b], q[b], [torch.cat(pair, 1) for pair in zip(old, new, strict=True)])
        lengths = [length + q_len for length in lengths]
    for q_len in (33, 2000, 3 * n):
        check_decode(v, cache, q_len, q_len)
        lengths = [length + q_len for length in lengths]
    assert cache.lengths.tolist() == lengths
    got = [torch.full((4, max(lengths), a.kv_heads, a.head_dim), -77.0, dtype=v.dtype, device="cuda") for _ in range(2)]
    v.unpack(cache, *got)
    for b, length in enumerate(lengths):
        first = first_held(v.spec, n, length) * n
        assert 0 < first <= length - a.window - a.q_len + 1
        for mine, want in zip(got, contents(v.layout, cache, b, length), strict=True):
            assert bool((mine[b, :first] == -77).all())
            near(v, [mine[b, first:length].double().transpose(0, 1)] * 2, (want[:, first:], want[:, first:]))
