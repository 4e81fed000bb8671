"""Where every number of a block lies: the index maps of a packed layout."""

from __future__ import annotations

import torch

from kvgen.format.layout import Operand, PackedLayout, Which
from kvgen.format.orders import mma_param, mma_place, simd_param, simd_place


def code_bits(layout: PackedLayout, which: Which) -> torch.Tensor:
    """Bit offset in the block of every element: int64 [tokens, head_dim]."""
    op = layout.operand(which)
    token = torch.arange(layout.tokens).unsqueeze(1)
    channel = torch.arange(layout.head_dim).unsqueeze(0)
    sub, local = token // layout.subtile, token % layout.subtile
    place = mma_place if layout.order == "mma" else simd_place
    within = place(op, local, channel, layout.subtile, layout.head_dim)
    return (layout.header_bytes + sub * layout.subtile_bytes + layout.codes_offset(which)) * 8 + within


def param_offsets(layout: PackedLayout, which: Which) -> torch.Tensor:
    """Byte offset in the block of every scale (index 0) and zero (index 1).

    int64 [params, tokens / group, head_dim] for axis channel, [params, tokens, head_dim / group] for axis token.
    """
    op = layout.operand(which)
    slot = mma_param if layout.order == "mma" else simd_param
    kind = torch.arange(op.params).reshape(-1, 1, 1)
    if op.axis == "channel":
        group = torch.arange(layout.tokens // op.group).reshape(1, -1, 1)
        channel = torch.arange(layout.head_dim).reshape(1, 1, -1)
        index = group * layout.head_dim * op.params + slot(op, kind, channel, layout.head_dim, 0)
        return layout.channel_params_offset(which) + index * layout.param_bytes
    token = torch.arange(layout.tokens).reshape(1, -1, 1)
    group = torch.arange(layout.head_dim // op.group).reshape(1, 1, -1)
    index = slot(op, kind, token % layout.subtile, layout.subtile, group)
    start = layout.header_bytes + token // layout.subtile * layout.subtile_bytes + layout.token_params_offset(which)
    return start + index * layout.param_bytes


def boost_index_offsets(layout: PackedLayout) -> torch.Tensor:
    """Byte offset in the block of the number of every boosted channel: int64 [tokens / group, boosted channels]."""
    channels = layout.key.boosted
    return layout.channel_params_end + torch.arange(layout.tokens // layout.key.group * channels).reshape(-1, channels)


def boost_bits(layout: PackedLayout) -> torch.Tensor:
    """Bit offset in the block of the upper two bits of every boosted channel: int64 [tokens, boosted channels]."""
    token, slot = torch.arange(layout.tokens).unsqueeze(1), torch.arange(layout.key.boosted).unsqueeze(0)
    place = mma_place if layout.order == "mma" else simd_place
    upper = Operand(2, 2, "channel", layout.key.group, True, rows_are_tokens=True)
    within = place(upper, token % layout.subtile, slot, layout.subtile, layout.boost_slots)
    start = layout.header_bytes + token // layout.subtile * layout.subtile_bytes + layout.boost_codes_offset
    return start * 8 + within
