"""Specs of operations on a matrix, schedules of the whole spaces, and hard matrices, scales and places in memory, drawn at random."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import torch

from kvgen.arch import GPUS, Target
from kvgen.lower.matrix import NO_LAYOUT
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import MatrixSpec, load_any_spec
from kvgen.verify import matrix as reference
from tests.lives.drawn import CPU, CUDA, generator

KINDS = ("uniform", "channels", "ties", "near ties", "constant", "tiny", "huge", "one")
SCALES = ("own", "own", "a third", "any", "ties", "tiny", "huge", "negative")


def drawn_matrix_spec(draw: Random) -> tuple[MatrixSpec, Target]:
    """A spec of the CPU or of a GPU, and its target."""
    target: Target = draw.choice(["cpu", draw.choice(tuple(GPUS))])
    shapes = {f"{draw.randint(1, 5000)}x{draw.randint(1, 5000)}" for _ in range(draw.randint(1, 3))}
    spec = load_any_spec(
        {
            "operation": draw.choice(["quantize", "dequantize"]),
            "arch": target,
            "matrix": {"dtype": draw.choice(["float32", "float16", "bfloat16"]), "bits": 8, "axis": "channel"},
            "workloads": [dict(zip(("tokens", "channels"), map(int, shape.split("x")), strict=True)) for shape in sorted(shapes)],
        }
    )
    assert isinstance(spec, MatrixSpec)
    return spec, target


def drawn_matrix_schedule(draw: Random, spec: MatrixSpec, target: Target) -> Schedule:
    """Any schedule that can be lowered, also against hints."""
    backend = CPU if target == "cpu" else CUDA
    space = backend.space(spec, target)
    while True:
        schedule = Schedule(backend.name, NO_LAYOUT, Params({p.name: draw.choice(p.values) for p in space.parameters}))
        if not space.check(schedule):
            return schedule


class Placed(NamedTuple):
    """A matrix or a vector within larger memory."""

    memory: torch.Tensor
    view: torch.Tensor


def drawn_place(draw: Random, shape: tuple[int, ...], dtype: torch.dtype, overlapping: bool = False) -> Placed:
    """Memory of NaN (-128 for codes): rows begin anywhere or at multiples of 16 elements, side by side, apart or `overlapping`."""
    grain = draw.choice([1, 16])
    offset, stride = grain * draw.randint(0, 3), -(-shape[-1] // grain) * grain
    stride = draw.randint(0, shape[-1]) if overlapping else stride + grain * draw.choice([0, 0, 1, draw.randint(0, 9)])
    strides = (stride, 1)[-len(shape) :]
    size = offset + (shape[0] * stride if len(shape) > 1 else 0) + shape[-1] + draw.randint(1, 20)
    memory = torch.full((size,), -128 if dtype == torch.int8 else torch.nan, dtype=dtype)
    return Placed(memory, memory.as_strided(shape, strides, offset))


def drawn_rows(draw: Random, data: torch.Tensor) -> Placed:
    """Data of a matrix that is read: its rows may overlap, where later ones win."""
    placed = drawn_place(draw, tuple(data.shape), data.dtype, overlapping=draw.random() < 0.1)
    for mine, row in zip(placed.view, data, strict=True):
        mine.copy_(row)
    return placed


def drawn_shape(draw: Random, most: int, grain: int) -> tuple[int, int]:
    """Tokens and channels of a matrix of about `most` elements at most, where rows are as long as multiples of `grain`."""
    channels = draw.choice([1, 2, draw.randint(1, 40), 16 * draw.randint(1, 16), draw.randint(1, 300), draw.randint(1, most)])
    room = max(1, most // (-(-channels // grain) * grain))
    return min(room, draw.choice([0, 1, 2, 3, draw.randint(1, 40), draw.randint(1, 300), room])), channels


def drawn_matrix(draw: Random, kind: str, tokens: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Finite elements of one kind, with some channels of zeros of either sign."""
    random, info = generator(draw), torch.finfo(dtype)
    x = torch.rand(tokens, channels, generator=random) * 2 - 1
    if kind == "channels":
        x *= 10 ** (torch.rand(channels, generator=random) * 8 - 4)
    elif kind in ("ties", "near ties"):  # of the matrix's own scales, which are powers of two or any
        scale = exponents(draw, channels, 6) if kind == "ties" else torch.rand(channels, generator=random)
        x = (torch.randint(-127, 127, x.shape, generator=random) + 0.5) * scale
        x *= 1 + torch.randint(-2, 3, x.shape, generator=random) * (0.0 if kind == "ties" else 2.0**-23)
        x[:1] = 127 * scale
    elif kind == "constant":
        x = x[:1].expand_as(x).clone()
    elif kind == "tiny":
        x *= info.smallest_normal * exponents(draw, channels, 5)
    elif kind == "huge":
        x *= info.max
    elif kind == "one" and tokens:
        x[torch.arange(tokens).unsqueeze(1) != torch.randint(0, tokens, (channels,), generator=random)] = 0.0
    zeros = torch.rand(channels, generator=random) < draw.choice([0.0, 0.1])
    x[:, zeros] *= 0.0
    return x.clamp(info.min, info.max).to(dtype)


def drawn_scales(draw: Random, x: torch.Tensor) -> torch.Tensor:
    """Finite scales by which the matrix may be quantized: its own, or others, some of them 0."""
    own, kind, random = reference.scales(x), draw.choice(SCALES), generator(draw)
    scale = own.clone()
    if kind == "a third":
        scale = own / 3
    elif kind == "any":
        scale = own * torch.rand(own.shape, generator=random) * 2
    elif kind == "ties" and len(x):  # of one element of every channel
        scale = x.float().abs()[draw.randrange(len(x))] / (torch.randint(0, 127, own.shape, generator=random) + 0.5)
        scale = scale.clamp(max=torch.finfo(scale.dtype).max)
    elif kind in ("tiny", "huge"):
        scale = torch.rand(own.shape, generator=random) * (1e-37 if kind == "tiny" else 3e38)
    elif kind == "negative":
        scale = -own
    if kind != "own":
        scale[torch.rand(own.shape, generator=random) < 0.05] = 0.0
    return scale


def exponents(draw: Random, count: int, most: int) -> torch.Tensor:
    """Powers of two from 2^-most to 2^most."""
    return torch.exp2(torch.randint(-most, most + 1, (count,), generator=generator(draw)).float())
