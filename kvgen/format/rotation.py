"""Rotation of K and V before they are stored: a normalized Walsh-Hadamard transform of blocks of channels, after fixed signs.

Every back end computes it in this order of operations, and gives the same bits (docs/numerics.md). `templates/common/include/kvgen/
rotation.hpp` has the same signs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvgen.format.layout import Rotation


SEED = 0x6B76
"""Of the signs."""


def signs(channels: int) -> list[int]:
    """1 or -1 for each of a head's first channels: bit c % 32 of a hash of the seed and c // 32 (the last step of MurmurHash3)."""

    def word(index: int) -> int:
        x = (SEED + 0x9E3779B9 * index) & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    return [-1 if word(channel // 32) >> channel % 32 & 1 else 1 for channel in range(channels)]


def rotate(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """x [..., head_dim] rotated: in fp32 (fp64 stays fp64), rounded once to its type."""
    return x if rotation is None else _mixed(_signed(_wide(x), rotation), rotation).to(x.dtype)


def rotate_back(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """The inverse of `rotate`, computed likewise."""
    return x if rotation is None else _signed(_mixed(_wide(x), rotation), rotation).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _signed(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    return x * torch.tensor(signs(x.shape[-1]), dtype=x.dtype, device=x.device) if rotation.signs else x


def _mixed(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Butterflies of strides 1, 2, 4, ..., then one multiplication."""
    shape, stride = x.shape, 1
    while stride < rotation.block:
        low, high = x.reshape(*shape[:-1], shape[-1] // stride // 2, 2, stride).unbind(-2)
        x, stride = torch.stack([low + high, low - high], -2), 2 * stride
    return x.reshape(shape).mul(rotation.block**-0.5)
