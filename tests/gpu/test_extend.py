"""Prompts over a quantized cache: many query tokens, ragged, by dequantizing and torch's kernels; against fp64."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime import extend
from tests.gpu.oracle import agree, check_attend, check_decode, contents, filled, normal, with_new
from tests.support.kernel_cases import KernelCase, variant

KERNEL_CASES = [
    KernelCase(words)
    for words in (
        "k4v4", "k8v8:token:page64", "k2v2:bf16:page128", "k4v4:d64:h5/1", "k4v4:d96:token:h6/2", "k4v4:d256:h16/1", "k16v16",
        "k4v4:token:page16",
        "k4v2:bf16:h8/8:kg32:vg32",
    )
]  # fmt: skip
MASKED_CASES = [KernelCase(words) for words in (
    "k4v4:window100", "k8v8:token:page64:window1000", "k4v4:cap20", "k8v8:bf16:d256:h16/8:window300:cap50", "k4v4:page128:cap30",
)]  # fmt: skip
"""Windows, which flash attention has, and soft caps, which plain products have."""


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_prompts_over_a_cache_agree_with_fp64(case: KernelCase) -> None:
    v = variant(case)
    n = v.layout.tokens
    lengths = [0, 1, n - 1, n, 3000]
    cache = filled(v, lengths, 3000 + 700)
    for q_len in (9, 128, 1031):
        check_attend(v, cache, q_len, q_len)
    for q_len in (33, 2 * n + 1):
        check_decode(v, cache, q_len, q_len)
    check_attend(v, cache, 1, 5)
    check_attend(v, cache, 300, 6)


@pytest.mark.parametrize("case", MASKED_CASES, ids=str)
def test_prompts_with_windows_and_soft_caps_agree_with_fp64(case: KernelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged chunks that are appended, then, over the whole of a paged cache, prompts longer than some sequences. cuDNN is not called."""
    monkeypatch.setattr(extend, "dense", lambda *args, **kwargs: pytest.fail("cuDNN was called"))
    monkeypatch.setattr(extend, "SCORE_BYTES", 1 << 22)
    v = variant(case)
    a, lengths = v.spec.attention, [0, 1, v.layout.tokens, 2000]
    cache = filled(v, lengths, 4000)
    kept = v.unpack(cache)
    for seed, q_len in enumerate((9, 384, 513)):
        q, k, x = (normal(seed + s, 4, q_len, h, a.head_dim, dtype=v.dtype) for s, h in enumerate((a.q_heads, a.kv_heads, a.kv_heads)))
        out, lse = v.decode(q, k, x, cache, out=torch.full_like(q.contiguous(), torch.nan), lse=True)
        for b, length in enumerate(lengths):
            agree(v, out[b], lse[b], q[b], with_new([old[b, :length].double().transpose(0, 1) for old in kept], (k, x), b))
        lengths, kept = [length + q_len for length in lengths], v.unpack(cache)
    assert cache.lengths.tolist() == lengths
    if cache.block_table is not None or a.window is None:
        check_attend(v, cache, 1031, 6)


@pytest.mark.parametrize("case", [KERNEL_CASES[i] for i in (0, 1, 2, 3, 4, 5, 6, 8)], ids=str)
def test_equal_lengths_are_cut_where_the_prompt_begins(case: KernelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of odd lengths and the prompt's own square, none of it by flash attention where cuDNN knows the head dimension."""
    v = variant(case)
    a = v.spec.attention
    cache = filled(v, [3333, 3333], 6000)
    q = normal(1, 2, 9, a.q_heads, a.head_dim, dtype=v.dtype)
    if extend.dense_fits(q):
        monkeypatch.setattr(extend, "flash", lambda *args: pytest.fail("flash attention was called"))
    monkeypatch.setattr(extend, "PLANNED", 1)
    for q_len in (9, 64, 1031, 3332 - 64, 3333):
        check_attend(v, cache, q_len, q_len)
    for q_len in (200, 1027):
        check_decode(v, cache, q_len, q_len)
    check_attend(v, cache, 300, 6)
    check_decode(v, v.new_cache(2, 2100), 2049, 7)


@pytest.mark.parametrize("case", [KernelCase("k4v4"), KernelCase("k4v4:page64:kg64")], ids=str)
def test_parts_change_nothing_and_bound_the_memory(case: KernelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, some sequences at a time, some heads at a time, one head at a time: equal bits."""
    v = variant(case)
    a, lengths = v.spec.attention, [8192, 77, 0, 5000]
    cache = filled(v, lengths, 9000)
    q = normal(1, 4, 600, a.q_heads, a.head_dim, dtype=v.dtype).contiguous()
    head = cache.bound * a.head_dim * 4
    want = v.attend(q, cache, lse=True)
    for heads in (16, 8, 3, 1):
        monkeypatch.setattr(extend, "DEQUANTIZED_BYTES", heads * head)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = v.attend(q, cache, lse=True)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= heads * head + 4 * q.numel() * 2 + (8 << 20)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_a_captured_prompt_follows_the_lengths_on_the_device() -> None:
    v = variant(KernelCase("k4v4"))
    a = v.spec.attention
    cache = filled(v, [40, 900], 2000)
    q = normal(1, 2, 300, a.q_heads, a.head_dim, dtype=v.dtype)
    out, lse = torch.empty_like(q.contiguous()), torch.empty(2, a.q_heads, 300, device="cuda")
    v.attend(q, cache, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        v.attend(q, cache, out=out, lse=lse)
    k, x = (normal(s, 2, 500, a.kv_heads, a.head_dim, dtype=v.dtype) for s in (7, 8))
    v.prefill(cache, k, x, [500, 3])
    out.fill_(torch.nan)
    graph.replay()
    for b, length in enumerate((540, 903)):
        agree(v, out[b], lse[b], q[b], contents(v.layout, cache, b, length))
