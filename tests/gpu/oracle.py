"""fp64 attention on the GPU over what a cache holds, by the packed layout's index maps alone."""

from __future__ import annotations

from functools import lru_cache

import torch

from kvgen.reference.layout import PackedLayout, Which
from kvgen.spec import KernelSpec
from kvgen.toolchain.launch import KVCache


@lru_cache(maxsize=64)
def _maps(layout: PackedLayout, which: Which) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes and shifts of codes [tokens, head_dim], and bytes of params."""
    bits = layout.code_bits(which).cuda()
    params = layout.param_offsets(which).cuda() if layout.operand(which).quantized else torch.empty(0, device="cuda")
    return bits // 8, (bits % 8).to(torch.uint8), params


def read_blocks(layout: PackedLayout, which: Which, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """K or V, fp64 [..., tokens, head_dim], of blocks uint8 [..., block_bytes] on the GPU."""
    op = layout.operand(which)
    places, shifts, params = _maps(layout, which)
    if not op.quantized:
        pair = torch.stack([blocks[..., places], blocks[..., places + 1]], -1)
        return pair.contiguous().view(dtype).squeeze(-1).double()
    codes = ((blocks[..., places] >> shifts) & (2**op.bits - 1)).double()
    if not op.zero:
        codes = codes - 2 ** (op.bits - 1)
    numbers = torch.stack([blocks[..., params], blocks[..., params + 1]], -1).contiguous().view(torch.float16).squeeze(-1).double()
    spread = numbers.repeat_interleave(op.group, dim=-2 if op.axis == "channel" else -1)  # [..., params, tokens, head_dim]
    x = codes * spread[..., 0, :, :]
    return x + spread[..., 1, :, :] if op.zero else x


def contents(layout: PackedLayout, cache: KVCache, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of sequence b, fp64 [kv_heads, length, head_dim]."""
    full = length // layout.tokens
    if cache.block_table is None:
        blocks = cache.packed[b, :, :full]
    else:
        blocks = cache.packed[cache.block_table[b].long()].transpose(0, 1).flatten(1, 2)[:, :full]
    rest = length - full * layout.tokens
    parts: list[torch.Tensor] = []
    for which, residual in (("key", cache.k_residual), ("value", cache.v_residual)):
        packed = read_blocks(layout, which, blocks, residual.dtype).flatten(1, 2)  # type: ignore[arg-type]
        parts.append(torch.cat([packed, residual[b, :, :rest].double()], 1))
    return parts[0], parts[1]


def attend(
    spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [q_len, q_heads, head_dim], k and v [kv_heads, length, head_dim]; out like q and LSE [q_heads, q_len], fp64."""
    q_len, dim, length = q.shape[0], q.shape[2], k.shape[1]
    rows = q.double().reshape(q_len, k.shape[0], -1, dim).permute(1, 2, 0, 3)  # [kv_heads, group, q_len, dim]
    scores = rows @ k.unsqueeze(1).transpose(2, 3) * (dim**-0.5 if scale is None else scale)
    last = length - q_len + torch.arange(q_len, device=q.device)
    scores = scores.masked_fill(torch.arange(length, device=q.device) > last.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    out = (weights @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(q.shape)
    return out, lse.flatten(0, 1)
