"""A thousand equal calls; captured decoding with drafts that are taken back."""

from __future__ import annotations

import pytest
import torch

from kvgen.verify.data import learned_sinks
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.gpu.oracle import filled, normal
from tests.support.kernel_cases import KernelCase, variant
from tests.support.reference import ReferenceCache

DRAFTS = (
    KernelCase("k2v2:sink32:local128:rollback8:q4:h8/1", "w8u4d1"),
    KernelCase("k4v8:token:page16:d64:sink40:rollback30:q3:sinks", "w8u2d2.bulk"),
)


REPEATED = (
    KernelCase("k4v4"), KernelCase("k2v2", "w8u4d1.cl8"), KernelCase("k8v8", "w8u1d2.bulk"),
    KernelCase("k4v4:h16/2", "w8u4d1.tile"), KernelCase("k2v2:h8/1", "w8u4d1.cl8"), KernelCase("k4v4", "w4u4d1c2"),
    KernelCase("k4v4", "w8u4d1.cl2"),
    KernelCase("k4v4:page128", "w8u4d1.bulk.cl2"), KernelCase("k4v4", "w2u4d1c4"), KernelCase("k4v4", "default", "sm90", "tilelang"),
)  # fmt: skip


@pytest.mark.parametrize("lengths", [(9000, 4096, 1, 0, 777, 130), (9000, 8400, 8500, 9001, 8800, 8700)], ids=["unequal", "alike"])
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_thousand_equal_calls_give_equal_bits(case: KernelCase, lengths: tuple[int, ...]) -> None:
    v = variant(case)
    cache = filled(v, list(lengths), 9100)
    q = normal(9, 6, 1, v.spec.attention.q_heads, v.spec.attention.head_dim, dtype=v.dtype).contiguous()
    first, first_lse = v.attend(q, cache, lse=True)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = v.attend(q, cache, out=torch.full_like(q, torch.nan), lse=True)
        differing += (out.view(torch.int16) != first.view(torch.int16)).sum() + (lse.view(torch.int32) != first_lse.view(torch.int32)).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])
@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_a_captured_step_that_drafts_and_takes_back_follows_the_reference(case: KernelCase, planned: bool) -> None:
    """Steps of q_len drafted tokens, of which some are rejected: blocks are packed, read from the residual again, and packed again."""
    v = variant(case)
    a, block, rows = v.spec.attention, v.layout.tokens, ReferenceCache(v.spec, 1, v.layout.tokens).rows
    lengths = [
        0 if planned else 1,
        max(rows.sink - 2, 0),
        rows.first(0) + rows.local + block - 2,
        rows.first(0) + rows.local + 3 * block - 1,
    ]
    steps, batch, sinks = 60, len(lengths), learned_sinks(v.spec, torch.device("cuda"))
    random = torch.Generator().manual_seed(7)

    def tokens(count: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, count, heads, a.head_dim, generator=random).to(v.dtype)

    cache, held = v.new_cache(batch, max(lengths) + (steps + 1) * a.q_len, "cuda"), ReferenceCache(v.spec, batch, block)
    k, x = tokens(max(lengths), a.kv_heads), tokens(max(lengths), a.kv_heads)
    v.prefill(cache, k.cuda(), x.cuda(), lengths)
    held.prefill(k, x, torch.tensor(lengths, dtype=torch.int32))
    inputs = [torch.zeros_like(tokens(a.q_len, heads), device="cuda") for heads in (a.q_heads, a.kv_heads, a.kv_heads)]
    rejected, out = torch.zeros(batch, dtype=torch.int32, device="cuda"), torch.empty_like(inputs[0])
    cache.crop(rejected)
    v.decode(*inputs, cache, plan=v.plan(cache, a.q_len), out=out, sinks=sinks)  # what waits for the device happens once; lengths stay
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = v.plan(cache, a.q_len, uniform=not planned)
        v.decode(*inputs, cache, plan=plan, out=out, sinks=sinks)
        cache.advance(a.q_len)
        cache.crop(rejected)
    for _ in range(steps):
        now = [tokens(a.q_len, heads) for heads in (a.q_heads, a.kv_heads, a.kv_heads)]
        taken = torch.randint(0, a.q_len, (batch,), generator=random).int() * (held.lengths > 0)
        for tensor, value in zip((*inputs, rejected), (*now, taken), strict=True):
            tensor.copy_(value)
        graph.replay()
        grows = held.lengths > 0  # a step leaves free places as they are
        held.append(*now[1:], grows.int() * a.q_len)
        want, _ = held.attend(now[0], sinks=None if sinks is None else sinks.cpu())
        held.flush()
        held.crop(taken)
        assert relative_l2(out[grows.cuda()].cpu(), want[grows]) <= tolerance(v.dtype)
        assert torch.equal(cache.lengths.cpu(), held.lengths)
    for found, exact in zip(v.unpack(cache), held.keys_values(), strict=True):
        for b, length in enumerate(held.lengths.tolist()):
            assert relative_l2(found[b, :length].cpu(), exact[b, :length]) < 1e-3
