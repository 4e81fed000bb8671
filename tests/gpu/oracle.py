"""What a cache on the GPU holds and what attention over it should give, by the reference, on the GPU."""

from __future__ import annotations

import torch

from kvgen.reference.attention import attend as reference_attend
from kvgen.reference.layout import PackedLayout
from kvgen.reference.packing import unpack_blocks
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec


def contents(layout: PackedLayout, cache: KVCache, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of sequence b, fp64 [kv_heads, length, head_dim]."""
    full = length // layout.tokens
    if cache.block_table is None:
        blocks = cache.packed[b, :, :full]
    else:
        blocks = cache.packed[cache.block_table[b].long()].transpose(0, 1).flatten(1, 2)[:, :full]
    rest = length - full * layout.tokens
    packed = unpack_blocks(layout, blocks.contiguous(), cache.k_residual.dtype)
    k, v = (
        torch.cat([x.flatten(1, 2), residual[b, :, :rest].double()], 1)
        for x, residual in zip(packed, (cache.k_residual, cache.v_residual), strict=True)
    )
    return k, v


def attend(
    spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [q_len, q_heads, head_dim], k and v [kv_heads, length, head_dim]; out like q and LSE [q_heads, q_len], fp64."""
    attention = spec.attention
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    out, lse = reference_attend(q.unsqueeze(0), k, v, scale=scale, softcap=attention.softcap, window=attention.window)
    return out[0], lse[0]
