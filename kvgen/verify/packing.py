"""Packs K and V into blocks of bytes and back, for any packed layout, by its index maps alone, on the device of the arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch.nn.functional import pad

from kvgen.format.layout import PackedLayout, Which
from kvgen.format.places import boost_bits, boost_index_offsets, code_bits, param_offsets
from kvgen.spec import BoostSpec
from kvgen.verify.quantize import Quantized, dequantize, param_dtype, quantize

OPERANDS: tuple[Which, Which] = ("key", "value")


def pack_blocks(layout: PackedLayout, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Quantize and pack whole blocks: k, v [..., layout.tokens, head_dim] in the cache's dtype to uint8 [..., block_bytes].

    Padding is zero. Raises ValueError for another shape, dtype or a value that is not finite.
    """
    _check(layout, k)
    _check(layout, v)
    packed = torch.zeros((*k.shape[:-2], layout.block_bytes), dtype=torch.uint8, device=k.device)
    for which, x in zip(OPERANDS, (k, v), strict=True):
        write_operand(layout, which, packed, x)
    return packed


def write_operand(layout: PackedLayout, which: Which, packed: torch.Tensor, x: torch.Tensor) -> None:
    """Pack x [..., tokens, head_dim] into K's or V's places of `packed` [..., block_bytes], in place."""
    op = layout.operand(which)
    if not op.quantized:
        _write_bytes(packed, _element_bytes(layout, which), x.contiguous().view(torch.uint8).flatten(-2))
        return
    q = quantize(x, op, _boost_spec(layout) if which == "key" else None)
    if q.boosted is not None:
        q = _write_boost(layout, packed, q, q.boosted)
    _write_fields(packed, *_code_fields(layout, which), q.codes)
    params = [q.scale] if q.zero is None else [q.scale, q.zero]
    for places, param in zip(_param_bytes(layout, which), params, strict=True):
        _write_bytes(packed, places, param.contiguous().view(torch.uint8).flatten(-2))


