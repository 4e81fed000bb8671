"""What a cache on the GPU holds and what attention over it should give, by the reference, on the GPU."""

from __future__ import annotations

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import ResidualRows
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify.attention import attend as reference_attend
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import unpack_blocks


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
