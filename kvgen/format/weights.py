"""Quantized weights of a linear layer: W[n, k] = scale * (code - zero). From a matrix to codes, and from codes to the packed bytes of GPUs
and back (docs/linear.md). All of it runs in torch, on the device of the tensors.

The *canonical tensors* of a weight are codes, uint8 [n, k], one in a byte; scales [n, groups] in the spec's dtype; and zeros, uint8
[n, groups], or None where all of them are the middle code, 8 or 128.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kvgen.arch import Target
from kvgen.format.dtypes import torch_dtype
from kvgen.spec import LinearFormat, LinearSpec
from kvgen.spec.target import resolve

Clip = Literal["none", "mse"]
TILE, RUN = 16, 64
"""Rows of a tile, and channels of which a tile's codes lie together."""
CHUNK = 1 << 24
"""Elements that are quantized at once."""
SHRUNK = tuple(1 - step / 50 for step in range(26))
"""Parts of a group's range that `clip="mse"` tries."""


class Canonical(NamedTuple):
    """A weight as codes, scales and zeros."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def middle(bits: int) -> int:
    """The zero of formats without zeros of their own."""
    return 1 << (bits - 1)


# --- a matrix and its codes ------------------------------------------------------------------------------------------------


def quantize(linear: LinearFormat, weight: Tensor, clip: Clip = "none") -> Canonical:
    """The canonical tensors of a weight [n, k] of any floating type, on its device: every code is the nearest one.

    Without zeros a group's codes span -max |w| .. max |w|, with zeros the group's range and 0. `clip="mse"` takes the part of it, from half
    to all, that has the least squared error; codes beyond it are clamped.

    Raises ValueError for another shape, for weights that are not finite, for scales that the dtype cannot hold, and for an unknown `clip`.
    """
    if clip not in get_args(Clip):
        raise ValueError(f'clip must be "none" or "mse", not {clip!r:.40}')
    if tuple(weight.shape) != (linear.n, linear.k) or not weight.is_floating_point():
        raise ValueError(f"a weight is [{linear.n}, {linear.k}] of a floating type, not {list(weight.shape)} of {weight.dtype}")
    step = max(1, CHUNK // linear.k)
    parts = [_quantized(linear, rows, clip) for rows in torch.split(weight.detach(), step)]
    codes, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    if not bool(scales.isfinite().all()):
        raise ValueError(f"the weight has values that are not finite, or too large for scales of {linear.dtype}")
    return Canonical(codes, scales, zeros if linear.zero else None)


def dequantize(linear: LinearFormat, weight: Canonical) -> Tensor:
    """The matrix that canonical tensors mean: scale * (code - zero) in float32, rounded to the spec's dtype, [n, k]."""
    codes, scales, zeros = weight
    grouped = codes.view(linear.n, linear.groups, -1)
    zero = middle(linear.bits) if zeros is None else zeros.unsqueeze(2).float()
    return (grouped.float().sub_(zero).mul_(scales.unsqueeze(2).float())).to(torch_dtype(linear.dtype)).view(linear.n, linear.k)


