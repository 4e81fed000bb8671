"""Values that are hard to quantize, and the bytes of packed blocks that mean something."""

from __future__ import annotations

from functools import lru_cache
from typing import get_args

import torch

from kvgen.format.layout import PackedLayout, Which
from kvgen.format.places import boost_bits, boost_index_offsets, code_bits, param_offsets


def hard_values(shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal values among constant, huge, tiny and tied ones: [batch, tokens, heads, head_dim], head_dim at least 16."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random)
    rest = shape[:-1]
    x[..., 3] = 1.5
    x[:, 5::7] = -0.75
    x[..., 8] *= 1e-6
    x[..., 9] = torch.randint(-300, 300, rest, generator=random) * 1e-7
    x[..., 10] = torch.randint(0, 16, rest, generator=random) * 0.5
    x[..., 11] = torch.randint(0, 511, rest, generator=random) * 0.0625
    x[:, 3::11] *= 2e-5
    x[..., 12] *= 3e4
    x[:, 1::13, :, 17 % shape[-1]] = 60000.0
    if dtype == torch.bfloat16:
        x[:, 2::17, :, 19 % shape[-1]] = -3e38
        x[..., 20 % shape[-1]] = 1e30
    else:
        x = x.clamp(-65504, 65504)
    x = x.to(dtype)
    x[x == 0] = 0.0  # no negative zeros: which of two zeros is the smaller is anybody's guess
    return x


def sequence_blocks(packed: torch.Tensor, block_table: torch.Tensor | None, b: int) -> torch.Tensor:
    """Blocks of sequence b of a contiguous or paged cache: uint8 [heads, blocks, block_bytes]."""
    return packed[b] if block_table is None else packed[block_table[b].long()].transpose(0, 1).flatten(1, 2)


@lru_cache(maxsize=64)
def meaningful_bytes(layout: PackedLayout) -> torch.Tensor:
    """Places of the bytes of a block that hold codes, params or a boost index; the others are padding."""
    found = [boost_index_offsets(layout).flatten(), boost_bits(layout).flatten() // 8] if layout.key.boost else []
    for which in get_args(Which):
        op = layout.operand(which)
        found.append(code_bits(layout, which).flatten() // 8)
        if op.width == 16:
            found.append(found[-1] + 1)
        if op.quantized:
            offsets = param_offsets(layout, which).flatten()
            found += [offsets + i for i in range(layout.bytes_of_param(op))]
    return torch.cat(found).unique()