def unpack_blocks(layout: PackedLayout, packed: torch.Tensor, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized K and V, fp64 [..., tokens, head_dim], of blocks uint8 [..., block_bytes].

    `dtype` is the cache's; it distinguishes 16-bit formats if K or V is not quantized.
    """
    k, v = (read_operand(layout, which, packed, dtype) for which in OPERANDS)
    return k, v


def read_operand(layout: PackedLayout, which: Which, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantized K or V, fp64 [..., tokens, head_dim]."""
    op = layout.operand(which)
    if op.quantized:
        return dequantize(read_codes(layout, which, packed), op)
    x = _read_bytes(packed, _element_bytes(layout, which), dtype)
    return x.reshape(*packed.shape[:-1], layout.tokens, layout.head_dim).double()


def read_codes(layout: PackedLayout, which: Which, packed: torch.Tensor) -> Quantized:
    """Codes and params in blocks. Raises ValueError if the operand is not quantized."""
    op = layout.operand(which)
    if not op.quantized:
        raise ValueError(f"{which} is not quantized")
    places, shifts = _code_places(layout, which)
    fields = packed[..., places] >> shifts.to(packed.device)
    codes = (fields & (2**op.bits - 1)).reshape(*packed.shape[:-1], layout.tokens, layout.head_dim)
    kept = param_dtype(torch.float32 if layout.param_bytes == 4 else torch.float16)
    channels = op.axis == "channel"
    shape = (layout.tokens // op.group, layout.head_dim) if channels else (layout.tokens, layout.head_dim // op.group)
    params = [_read_bytes(packed, at, kept).reshape(*packed.shape[:-1], *shape) for at in _param_bytes(layout, which)]
    q = Quantized(codes, params[0], params[1] if op.zero else None)
    return _read_boost(layout, packed, q) if op.boost else q


def to_blocks(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """[batch, length, heads, dim] as [batch, heads, length / tokens, tokens, dim]; a rest shorter than a block is left out."""
    batch, length, heads, dim = x.shape
    blocks = length // tokens
    return x[:, : blocks * tokens].reshape(batch, blocks, tokens, heads, dim).permute(0, 3, 1, 2, 4)


def from_blocks(x: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_blocks`: [batch, heads, blocks, tokens, dim] as [batch, blocks * tokens, heads, dim]."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)


def _boost_spec(layout: PackedLayout) -> BoostSpec | None:
    boost = layout.key.boost
    return BoostSpec(fraction=boost.channels / layout.head_dim, select=boost.select) if boost else None


def _write_boost(layout: PackedLayout, packed: torch.Tensor, q: Quantized, boosted: torch.Tensor) -> Quantized:
    """Pack index and upper bits of the boosted channels; returns the lower two bits, which remain to be packed."""
    lead, channels = boosted.shape[:-1], boost_bits(layout).shape[1]
    index = boosted.nonzero()[:, -1].reshape(*lead, channels)  # ascending: nonzero goes row by row
    _write_bytes(packed, boost_index_offsets(layout).flatten(), index.to(torch.uint8).flatten(-2))
    per_token = index.repeat_interleave(layout.key.group, dim=-2)
    _write_fields(packed, *_boost_fields(layout), (q.codes >> 2).gather(-1, per_token))
    return replace(q, codes=q.codes & 3)


def _read_boost(layout: PackedLayout, packed: torch.Tensor, q: Quantized) -> Quantized:
    """Codes with the upper bits of their boosted channels."""
    bits = boost_bits(layout)
    index = packed[..., boost_index_offsets(layout)].long()
    upper = packed[..., bits // 8] >> (bits % 8).to(packed.device, torch.uint8) & 3
    per_token = index.repeat_interleave(layout.key.group, dim=-2)
    codes = q.codes + torch.zeros_like(q.codes).scatter(-1, per_token, upper << 2)
    boosted = torch.zeros_like(q.scale, dtype=torch.bool).scatter(-1, index, True)
    return replace(q, codes=codes, boosted=boosted)


@lru_cache(maxsize=64)
def _boost_fields(layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    return _byte_fields(boost_bits(layout), 2)


@lru_cache(maxsize=64)
def _code_fields(layout: PackedLayout, which: Which) -> tuple[torch.Tensor, torch.Tensor]:
    return _byte_fields(code_bits(layout, which), layout.operand(which).bits)


def _byte_fields(bits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that hold codes, and the element (flat) in each of their fields [n, 8 / width]: one beyond the last in an empty field."""
    bits = bits.flatten()
    fields = torch.full((int(bits.max()) // 8 + 1, 8 // width), len(bits))
    fields[bits // 8, bits % 8 // width] = torch.arange(len(bits))
    places = (fields < len(bits)).any(-1).nonzero().flatten()
    return places, fields[places]


@lru_cache(maxsize=64)
def _code_places(layout: PackedLayout, which: Which) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte and shift of every element, in the order of (token, channel)."""
    bits = code_bits(layout, which).flatten()
    return bits // 8, (bits % 8).to(torch.uint8)


@lru_cache(maxsize=64)
def _element_bytes(layout: PackedLayout, which: Which) -> torch.Tensor:
    """Byte places of unquantized elements, in the order of (token, channel, byte)."""
    width = layout.operand(which).width // 8
    return (code_bits(layout, which).flatten().unsqueeze(1) // 8 + torch.arange(width)).flatten()


@lru_cache(maxsize=64)
def _param_bytes(layout: PackedLayout, which: Which) -> tuple[torch.Tensor, ...]:
    """Byte places of the scales, and of the zeros, in the order of (row, column, byte)."""
    offsets = param_offsets(layout, which)
    return tuple((kind.flatten().unsqueeze(1) + torch.arange(layout.param_bytes)).flatten() for kind in offsets)


def _write_fields(packed: torch.Tensor, places: torch.Tensor, elements: torch.Tensor, codes: torch.Tensor) -> None:
    """Pack codes uint8 [..., rows, columns] into the fields of bytes, the first in the lowest bits."""
    fields = pad(codes.flatten(-2), (0, 1))[..., elements]
    folded = fields[..., 0].clone()
    for index in range(1, fields.shape[-1]):
        folded |= fields[..., index] << (8 // fields.shape[-1] * index)
    _write_bytes(packed, places, folded)


def _write_bytes(packed: torch.Tensor, places: torch.Tensor, data: torch.Tensor) -> None:
    packed[..., places] = data


def _read_bytes(packed: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [..., n] at byte places [n * size]."""
    return packed[..., places].contiguous().view(dtype)


def _check(layout: PackedLayout, x: torch.Tensor) -> None:
    if x.shape[-2:] != (layout.tokens, layout.head_dim):
        raise ValueError(f"expected blocks of [{layout.tokens}, {layout.head_dim}], got {tuple(x.shape[-2:])}")
    if x.element_size() != layout.param_bytes:
        raise ValueError(f"this layout holds {layout.param_bytes * 8}-bit numbers, got {x.dtype}")
