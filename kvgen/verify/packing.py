"""Quantization to the bit, in the order of operations that every back end reproduces (docs/numerics.md), and the bytes of packed blocks by
the index maps of their layout alone, on the device of the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvgen.format.layout import Operand, PackedLayout, Which
from kvgen.format.places import boost_bits, boost_index_offsets, code_bits, param_offsets
from kvgen.spec import BoostSpec, QuantSpec

BOOST_BITS = 4
FLOATS = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0), "nvfp4": (2, 1, 6.0), "mxfp4": (2, 1, 6.0)}
"""Bits of exponent and mantissa, and the largest finite number (OCP 8-bit floats, where e5m2 has infinities and e4m3 none, and MX)."""
LEAST_EXPONENT = -24
"""Of a scale that is a power of two: that of the least number of float16."""

Scales = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""Of K and of V, each shaped to be broadcast to it."""
Quant = QuantSpec | Operand
"""Parameters of a quantization: those of a spec, or of a layout."""


@dataclass(frozen=True)
class Quantized:
    """Codes and parameters of x [..., tokens, head_dim].

    Of static scales `scale` is what was given, float32, shaped to be broadcast to x; `second` is that of a type of two levels.

    `codes` are unsigned fields, uint8 [..., tokens, head_dim]: a symmetric code q is the field q + 2^(bits-1), a float its bits. `scale`
    and `zero` (None where symmetric) are in their storage type, [..., tokens / group, head_dim] for axis channel and
    [..., tokens, head_dim / group] for axis token. `boosted` (None without boost) is bool, shaped like `scale`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    boosted: torch.Tensor | None = None
    second: torch.Tensor | None = None


def param_dtype(dtype: torch.dtype) -> torch.dtype:
    """Storage type of scales and zeros: float32 for a float32 cache, else float16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def store(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 to the storage type: to nearest even, saturating at its largest finite value."""
    limit = torch.finfo(dtype).max
    return value.clamp(-limit, limit).to(dtype)


def quantize(x: torch.Tensor, quant: Quant, boost: BoostSpec | None = None, scale: torch.Tensor | None = None) -> Quantized:
    """Quantize x [..., tokens, head_dim] (float16, bfloat16 or float32; all values finite), by a static `scale` where the format has one.

    Raises ValueError if a group does not divide its extent or x has a value that is not finite.
    """
    if quant.bits not in (2, 4, 8):
        raise ValueError(f"{quant.bits} bits are not quantized")
    if not torch.isfinite(x).all():
        raise ValueError("cannot quantize values that are not finite")
    if quant.static and not quant.grouped:
        assert scale is not None
        if quant.type in FLOATS:
            return Quantized(float_codes(x.float(), scale, quant.type), scale, None)
        middle = 2 ** (quant.bits - 1)
        return Quantized((divide(x.float(), scale).clamp(1 - middle, middle - 1) + middle).to(torch.uint8), scale, None)
    grouped = _grouped(x.float(), quant)
    boosted = None
    if boost is not None and boost.fraction > 0:
        boosted = select_channels(grouped, boost)
    if quant.type in FLOATS:
        second = scale if quant.static else None
        top = grouped.abs().amax(-2, keepdim=True)
        if second is not None:
            top = top / second[..., :1, None, None]
        if quant.type == "nvfp4":
            scale = float_codes(top / FLOATS[quant.type][2], torch.ones_like(top), "e4m3")
        elif quant.type == "mxfp4":  # frexp's mantissas are below 1
            scale = ((top.double().frexp().exponent - 1 - 2).where(top > 0, LEAST_EXPONENT).clamp(min=LEAST_EXPONENT) + 127).to(torch.uint8)
        else:
            scale = store(top / FLOATS[quant.type][2], param_dtype(x.dtype))
        stored = _without_group(scale, quant)
        codes = float_codes(x.float(), spread(scale_values(stored, quant, second), quant), quant.type)
        return Quantized(codes, stored, None, second=second)
    levels = torch.tensor(float(2**quant.bits - 1 if quant.zero else 2 ** (quant.bits - 1) - 1), device=x.device)  # the largest code
    if boosted is not None:
        levels = torch.where(boosted, float(2**BOOST_BITS - 1), levels)
    if quant.zero:
        low, high = grouped.amin(-2, keepdim=True), grouped.amax(-2, keepdim=True)
        zero = store(low, param_dtype(x.dtype))
        scale = store((high - low) / levels, param_dtype(x.dtype))
        codes = divide(grouped - zero.float(), scale).clamp(min=0).minimum(levels)
    else:
        zero = None
        scale = store(grouped.abs().amax(-2, keepdim=True) / levels, param_dtype(x.dtype))
        codes = divide(grouped, scale).clamp(-levels, levels) + 2 ** (quant.bits - 1)
    params = (None if one is None else _without_group(one, quant) for one in (zero, boosted))
    return Quantized(codes.to(torch.uint8).reshape(x.shape), _without_group(scale, quant), *params)


def _without_group(param: torch.Tensor, quant: Quant) -> torch.Tensor:
    return param.squeeze(-2) if quant.axis == "channel" else param.flatten(-3)


def dequantize(q: Quantized, quant: Quant) -> torch.Tensor:
    """fp64 [..., tokens, head_dim]: code * scale + zero, without rounding."""
    if quant.type in FLOATS:
        magnitudes = float_values(quant.type).to(q.codes.device)
        return torch.cat([magnitudes, -magnitudes])[q.codes.long()] * spread(scale_values(q.scale, quant, q.second), quant)
    codes = q.codes.double() if q.zero is not None else q.codes.double() - 2 ** (quant.bits - 1)
    x = codes * spread(q.scale.double(), quant)
    return x if q.zero is None else x + spread(q.zero.double(), quant)


def scale_values(scale: torch.Tensor, quant: Quant, second: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers of stored scales, fp64; with a second level times that, rounded to fp32."""
    if quant.type == "nvfp4":
        values = float_values("e4m3").to(scale.device)[scale.long()]
        return values if second is None else (values.float() * second[..., :1]).double()
    if quant.type == "mxfp4":
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.int() - 127)
    return scale.double()


