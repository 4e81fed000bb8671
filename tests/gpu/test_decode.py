"""Long lives of a cache: captured decoding past several flushes, a thousand equal calls, views, refusals."""

from __future__ import annotations

import pytest
import torch

from kvgen.errors import CacheMismatch
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.gpu.oracle import attend, contents
from tests.support.kernel_cases import KernelCase, variant

FILLED_AT_ONCE = 16384
"""Tokens of a sequence in one `prefill`: K and V of 64 sequences of 128K tokens would take 34 GB."""
DECODED = ("k4v4", "k8v8", "k2v2", "k4v4:token", "k4v4:bf16:page128", "k2v2:q3:kg32", "k4v4:h8/1", "k4v4:d64:h6/2")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers on the GPU."""
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)


def filled(v: Variant, lengths: list[int], room: int, seed: int = 0) -> KVCache:
    """A cache with random tokens, its unused memory poisoned, its pages shuffled."""
    a, page = v.spec.attention, v.spec.cache.page
    table = pages = None
    if page is not None:
        need = -(-room // page)
        pages = len(lengths) * need + 3
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        table = order[: len(lengths) * need].reshape(-1, need).to(torch.int32).cuda()
    cache = v.new_cache(len(lengths), room, "cuda", table, pages)
    cache.packed.fill_(255)
    cache.k_residual.fill_(torch.nan)
    cache.v_residual.fill_(torch.nan)
    for start in range(0, max(*lengths, 1), FILLED_AT_ONCE):
        part = [min(max(0, length - start), FILLED_AT_ONCE) for length in lengths]
        shape = len(lengths), max(*part, 1), a.kv_heads, a.head_dim
        k, x = (random(*shape, dtype=v.dtype, seed=seed + start + s) for s in (1, 2))
        v.prefill(cache, k, x, part)
    return cache


@pytest.mark.parametrize("case", [KernelCase(words) for words in DECODED], ids=str)
def test_a_captured_step_replays_past_several_flushes(case: KernelCase) -> None:
    v = variant(case)
    a, n = v.spec.attention, v.layout.tokens
    q_len, lengths = a.q_len, [0, 1, n - 1, 3 * n + n // 2]
    steps = (2 * n + 5) // q_len + 1
    cache = filled(v, lengths, max(lengths) + (steps + 1) * q_len)
    q, k, x = (torch.empty(4, q_len, heads, a.head_dim, dtype=v.dtype, device="cuda") for heads in (a.q_heads, a.kv_heads, a.kv_heads))
    out, lse = torch.empty_like(q), torch.empty(4, a.q_heads, q_len, device="cuda")
    known = [[contents(v.layout, cache, b, length)[which] for which in (0, 1)] for b, length in enumerate(lengths)]
    graph, before = torch.cuda.CUDAGraph(), cache.lengths.clone()
    for tensor in (q, k, x):
        tensor.zero_()
    with torch.cuda.graph(graph):
        v.decode(q, k, x, cache, out=out, lse=lse)
    assert torch.equal(cache.lengths, before), "capturing runs nothing"
    for step in range(steps):
        for seed, tensor in enumerate((q, k, x)):
            tensor.copy_(random(*tensor.shape, dtype=v.dtype, seed=100 * step + seed))
        out.fill_(torch.nan)
        graph.replay()
        for b, length in enumerate(lengths):
            now = length + step * q_len
            new = [tensor[b].double().transpose(0, 1) for tensor in (k, x)]
            seen = [torch.cat([old, fresh], 1) for old, fresh in zip(known[b], new, strict=True)]
            want, want_lse = attend(v.spec, q[b], *seen)
            assert relative_l2(out[b], want) <= tolerance(v.dtype), f"step {step}, sequence {b}"
            assert relative_l2(lse[b], want_lse) <= tolerance(v.dtype)
            flushed = (now + q_len) // n > now // n
            known[b] = list(contents(v.layout, cache, b, now + q_len)) if flushed else seen
            if flushed:  # what reads back is what went in, to the precision of the format
                assert relative_l2(known[b][0], seen[0]) < 0.6
    assert cache.lengths.tolist() == [length + steps * q_len for length in lengths]


REPEATED = (
    KernelCase("k4v4"), KernelCase("k2v2", "w8u4d1.cl8"), KernelCase("k2v2", "w8u4d1.two"), KernelCase("k8v8", "w8u1d2.bulk"),
    KernelCase("k4v4:h16/2", "w8u4d1.tile"), KernelCase("k2v2:h8/1", "w8u4d1.cl8"), KernelCase("k4v4", "w4u4d1c2"),
    KernelCase("k4v4", "w8u4d1.cl2"),
    KernelCase("k4v4:page128", "w8u4d1.bulk.cl2"), KernelCase("k4v4", "w2u4d1c4"), KernelCase("k4v4", "default", "sm90", "tilelang"),
)  # fmt: skip


@pytest.mark.parametrize("lengths", [(9000, 4096, 1, 0, 777, 130), (9000, 8400, 8500, 9001, 8800, 8700)], ids=["unequal", "alike"])
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_thousand_equal_calls_give_equal_bits(case: KernelCase, lengths: tuple[int, ...]) -> None:
    v = variant(case)
    cache = filled(v, list(lengths), 9100)
    q = random(6, 1, v.spec.attention.q_heads, v.spec.attention.head_dim, dtype=v.dtype, seed=9)
    first, first_lse = v.attend(q, cache, lse=True)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = v.attend(q, cache, out=torch.full_like(q, torch.nan), lse=True)
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum() + (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert int(differing) == 0


@pytest.mark.usefixtures("most_of_the_memory")
@pytest.mark.parametrize("case", [KernelCase("k4v4"), KernelCase("k4v4:h8/1", "w8u4d1.two"), KernelCase("k4v4", "w4u4d1c2")], ids=str)
def test_long_and_unequal_sequences(case: KernelCase) -> None:
    v = variant(case)
    lengths = [131072, *[1024 + 13 * i for i in range(63)]]
    cache = filled(v, lengths, 131072)
    q = random(64, 1, v.spec.attention.q_heads, v.spec.attention.head_dim, dtype=v.dtype, seed=3)
    out, lse = v.attend(q, cache, lse=True)
    for b in (0, 1, 31, 63):
        want, want_lse = attend(v.spec, q[b], *contents(v.layout, cache, b, lengths[b]))
        assert relative_l2(out[b], want) <= tolerance(v.dtype)
        assert relative_l2(lse[b], want_lse) <= tolerance(v.dtype)


@pytest.mark.parametrize("case", [KernelCase("k4v4"), KernelCase("k2v2", "w8u4d1.cl8")], ids=str)
def test_calls_follow_the_current_stream(case: KernelCase) -> None:
    """The query arrives late on the side stream: on any other stream a call would read what was there before."""
    v = variant(case)
    a, lengths = v.spec.attention, (1500, 64)
    cache = filled(v, list(lengths), 1600)
    right = random(2, 1, a.q_heads, a.head_dim, dtype=v.dtype, seed=4)
    q = torch.zeros_like(right)
    k, x = (random(2, 1, a.kv_heads, a.head_dim, dtype=v.dtype, seed=seed) for seed in (5, 6))
    out = v.attend(q, cache)  # what waits for the device happens once: loading, allocating
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        q.copy_(right)
        v.attend(q, cache, out=out, scale=0.25)
        v.decode(q, k, x, cache)
    stream.synchronize()
    assert cache.lengths.tolist() == [length + 1 for length in lengths]
    for b, length in enumerate(lengths):
        want, _ = attend(v.spec, right[b], *contents(v.layout, cache, b, length), scale=0.25)
        assert relative_l2(out[b], want) <= tolerance(v.dtype)


def test_a_workspace_is_not_made_while_a_graph_is_captured() -> None:
    first = variant(KernelCase("k4v4"))
    cache = filled(first, [700], 800)
    q = random(1, 1, 32, 128, dtype=first.dtype)
    other = Variant(first.spec, first.layout, first.module)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        first.attend(q, cache)
        with pytest.raises(CacheMismatch, match=r"call prepare\(cache\) before the graph is captured"):
            other.attend(q, cache)


def test_the_workspace_may_hold_what_calls_left_but_must_be_large_enough() -> None:
    v = variant(KernelCase("k4v4"))
    cache = filled(v, [700], 800)
    q = random(1, 1, 32, 128, dtype=v.dtype)
    out = torch.empty_like(q)
    args = (q, *cache.tensors, out, None, None)
    with pytest.raises(ValueError, match=r"attend: workspace has 16 bytes, this call needs \d+"):
        v.module.attend(*args, torch.zeros(16, dtype=torch.uint8, device="cuda"), None, 0.1, 800)
    with pytest.raises(ValueError, match="a batch of 2049 is more than 2048"):
        v.module.workspace_bytes(2049, 800, 1)


def test_rows_that_are_not_aligned_are_refused() -> None:
    v = variant(KernelCase("k4v4"))
    cache = filled(v, [700], 800)
    odd = torch.zeros(32 * 128 + 8, dtype=v.dtype, device="cuda")[1 : 32 * 128 + 1].view(1, 1, 32, 128)
    with pytest.raises(ValueError, match="rows of q must start at multiples of 16 bytes"):
        v.attend(odd, cache)
