"""Packs K and V into blocks of bytes and back, for any packed layout, by its index maps alone, on the device of the arguments."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvgen.format.layout import PackedLayout, Which
from kvgen.format.places import boost_bits, boost_index_offsets, code_bits, param_offsets
from kvgen.spec import BoostSpec
from kvgen.verify.quantize import Quantized, dequantize, param_dtype, quantize

OPERANDS: tuple[Which, Which] = ("key", "value")


def pack_blocks(layout: PackedLayout, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Quantize and pack whole blocks: k, v [..., layout.tokens, head_dim] in the cache's dtype to uint8 [..., block_bytes].

    Padding is zero. Raises ValueError for another shape, dtype or a value that is not finite.
    """
    packed = torch.zeros((*k.shape[:-2], layout.block_bytes), dtype=torch.uint8, device=k.device)
    for which, x in zip(OPERANDS, (k, v), strict=True):
        if x.shape[-2:] != (layout.tokens, layout.head_dim):
            raise ValueError(f"expected blocks of [{layout.tokens}, {layout.head_dim}], got {tuple(x.shape[-2:])}")
        if x.element_size() != layout.param_bytes:
            raise ValueError(f"this layout holds {layout.param_bytes * 8}-bit numbers, got {x.dtype}")
        op = layout.operand(which)
        if not op.quantized:
            _write(packed, code_bits(layout, which) // 8, x)
            continue
        boost = layout.key.boost if which == "key" else None
        q = quantize(x, op, BoostSpec(fraction=boost.channels / layout.head_dim, select=boost.select) if boost else None)
        codes = q.codes
        if q.boosted is not None:  # the upper two bits of a boosted channel lie apart, beside its number
            index = q.boosted.nonzero()[:, -1].reshape(*q.boosted.shape[:-1], -1)  # ascending: nonzero goes row by row
            packed[..., boost_index_offsets(layout)] = index.to(torch.uint8)
            _write_codes(packed, boost_bits(layout), 2, (codes >> 2).gather(-1, index.repeat_interleave(op.group, dim=-2)))
            codes = codes & 3
        _write_codes(packed, code_bits(layout, which), op.bits, codes)
        for offsets, param in zip(param_offsets(layout, which), (q.scale, q.zero), strict=False):
            assert param is not None
            _write(packed, offsets, param)
    return packed


def unpack_blocks(layout: PackedLayout, packed: torch.Tensor, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized K and V, fp64 [..., tokens, head_dim], of blocks uint8 [..., block_bytes].

    `dtype` is the cache's; it distinguishes 16-bit formats if K or V is not quantized.
    """
    k, v = (
        dequantize(read_codes(layout, which, packed), layout.operand(which))
        if layout.operand(which).quantized
        else _read(packed, code_bits(layout, which) // 8, dtype).double()
        for which in OPERANDS
    )
    return k, v


def read_codes(layout: PackedLayout, which: Which, packed: torch.Tensor) -> Quantized:
    """Codes and params in blocks of a quantized operand."""
    op, kept = layout.operand(which), param_dtype(torch.float32 if layout.param_bytes == 4 else torch.float16)
    params = [_read(packed, offsets, kept) for offsets in param_offsets(layout, which)]
    q = Quantized(_read_codes(packed, code_bits(layout, which), op.bits), params[0], params[1] if op.zero else None)
    if not op.boost:
        return q
    index = packed[..., boost_index_offsets(layout)].long()
    upper = _read_codes(packed, boost_bits(layout), 2) << 2
    codes = q.codes + torch.zeros_like(q.codes).scatter(-1, index.repeat_interleave(op.group, dim=-2), upper)
    return replace(q, codes=codes, boosted=torch.zeros_like(q.scale, dtype=torch.bool).scatter(-1, index, True))


def to_blocks(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """[batch, length, heads, dim] as [batch, heads, length / tokens, tokens, dim]; a rest shorter than a block is left out."""
    batch, length, heads, dim = x.shape
    blocks = length // tokens
    return x[:, : blocks * tokens].reshape(batch, blocks, tokens, heads, dim).permute(0, 3, 1, 2, 4)


def from_blocks(x: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_blocks`: [batch, heads, blocks, tokens, dim] as [batch, blocks * tokens, heads, dim]."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)


def _write_codes(packed: torch.Tensor, bits: torch.Tensor, width: int, codes: torch.Tensor) -> None:
    """Codes uint8 [..., rows, columns] of `width` bits to bit offsets [rows, columns], where zeros lie."""
    places, flat = bits.flatten(), codes.flatten(-2)
    for shift in range(0, 8, width):
        those = (places % 8 == shift).nonzero().flatten()  # no two of them in one byte
        packed[..., places[those] // 8] |= flat[..., those] << shift


def _read_codes(packed: torch.Tensor, bits: torch.Tensor, width: int) -> torch.Tensor:
    """Inverse of `_write_codes`."""
    codes: torch.Tensor = packed[..., bits // 8] >> (bits % 8).to(packed.device, torch.uint8) & (1 << width) - 1
    return codes


def _write(packed: torch.Tensor, offsets: torch.Tensor, numbers: torch.Tensor) -> None:
    """Numbers [..., rows, columns] to byte offsets [rows, columns]."""
    places = offsets.unsqueeze(-1) + torch.arange(numbers.element_size())
    packed[..., places] = numbers.contiguous().view(torch.uint8).reshape(*numbers.shape, numbers.element_size())


def _read(packed: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `_write`."""
    return packed[..., offsets.unsqueeze(-1) + torch.arange(dtype.itemsize)].contiguous().view(dtype).squeeze(-1)