def float_values(kind: str) -> torch.Tensor:
    """The numbers of the codes without a sign, ascending: fp64. Of codes that are no finite number, NaN."""
    exponent_bits, mantissa_bits, largest = FLOATS[kind]
    code = torch.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, code & 2**mantissa_bits - 1
    whole = (mantissa + (exponent > 0) * 2**mantissa_bits).double()  # without the leading one below the least exponent
    value = torch.ldexp(whole, exponent.clamp(min=1) - (2 ** (exponent_bits - 1) - 1) - mantissa_bits)
    return torch.where(value > largest, torch.nan, value)


def float_codes(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Bits of the floats nearest to x / scale in fp32, of two the even one, at most the largest finite: uint8. 0 where the scale is 0."""
    wide = scale.float()
    quotient = (x / torch.where(wide == 0, 1.0, wide)).double().abs().contiguous()
    values = float_values(kind).to(x.device)
    values = values[values.isfinite()]
    ties = (values[1:] + values[:-1]) / 2
    below, upto = torch.searchsorted(ties, quotient), torch.searchsorted(ties, quotient, right=True)  # differ at a tie
    codes = torch.where(below % 2 == 0, below, upto) + x.signbit() * 2 ** (FLOATS[kind][0] + FLOATS[kind][1])
    return torch.where(wide == 0, 0, codes).to(torch.uint8)


def spread(param: torch.Tensor, quant: Quant) -> torch.Tensor:
    """A parameter per group as one per element: [..., tokens, head_dim]."""
    if quant.static and not quant.grouped:
        return param
    return param.repeat_interleave(quant.group, dim=-2 if quant.axis == "channel" else -1)


def select_channels(grouped: torch.Tensor, boost: BoostSpec) -> torch.Tensor:
    """Which channels of each group get 4 bits: bool [..., groups, 1, head_dim], from fp32 [..., groups, group, head_dim].

    Of equal channels the lower index is chosen. Means are taken in fp64, so that they do not depend on an order of summation.
    """
    channels = grouped.shape[-1]
    if boost.select == "mean_abs":
        rank = grouped.double().abs().mean(-2)
    elif boost.select == "range":
        rank = (grouped.amax(-2) - grouped.amin(-2)).double()
    else:
        rank = -torch.arange(channels, dtype=torch.float64, device=grouped.device).expand((*grouped.shape[:-2], channels))
    count = round(boost.fraction * channels)
    chosen = rank.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(rank, dtype=torch.bool).scatter(-1, chosen, True).unsqueeze(-2)


def divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """rne(x / scale) in fp32, 0 where the scale is 0."""
    wide = scale.float()
    return torch.where(wide == 0, 0.0, x / torch.where(wide == 0, 1.0, wide)).round()


def _grouped(x: torch.Tensor, quant: Quant) -> torch.Tensor:
    """[..., groups, group, rest] with the reduced extent second to last."""
    extent = x.shape[-2] if quant.axis == "channel" else x.shape[-1]
    if extent % quant.group:
        raise ValueError(f"the group ({quant.group}) does not divide {extent} {'tokens' if quant.axis == 'channel' else 'channels'}")
    if quant.axis == "channel":
        return x.reshape(*x.shape[:-2], extent // quant.group, quant.group, x.shape[-1])
    return x.reshape(*x.shape[:-1], extent // quant.group, quant.group, 1)


OPERANDS: tuple[Which, Which] = ("key", "value")


def pack_blocks(layout: PackedLayout, k: torch.Tensor, v: torch.Tensor, scales: Scales | None = None) -> torch.Tensor:
    """Quantize and pack whole blocks: k, v [..., layout.tokens, head_dim] in the cache's dtype to uint8 [..., block_bytes].

    `scales` are static ones of K and of V. Padding is zero. Raises ValueError for another shape, dtype or a value that is not finite.
    """
    packed = torch.zeros((*k.shape[:-2], layout.block_bytes), dtype=torch.uint8, device=k.device)
    for which, x, scale in zip(OPERANDS, (k, v), scales if scales is not None else (None, None), strict=True):
        if x.shape[-2:] != (layout.tokens, layout.head_dim):
            raise ValueError(f"expected blocks of [{layout.tokens}, {layout.head_dim}], got {tuple(x.shape[-2:])}")
        if x.element_size() != layout.param_bytes:
            raise ValueError(f"this layout holds {layout.param_bytes * 8}-bit numbers, got {x.dtype}")
        op = layout.operand(which)
        if not op.quantized:
            _write(packed, code_bits(layout, which) // 8, x)
            continue
        boost = layout.key.boost if which == "key" else None
        q = quantize(x, op, BoostSpec(fraction=boost.channels / layout.head_dim, select=boost.select) if boost else None, scale)
        codes = q.codes
        if q.boosted is not None:  # the upper two bits of a boosted channel lie apart, beside its number
            index = q.boosted.nonzero()[:, -1].reshape(*q.boosted.shape[:-1], -1)  # ascending: nonzero goes row by row
            packed[..., boost_index_offsets(layout)] = index.to(torch.uint8)
            _write_codes(packed, boost_bits(layout), 2, (codes >> 2).gather(-1, index.repeat_interleave(op.group, dim=-2)))
            codes = codes & 3
        _write_codes(packed, code_bits(layout, which), op.bits, codes)
        for offsets, param in zip(param_offsets(layout, which), (q.scale, q.zero), strict=False):  # none of a static scale
            assert param is not None
            _write(packed, offsets, param)
    return packed


def unpack_blocks(
    layout: PackedLayout, packed: torch.Tensor, dtype: torch.dtype = torch.float16, scales: Scales | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized K and V, fp64 [..., tokens, head_dim], of blocks uint8 [..., block_bytes]. `scales`: as in `pack_blocks`.

    `dtype` is the cache's; it distinguishes 16-bit formats if K or V is not quantized.
    """
    k, v = (
        dequantize(read_codes(layout, which, packed, scale), layout.operand(which))
        if layout.operand(which).quantized
        else _read(packed, code_bits(layout, which) // 8, dtype).double()
        for which, scale in zip(OPERANDS, scales if scales is not None else (None, None), strict=True)
    )
    return k, v


def read_codes(layout: PackedLayout, which: Which, packed: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    """Codes and params in blocks of a quantized operand; `scale` is its static one, which codes do not depend on."""
    op = layout.operand(which)
    kept = {1: torch.uint8, 2: torch.float16, 4: torch.float32}[layout.bytes_of_param(op)]
    params = [_read(packed, offsets, kept) for offsets in param_offsets(layout, which)]
    second = (torch.ones(1, device=packed.device) if scale is None else scale) if op.static else None
    if second is not None and not op.grouped:
        params, second = [second], None
    q = Quantized(_read_codes(packed, code_bits(layout, which), op.bits), params[0], params[1] if op.zero else None, second=second)
    if not op.boost:
        return q
    index = packed[..., boost_index_offsets(layout)].long()
    upper = _read_codes(packed, boost_bits(layout), 2) << 2
    codes = q.codes + torch.zeros_like(q.codes).scatter(-1, index.repeat_interleave(op.group, dim=-2), upper)
    return replace(q, codes=codes, boosted=torch.zeros_like(q.scale, dtype=torch.bool).scatter(-1, index, True))


def token_bits(layout: PackedLayout, tokens: torch.Tensor) -> torch.Tensor:
    """The bits of a block that codes and params of some tokens take, bool [..., layout.tokens]: as bytes, uint8 [..., block_bytes].

    Params of channels belong to no token.
    """
    found = torch.zeros((*tokens.shape[:-1], layout.block_bytes), dtype=torch.uint8, device=tokens.device)
    for which in OPERANDS:
        op, shape = layout.operand(which), (*tokens.shape, layout.head_dim)
        places, each = code_bits(layout, which), min(op.width, 8)
        ones = tokens.unsqueeze(-1).expand(shape) * torch.tensor((1 << each) - 1, dtype=torch.uint8, device=tokens.device)
        for byte in range(max(1, op.width // 8)):
            _write_codes(found, places + 8 * byte, each, ones)
        for offsets in param_offsets(layout, which) if op.per_token else ():
            held = tokens.unsqueeze(-1).expand(*tokens.shape, offsets.shape[-1]) * torch.tensor(
                255, dtype=torch.uint8, device=tokens.device
            )
            for byte in range(layout.bytes_of_param(op)):
                found[..., offsets + byte] = held
    return found


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
