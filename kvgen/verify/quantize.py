"""Quantization to the bit: the order of operations that every back end reproduces (docs/numerics.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvgen.format.dtypes import DTYPES as DTYPES
from kvgen.format.dtypes import torch_dtype as torch_dtype
from kvgen.spec import BoostSpec

BOOST_BITS = 4


class Quant(Protocol):
    """Parameters of a quantization: a spec's KeySpec or ValueSpec, or a layout's Operand."""

    @property
    def bits(self) -> int: ...
    @property
    def axis(self) -> Literal["channel", "token"]: ...
    @property
    def group(self) -> int: ...
    @property
    def zero(self) -> bool: ...


@dataclass(frozen=True)
class Quantized:
    """Codes and parameters of x [..., tokens, head_dim].

    `codes` are unsigned fields, uint8 [..., tokens, head_dim]; a symmetric code q is the field q + 2^(bits-1). `scale` and
    `zero` (None where symmetric) are in their storage type, [..., tokens / group, head_dim] for axis channel and
    [..., tokens, head_dim / group] for axis token. `boosted` (None without boost) is bool, shaped like `scale`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    boosted: torch.Tensor | None = None


def param_dtype(dtype: torch.dtype) -> torch.dtype:
    """Storage type of scales and zeros: float32 for a float32 cache, else float16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def store(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 to the storage type: to nearest even, saturating at its largest finite value."""
    limit = torch.finfo(dtype).max
    return value.clamp(-limit, limit).to(dtype)


def quantize(x: torch.Tensor, quant: Quant, boost: BoostSpec | None = None) -> Quantized:
    """Quantize x [..., tokens, head_dim] (float16, bfloat16 or float32; all values finite).

    Raises ValueError if a group does not divide its extent or x has a value that is not finite.
    """
    if quant.bits not in (2, 4, 8):
        raise ValueError(f"{quant.bits} bits are not quantized")
    if not torch.isfinite(x).all():
        raise ValueError("cannot quantize values that are not finite")
    grouped = _grouped(x.float(), quant)
    boosted = None
    if boost is not None and boost.fraction > 0:
        boosted = select_channels(grouped, boost)
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

    def without_group(param: torch.Tensor) -> torch.Tensor:
        return param.squeeze(-2) if quant.axis == "channel" else param.flatten(-3)

    params = (None if one is None else without_group(one) for one in (zero, boosted))
    return Quantized(codes.to(torch.uint8).reshape(x.shape), without_group(scale), *params)


def dequantize(q: Quantized, quant: Quant) -> torch.Tensor:
    """fp64 [..., tokens, head_dim]: code * scale + zero, without rounding."""
    codes = q.codes.double() if q.zero is not None else q.codes.double() - 2 ** (quant.bits - 1)
    x = codes * spread(q.scale.double(), quant)
    return x if q.zero is None else x + spread(q.zero.double(), quant)


def spread(param: torch.Tensor, quant: Quant) -> torch.Tensor:
    """A parameter per group as one per element: [..., tokens, head_dim]."""
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
