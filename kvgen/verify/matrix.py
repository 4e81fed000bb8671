"""Operations on a matrix to the bit (docs/matrix.md), and the error metrics of the INT8 per-channel paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvgen.verify.quantize import divide

LEVELS = 127
CHUNK = 1 << 24
"""Elements that are computed at once, so that the memory of a reference does not follow the matrix."""
QUERIES = 16


def scales(x: torch.Tensor) -> torch.Tensor:
    """max |x| / 127 of every channel of x [tokens, channels]: float32 [channels]; 0 where there are no tokens."""
    if x.shape[0] == 0:
        return torch.zeros(x.shape[1], device=x.device)
    levels = torch.full((), float(LEVELS), device=x.device)  # a number would not do: on a GPU torch multiplies by its rounded reciprocal
    return torch.maximum(x.amin(0).float().abs(), x.amax(0).float().abs()) / levels


def codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """clamp(rne(x / scale), -127, 127), 0 where the scale is 0: int8 like x."""
    return divide(x.float(), scale).clamp(-LEVELS, LEVELS).to(torch.int8)


def dequantized(code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """code * scale in float32, rounded to `dtype`."""
    return (code.float() * scale).to(dtype)


def chunks(tokens: int, channels: int) -> Iterator[slice]:
    """Ranges of rows of about CHUNK elements."""
    step = max(1, CHUNK // max(1, channels))
    yield from (slice(first, min(tokens, first + step)) for first in range(0, tokens, step))


def uniform(tokens: int, channels: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> torch.Tensor:
    """The paper's data: uniform in [-1, 1), [tokens, channels]."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.empty(tokens, channels, dtype=dtype, device=device)
    for rows in chunks(tokens, channels):
        x[rows].uniform_(-1.0, 1.0, generator=generator)
    return x


@dataclass(frozen=True)
class Errors:
    """The paper's three metrics of a matrix that was quantized and read back."""

    l2: float
    """Square root of the sum of squared errors: it grows with the matrix."""
    max_abs: float
    """Largest error of an element; at most half a scale."""
    attention: float
    """Mean |q . k - q . k'| over tokens and queries that are uniform in [-1, 1); not divided by sqrt(channels)."""


def errors(x: torch.Tensor, read_back: torch.Tensor, seed: int = 1) -> Errors:
    """The metrics of a matrix and what was read back, [tokens, channels] both, in fp64."""
    channels = x.shape[1]
    queries = uniform(channels, QUERIES, torch.float32, "cpu", seed).to(x.device).double()
    squares = top = moved = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in chunks(*x.shape):
        difference = x[rows].double() - read_back[rows].double()
        squares = squares + difference.square().sum()
        top = torch.maximum(top, difference.abs().max())
        moved = moved + (difference @ queries).abs().sum()
    return Errors(float(squares.sqrt()), float(top), float(moved) / max(1, x.shape[0] * QUERIES))
