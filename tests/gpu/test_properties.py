"""Random lengths, batches, pages, chunks and steps, many cases per compiled variant, against fp64 on the GPU."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.format.residual import residual_rows
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.data import learned_sinks
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.gpu.oracle import attend, contents
from tests.support.kernel_cases import KernelCase, variant

CASES = int(os.environ.get("KVGEN_GPU_CASES", "40"))
"""Per variant; the committed report says with how many."""

VARIANTS = (
    KernelCase("k4v4"), KernelCase("k4v4", "w4u4d1c2"), KernelCase("k2v2:page64:kg64:q3", "w8u2d2.cl2"),
    KernelCase("k4v4:h8/1:page128", "w8u4d1.two"), KernelCase("k4v4:token:page16:q2", "w8u4d1"),
    KernelCase("k2v2", "w8u4d1.cl8"), KernelCase("k8v8:token", "default"),
    KernelCase("k8v8:h8/1", "w8u1d2.bulk"),
    KernelCase("k4v4:page64:kg64"), KernelCase("k4v4:page128", "w8u2d2.tile"), KernelCase("k2v2:page32:token"),
    KernelCase("k4v4:page256:q4"),
    KernelCase("k2v2:q5:kg32"),
    KernelCase("k4v4:bf16:q2:h6/2"), KernelCase("k8v4:bf16:page128"), KernelCase("k4v4:d64:h5/1"), KernelCase("k4v2:d96:h7/1"),
    KernelCase("k4v4:d256:h16/1"),
    KernelCase("k4v4:token:kg32:vg32:bf16"), KernelCase("k16v16:page64"), KernelCase("k2v2:h13/1:token"), KernelCase("k4v4:sym:q8:h4/4"),
    KernelCase("k8v8:kg64:h32/32"), KernelCase("k4v4:token:page16"), KernelCase("k8v8:token:page16:bf16:q3", "w8u1d2.bulk"),
    KernelCase("k4v4:token:page32:h5/1", "w8u4d1.tile"), KernelCase("k4v8:token:page48:q2"),
)  # fmt: skip


@st.composite
def lives(draw: st.DrawFn, block: int, q_len: int) -> tuple[list[list[int]], list[int], int]:
    """Chunks of new tokens per sequence, query tokens of the decode steps, and a seed."""
    batch = draw(st.integers(1, 5))
    edge = st.sampled_from([0, 1, block - 1, block, block + 1, 2 * block, 2 * block - 1])
    size = st.one_of(edge, st.integers(0, 3 * block), st.integers(0, 2000))
    chunks = draw(st.lists(st.lists(size, min_size=batch, max_size=batch), min_size=1, max_size=3))
    steps = draw(st.lists(st.integers(1, q_len), min_size=0, max_size=4))
    return chunks, steps, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_any_life_of_a_cache_agrees_with_fp64(case: KernelCase) -> None:
    v = variant(case)

    @settings(max_examples=CASES, deadline=None, database=None)
    @given(lives(v.layout.tokens, v.spec.attention.q_len))
    def live(life: tuple[list[list[int]], list[int], int]) -> None:
        run(v, *life)

    live()


def run(v: Variant, chunks: list[list[int]], steps: list[int], seed: int) -> None:
    """Prefill in chunks, attend, decode, take some tokens back; every output against fp64 over what the cache held before the step."""
    random = torch.Generator("cuda").manual_seed(seed)
    a, batch = v.spec.attention, len(chunks[0])
    lengths = [0] * batch
    cache = poisoned(v, batch, sum(max(chunk) for chunk in chunks) + sum(steps) + 1, seed)
    rows, sinks = residual_rows(v.spec, v.layout.tokens), learned_sinks(v.spec, "cuda")
    draw = Random(seed)

    def held_of(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        return contents(v.layout, cache, b, lengths[b], rows)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        wide = torch.randn(batch, tokens, heads * 2, a.head_dim, generator=random, device="cuda").to(v.dtype)
        return wide[:, :, heads:]

    raw: list[list[torch.Tensor]] = [[torch.empty(a.kv_heads, 0, a.head_dim, dtype=torch.float64, device="cuda")] * 2 for _ in range(batch)]
    for chunk in chunks:
        k, x = normal(max(chunk), a.kv_heads), normal(max(chunk), a.kv_heads)
        v.prefill(cache, k, x, chunk)
        for b, new in enumerate(chunk):
            raw[b] = [torch.cat([old, fresh[b, :new].double().transpose(0, 1)], 1) for old, fresh in zip(raw[b], (k, x), strict=True)]
        lengths = [length + new for length, new in zip(lengths, chunk, strict=True)]
    for b in range(batch):
        near(v, raw[b], held_of(b))
    q = normal(1, a.q_heads)
    out = torch.full((batch, 1, a.q_heads, a.head_dim), torch.nan, dtype=v.dtype, device="cuda")
    out, lse = v.attend(q, cache, out=out, lse=True, sinks=sinks)
    for b in range(batch):
        agree(v, out[b], lse[b], q[b], held_of(b))
    for q_len in steps:
        held = [held_of(b) for b in range(batch)]
        q, k, x = normal(q_len, a.q_heads), normal(q_len, a.kv_heads), normal(q_len, a.kv_heads)
        out, lse = v.decode(q, k, x, cache, lse=True, sinks=sinks)
        for b in range(batch):
            new = [fresh[b].double().transpose(0, 1) for fresh in (k, x)]
            agree(v, out[b], lse[b], q[b], [torch.cat(pair, 1) for pair in zip(held[b], new, strict=True)])
            raw[b] = [torch.cat(pair, 1) for pair in zip(raw[b], new, strict=True)]
        lengths = [length + q_len for length in lengths]
        if rows.rollback:
            rejected = [draw.randint(0, min(rows.rollback, q_len)) for _ in lengths]
            cache.crop(torch.tensor(rejected, dtype=torch.int32, device="cuda"))
            lengths = [length - fewer for length, fewer in zip(lengths, rejected, strict=True)]
            raw = [[x[:, :length] for x in pair] for pair, length in zip(raw, lengths, strict=True)]
        for b in range(batch):
            near(v, raw[b], held_of(b))
    assert cache.lengths.tolist() == lengths


def poisoned(v: Variant, batch: int, room: int, seed: int) -> KVCache:
    """A cache of NaN with its pages shuffled among unused ones."""
    table = pages = None
    if v.spec.cache.page is not None:
        need = -(-room // v.spec.cache.page)
        pages = 2 * batch * need
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        table = order[: batch * need].reshape(batch, need).to(torch.int32).cuda()
    cache = v.new_cache(batch, room, "cuda", table, pages)
    cache.packed.fill_(255)
    cache.k_residual.fill_(torch.nan)
    cache.v_residual.fill_(torch.nan)
    return cache


def agree(
    v: Variant, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, held: list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Output and LSE of one sequence against fp64."""
    want, want_lse = attend(v.spec, q, *held)
    assert relative_l2(out, want) <= tolerance(v.dtype)
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert float((lse - want_lse)[seen].abs().max() if bool(seen.any()) else 0.0) <= 5 * tolerance(v.dtype)


def near(v: Variant, raw: list[torch.Tensor], held: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the cache holds is what went in, to half a step of quantization of normal numbers."""
    for quant, given_, kept in zip((v.spec.key, v.spec.value), raw, held, strict=True):
        assert given_.shape == kept.shape
        if given_.numel():
            steps = {16: 1e9, 8: 200.0, 4: 12.0, 2: 2.0}[quant.bits] / (1 if quant.zero else 2)
            assert float((given_ - kept).abs().max()) <= 12.0 / steps + 1e-3
