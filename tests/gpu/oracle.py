"""Caches on the GPU, what they hold, and what attention over them should give, by the reference, on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import ResidualRows
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify.calls import poison
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import unpack_blocks
from kvgen.verify.reference import attend as reference_attend
from kvgen.verify.tolerance import relative_l2, tolerance

CHUNK = 16384
"""Tokens of a sequence in one `prefill`, at most: K and V of 64 sequences of 128K tokens would take 34 GB."""


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers [batch, tokens, heads, head_dim]: every second head of a wider tensor."""
    wide = torch.randn(*shape[:2], 2 * shape[2], shape[3], generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)
    return wide[:, :, ::2]


def poisoned(v: Variant, batch: int, room: int, seed: int = 0) -> KVCache:
    """A cache of NaN with its pages shuffled among unused ones."""
    table = pages = None
    if v.spec.cache.page is not None:
        need = -(-room // v.spec.cache.page)
        pages = 2 * batch * need
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        table = order[: batch * need].reshape(batch, need).to(torch.int32).cuda()
    return poison(v.new_cache(batch, room, "cuda", table, pages))


def filled(v: Variant, lengths: Sequence[int], room: int, seed: int = 0) -> KVCache:
    """A poisoned cache, filled in two chunks or more."""
    a, cache, longest = v.spec.attention, poisoned(v, len(lengths), room, seed), max(lengths)
    chunk = min(CHUNK, longest // 2 + 1)
    for start in range(0, longest, chunk):
        counts = [min(chunk, max(0, length - start)) for length in lengths]
        k, x = (normal(seed + 2 * start + s, len(lengths), max(counts), a.kv_heads, a.head_dim, dtype=v.dtype) for s in (0, 1))
        v.prefill(cache, k, x, counts)
    return cache


def contents(
    layout: PackedLayout, cache: KVCache, b: int, length: int, rows: ResidualRows | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of sequence b, fp64 [kv_heads, length, head_dim]; `rows` are those of a format with unquantized tokens or a rollback.

    If blocks take fewer places in turn, those that a sliding window has passed read as other blocks.
    """
    rows = rows or ResidualRows(layout.tokens, 0, 0, 0, 1)
    full = rows.packed_blocks(length)
    if cache.block_table is None:
        blocks = cache.packed[b][:, torch.arange(full, device=cache.packed.device) % cache.packed.shape[2]]
    else:
        blocks = cache.packed[cache.block_table[b].long()].transpose(0, 1).flatten(1, 2)[:, :full]
    sinks = [rows.row(position) for position in range(min(length, rows.sink))]
    newest = [rows.row(position) for position in range(rows.first(length), length)]
    packed = unpack_blocks(layout, blocks.contiguous(), cache.k_residual.dtype)
    k, v = (
        torch.cat([residual[b][:, sinks].double(), x.flatten(1, 2), residual[b][:, newest].double()], 1)
        for x, residual in zip(packed, (cache.k_residual, cache.v_residual), strict=True)
    )
    return k, v


def attend(
    spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [q_len, q_heads, head_dim], k and v [kv_heads, length, head_dim]; out like q and LSE [q_heads, q_len], fp64.

    One KV head after the other, because scores in fp64 over a long sequence take gigabytes.
    """
    attention, sinks = spec.attention, learned_sinks(spec, q.device)
    found = []
    for head in range(attention.kv_heads):
        rows = slice(head * attention.group, (head + 1) * attention.group)
        found.append(
            reference_attend(
                q[None, :, rows], k[None, head, :, None], v[None, head, :, None],
                scale=scale, softcap=attention.softcap, window=attention.window, sinks=None if sinks is None else sinks[rows],
            )
        )  # fmt: skip
    return torch.cat([out[0] for out, _ in found], 1), torch.cat([lse[0] for _, lse in found])


def agree(v: Variant, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, held: Sequence[torch.Tensor]) -> None:
    """Output and LSE of one sequence against fp64 over `held`, its K and V."""
    want, want_lse = attend(v.spec, q, *held)
    assert relative_l2(out, want) <= tolerance(v.dtype)
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert float((lse - want_lse)[seen].abs().max() if bool(seen.any()) else 0.0) <= 5 * tolerance(v.dtype)


def with_new(held: Sequence[torch.Tensor], new: Sequence[torch.Tensor], b: int) -> list[torch.Tensor]:
    """K and V of sequence b after new tokens [batch, tokens, kv_heads, head_dim] of each, which stay in their dtype."""
    return [torch.cat([old, fresh[b].double().transpose(0, 1)], 1) for old, fresh in zip(held, new, strict=True)]


def check_attend(v: Variant, cache: KVCache, q_len: int, seed: int) -> None:
    """`attend` with q_len tokens of every sequence."""
    a = v.spec.attention
    q = normal(seed, cache.batch, q_len, a.q_heads, a.head_dim, dtype=v.dtype)
    out, lse = v.attend(q, cache, out=torch.full_like(q.contiguous(), torch.nan), lse=True)
    for b, length in enumerate(cache.lengths.tolist()):
        agree(v, out[b], lse[b], q[b], contents(v.layout, cache, b, length))


def check_decode(v: Variant, cache: KVCache, q_len: int, seed: int, planned: bool = False) -> None:
    """`decode` of q_len tokens, which are attended in dtype, with a plan or without."""
    a, before = v.spec.attention, cache.lengths.tolist()
    held = [contents(v.layout, cache, b, length) for b, length in enumerate(before)]
    q, k, x = (
        normal(seed + s, cache.batch, q_len, h, a.head_dim, dtype=v.dtype) for s, h in enumerate((a.q_heads, a.kv_heads, a.kv_heads))
    )
    plan = v.plan(cache, q_len, uniform=False) if planned else None
    out, lse = v.decode(q, k, x, cache, lse=True, plan=plan)
    if planned:
        cache.advance(q_len)
    for b in range(cache.batch):
        agree(v, out[b], lse[b], q[b], with_new(held[b], (k, x), b))
    assert cache.lengths.tolist() == [length + q_len for length in before]
