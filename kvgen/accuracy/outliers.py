"""Outlier channels of K: how far they stand out in a model, and a transformation of its weights that gives it some.

Scores do not change if the channels of K are multiplied and those of q divided by the same number. RoPE rotates channels c and
c + head_dim / 2 together, so both take the same number, and after it the channels of K are multiplied just the same. With a power of two
every product is exact, so the model computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgen.accuracy.model import Transformer

RATIO = 8.0
"""How far the largest channel of K stands above the median one in models that have outlier channels, about."""
PAIRS = 2
"""Pairs of channels per KV head that are made outliers."""


@dataclass(frozen=True)
class Outliers:
    """Ranges (largest less smallest value) of the channels of K, over the median of their head."""

    largest: float
    """Mean over layers and KV heads of the largest channel's."""
    most: float
    """The largest of all."""
    factor: float = 1.0
    """The channels were multiplied by it; 1 if they are as trained."""


def ranges(k: torch.Tensor) -> torch.Tensor:
    """[kv_heads, head_dim] of K [batch, tokens, kv_heads, head_dim]."""
    return k.amax((0, 1)) - k.amin((0, 1))


def outliers(keys: Sequence[torch.Tensor], factor: float = 1.0) -> Outliers:
    """How far channels stand out in the K of every layer, [batch, tokens, kv_heads, head_dim] each."""
    found = torch.stack([ranges(k).float() for k in keys])
    above = found.amax(-1) / found.median(-1).values
    return Outliers(float(above.mean()), float(above.max()), factor)


def factor_for(found: Outliers) -> float:
    """The power of two that brings the largest channels nearest to RATIO times the median; 1 where they are there."""
    return 2.0 ** max(0, round(math.log2(RATIO / found.largest)))


@torch.no_grad()
def with_outliers(model: Transformer, keys: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply the widest pairs of channels of K by a power of two, in place, and divide those of q by it: the same function.

    `keys` as in `outliers`. Raises ValueError for another factor, which would round.
    """
    if math.frexp(factor)[0] != 0.5:
        raise ValueError(f"{factor} is no power of two")
    for layer, k in zip(model.blocks, keys, strict=True):
        kv_heads, head_dim = k.shape[2:]
        widest = ranges(k).reshape(kv_heads, 2, head_dim // 2).amax(1).topk(PAIRS, dim=-1).indices
        scale = torch.ones(kv_heads, head_dim // 2, device=k.device).scatter(-1, widest, factor).repeat(1, 2)
        q_weight, k_weight, _ = (project.weight.data for project in layer.projections)
        k_weight.mul_(scale.flatten().unsqueeze(1))
        q_weight.div_(scale.repeat_interleave(len(q_weight) // len(k_weight), dim=0).flatten().unsqueeze(1))