def _quantized(linear: LinearFormat, weight: Tensor, clip: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of some rows."""
    top = float((1 << linear.bits) - 1)
    w = weight.float().reshape(len(weight), linear.groups, -1)
    if linear.zero:
        low, high = w.amin(2, keepdim=True).clamp(max=0), w.amax(2, keepdim=True).clamp(min=0)
    else:
        high = w.abs().amax(2, keepdim=True)
        low = -high
    best: tuple[Tensor, ...] = ()
    for part in SHRUNK if clip == "mse" else (1.0,):
        scale = ((high - low) * (part / top)).to(torch_dtype(linear.dtype))
        divisor = torch.where(scale == 0, 1.0, scale.float())  # a scale that is rounded to 0, too
        zero = (-part * low / divisor).round_().clamp_(0, top) if linear.zero else torch.full_like(divisor, middle(linear.bits))
        code = (w / divisor).round_().add_(zero).clamp_(0, top)
        found = code.to(torch.uint8), scale, zero.to(torch.uint8)
        if clip == "none":
            best = found
            continue
        error = code.sub_(zero).mul_(scale.float()).sub_(w).square_().sum(2, keepdim=True)
        if best:
            better = error < best[3]
            best = (*(torch.where(better, *pair) for pair in zip(found, best[:3], strict=True)), torch.where(better, error, best[3]))
        else:
            best = *found, error
    codes, scales, zeros = best[:3]
    return codes.view(weight.shape), scales.squeeze(2), zeros.squeeze(2)


# --- packed bytes ----------------------------------------------------------------------------------------------------------


def packed_bytes(linear: LinearFormat) -> int:
    """Bytes of a packed weight, of every target."""
    return linear.n * (linear.k * linear.bits // 8 + linear.groups * _param_bytes(linear))


def pack(spec: LinearSpec, weight: Canonical, target: Target | None = None) -> Tensor:
    """The packed bytes of canonical tensors, uint8 [`packed_bytes`], for the kernels of a target; by default of the spec's.

    All GPUs share one layout. Raises ValueError for tensors of another shape, type or device, and for codes or zeros out of range.
    """
    linear = spec.linear
    _check(linear, weight)
    if (target or resolve(spec.arch)) == "cpu":
        from kvgen.format import cpu_weights

        group = linear.group if isinstance(linear.group, int) else None
        return cpu_weights.pack(*weight, linear.bits, group, linear.epilogue == "silu_mul")
    return _pack(linear, weight)


def unpack(spec: LinearSpec, packed: Tensor, target: Target | None = None) -> Canonical:
    """The canonical tensors that were packed, bit for bit. Raises ValueError for bytes of another size or type."""
    linear = spec.linear
    check_packed(linear, packed)
    if (target or resolve(spec.arch)) == "cpu":
        from kvgen.format import cpu_weights

        group, paired = linear.group if isinstance(linear.group, int) else None, linear.epilogue == "silu_mul"
        dtype = torch_dtype(linear.dtype)
        return Canonical(*cpu_weights.unpack(packed, linear.n, linear.k, linear.bits, group, linear.zero, dtype, paired))
    return _unpack(linear, packed)


def check_packed(linear: LinearFormat, packed: Tensor) -> None:
    """Raises ValueError unless a tensor is of the packed weight's size and type."""
    if packed.dtype != torch.uint8 or tuple(packed.shape) != (packed_bytes(linear),) or not packed.is_contiguous():
        told = f"{list(packed.shape)} of {packed.dtype}{'' if packed.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"the packed weight is uint8 [{packed_bytes(linear)}], contiguous, and not {told}")


def _check(linear: LinearFormat, weight: Canonical) -> None:
    codes, scales, zeros = weight
    if (zeros is not None) != linear.zero:
        raise ValueError(f"zeros are {'missing' if linear.zero else 'given'}, and linear.zero is {str(linear.zero).lower()}")
    params = (linear.n, linear.groups)
    wanted = {"codes": (codes, (linear.n, linear.k), torch.uint8), "scales": (scales, params, torch_dtype(linear.dtype))}
    if zeros is not None:
        wanted["zeros"] = (zeros, params, torch.uint8)
    for name, (x, shape, dtype) in wanted.items():
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != codes.device:
            told = f"{list(x.shape)} of {x.dtype} on {x.device}"
            raise ValueError(f"{name} must be {list(shape)} of {dtype} on {codes.device}, not {told}")
        if dtype == torch.uint8 and linear.bits < 8 and int(x.max()) >= 1 << linear.bits:
            raise ValueError(f"{name} must be below {1 << linear.bits}, and one is {int(x.max())}")


def _param_bytes(linear: LinearFormat) -> int:
    """Bytes of a scale and its zero."""
    return torch_dtype(linear.dtype).itemsize + linear.zero


def _order(linear: LinearFormat, device: torch.device) -> Tensor:
    """The weight's row at each place: with silu_mul, tiles of gate and of up alternate."""
    rows = torch.arange(linear.n, device=device)
    return rows.view(2, -1, TILE).transpose(0, 1).flatten() if linear.epilogue == "silu_mul" else rows


def _unit(linear: LinearFormat) -> int:
    """Channels whose codes are followed by their scales."""
    return linear.group if isinstance(linear.group, int) else RUN


def _pack(linear: LinearFormat, weight: Canonical) -> Tensor:
    """For GPUs. A row of a tile is 8h + g, a channel of a run 16f + 8c + 2t + d: fragments of the MMA."""
    order, tiles, units = _order(linear, weight.codes.device), linear.n // TILE, linear.k // _unit(linear)
    codes = weight.codes[order].view(tiles, 2, 8, linear.k // RUN, 4, 2, 4, 2)  # tile, h, g, run, f, c, t, d
    if linear.bits == 4:
        whole = codes.permute(0, 3, 2, 6, 4, 7, 5, 1)  # tile, run, g, t, f, d, c, h
        stored = whole[..., 0] | whole[..., 1] << 4
    else:
        stored = codes.view(*codes.shape[:4], 2, 2, 2, 4, 2).permute(
            0, 3, 4, 2, 7, 5, 6, 8, 1
        )  # tile, run, f's half, g, t, f in it, c, d, h
    params = [p[order].view(torch.uint8).view(tiles, TILE, linear.groups, -1) for p in (weight.scales, weight.zeros) if p is not None]
    stored = stored.reshape(tiles, units, -1)
    if linear.group == "row":
        return torch.cat([stored.flatten(), *(p.flatten() for p in params)])
    return torch.cat([stored, *(p.transpose(1, 2).flatten(2) for p in params)], 2).flatten()


def _unpack(linear: LinearFormat, packed: Tensor) -> Canonical:
    tiles, units, item = linear.n // TILE, linear.k // _unit(linear), torch_dtype(linear.dtype).itemsize
    sizes = [TILE * item, TILE] if linear.zero else [TILE * item]  # bytes of a tile's scales and zeros
    code_bytes = TILE * _unit(linear) * linear.bits // 8
    if linear.group == "row":
        stored, *params = torch.split(packed, [tiles * units * code_bytes, *(tiles * size for size in sizes)])
    else:
        stored, *params = torch.split(packed.view(tiles, units, -1), [code_bytes, *sizes], 2)
    back = torch.argsort(_order(linear, packed.device))
    if linear.bits == 4:
        pairs = stored.reshape(tiles, -1, 8, 4, 4, 2, 2)  # tile, run, g, t, f, d, c
        codes = torch.stack([pairs & 15, pairs >> 4], 7).permute(0, 7, 2, 1, 4, 6, 3, 5)
    else:
        codes = stored.reshape(tiles, -1, 2, 8, 4, 2, 2, 2, 2).permute(0, 8, 3, 1, 2, 5, 6, 4, 7)
    grouped = [p.reshape(tiles, linear.groups, TILE, -1).transpose(1, 2).reshape(linear.n, -1)[back] for p in params]
    scales = grouped[0].view(torch_dtype(linear.dtype))
    return Canonical(codes.reshape(linear.n, linear.k)[back], scales, grouped[1] if linear.zero else None)
