"""Specs of the whole language, schedules of the whole space, hard data, matrices and places in memory, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import lcm
from random import Random
from typing import Any, NamedTuple

import torch

from kvgen.arch import GPUS, Target
from kvgen.errors import SpecError
from kvgen.lower.backend import Backend, get_backend
from kvgen.lower.cuda.backend import BOOST_STEP, MOST_GROUP
from kvgen.lower.gpu import MAX_Q_ROWS
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.tilelang.backend import CHANNEL_GROUPS as TILELANG_GROUPS
from kvgen.spec import AnySpec, KernelSpec, MatrixSpec, load_any_spec, load_spec
from kvgen.verify import matrix as reference
from kvgen.verify.quantize import torch_dtype

CPU, CUDA, TILELANG = map(get_backend, ("cpu", "cuda", "tilelang"))
TOKEN_GROUPS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 512)
LARGEST_SCORE = 30.0
KINDS = ("normal", "normal", "outliers", "ties", "constant", "tiny")
MATRIX_KINDS = ("uniform", "channels", "ties", "near ties", "constant", "tiny", "huge", "one")
SCALES = ("own", "own", "a third", "any", "ties", "tiny", "huge", "negative")
MOST_BLOCK = 512


def drawn_spec(draw: Random) -> KernelSpec:
    """A spec that the CPU back end supports. Every field of the language takes every kind of value that it allows."""
    while True:
        spec = load_spec(spec_data(draw))
        if CPU.unsupported(spec, "cpu") is None:
            return spec


def drawn_gpu_spec(draw: Random, target: Target = "sm90") -> KernelSpec:
    """A spec that the CUDA back end supports."""
    while True:
        data = spec_data(draw)
        attention = data["attention"]
        dim, group = attention["head_dim"], attention["q_heads"] // attention["kv_heads"]
        data["arch"], attention["kv_heads"] = target, min(2, attention["kv_heads"])
        attention["q_heads"] = group * attention["kv_heads"]
        attention["dtype"] = draw.choice(["float16", "float16", "bfloat16"])
        attention["q_len"] = draw.choice([1, 1, 2, draw.randint(1, 8)])
        for name in ("key", "value"):
            if data[name]["axis"] == "channel":
                usual, any_group = draw.choice((16, 32, 64, 64, 128, 128, 256, 512)), 16 * draw.randint(1, MOST_GROUP // 16)
                data[name]["group"] = draw.choice((usual, usual, any_group))
        if "boost" in data["key"] and dim > BOOST_STEP:
            data["key"]["boost"]["fraction"] = BOOST_STEP * draw.randint(1, dim // BOOST_STEP - 1) / dim
        if data["cache"].get("page"):
            groups = [data[name]["group"] for name in ("key", "value") if data[name]["axis"] == "channel"]
            pages = [16, 32, 48, 64, 96, 128] if not groups else [lcm(32, *groups) * blocks for blocks in (1, 2, 3)]
            data["cache"]["page"] = draw.choice(pages)
        with suppress(SpecError):
            spec = load_spec(data)
            if CUDA.unsupported(spec, target) is None:
                return spec


def drawn_tilelang_spec(draw: Random) -> KernelSpec:
    """A spec that the TileLang back end supports."""
    while True:
        data = spec_data(draw)
        dim, heads, q_len = 32 * draw.choice([1, 2, 2, 3, 4, 4]), draw.randint(1, 2), draw.choice([1, 1, 2, draw.randint(1, 8)])
        group = draw.choice([1, 2, 4, 5, 8, draw.randint(1, MAX_Q_ROWS // q_len)])
        data["arch"] = "sm90"
        data["attention"] |= {"head_dim": dim, "kv_heads": heads, "q_heads": heads * group, "q_len": q_len, "softcap": 0.0, "window": None}
        data["attention"] |= {"dtype": draw.choice(["float16", "bfloat16"]), "sinks": False}
        for name, per_channel in (("key", draw.random() < 0.6), ("value", False)):
            group = draw.choice(TILELANG_GROUPS) if per_channel else dim
            data[name] = {
                "bits": draw.choice([2, 4, 8]), "zero": draw.random() < 0.5, "axis": "channel" if per_channel else "token", "group": group,
            }  # fmt: skip
        tokens = max(32, data["key"]["group"] if data["key"]["axis"] == "channel" else 32)
        data["cache"] = {"layout": "paged", "page": tokens * draw.randint(1, 4)} if draw.random() < 0.5 else {}
        with suppress(SpecError):
            spec = load_spec(data)
            if TILELANG.unsupported(spec, "sm90") is None:
                return spec


def spec_data(draw: Random) -> dict[str, Any]:
    """Data of a valid spec of one workload."""
    dim = 16 * (draw.randint(1, 16) if draw.random() < 0.95 else draw.randint(17, 64))
    attention = _attention(draw, dim)
    window = attention["window"]
    key, value = _quant(draw, dim), _quant(draw, dim)
    if key.get("bits") == 2 and key["axis"] == "channel" and key["zero"] and draw.random() < 0.7:
        select = draw.choice(["mean_abs", "range", "static"])
        key["boost"] = {"fraction": draw.choice([1, dim // 8, dim // 4, dim // 2, draw.randint(1, dim - 1)]) / dim, "select": select}
    cache: dict[str, Any] = {}
    groups = [q["group"] for q in (key, value) if q.get("axis") == "channel"]
    if draw.random() < 0.4:
        step = max([16, *groups])
        pages = [step * n for n in (1, 2, 3, 4, 6) if all(step * n % group == 0 for group in groups)]
        if pages:
            cache |= {"layout": "paged", "page": draw.choice(pages)}
    if draw.random() < 0.4:
        cache["rollback"] = draw.choice([1, 3, 8, draw.randint(1, 100)])
    if key["bits"] != 16 or value["bits"] != 16:
        if draw.random() < 0.3 and window is None:
            cache["sink"] = draw.choice([1, 4, 16, 64, draw.randint(1, 200)])
        if draw.random() < 0.3:
            cache["local"] = min(draw.choice([1, 16, 64, 128, draw.randint(1, 200)]), (window or 201) - 1)
    return {
        "name": "life", "arch": "cpu", "attention": attention, "key": key, "value": value, "cache": cache,
        "workloads": [{"batch": 1, "kv_len": 1 << 16}],
    }  # fmt: skip


def _attention(draw: Random, dim: int) -> dict[str, Any]:
    kv_heads = draw.choice([1, 1, 2, 3])
    group = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, draw.randint(1, 40)]) if dim <= 256 else draw.randint(1, 4)
    return {
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "dtype": draw.choice(["float16", "float16", "bfloat16", "float32"]),
        "q_len": draw.choice([1, 1, 2, 3, 4, 8, draw.randint(1, 40)]),
        "softcap": draw.choice([0.0, 0.0, 0.0, 30.0, 50.0, 1.0, round(10 ** draw.uniform(-3, 6), 6)]),
        "window": draw.choice([None, None, None, 1, draw.randint(1, 64), draw.randint(1, 400), 100000]),
        "sinks": draw.random() < 0.3,
    }


def _quant(draw: Random, dim: int) -> dict[str, Any]:
    bits, zero = draw.choice([2, 4, 8, 16]), draw.random() < 0.6
    if bits == 16:
        return {"bits": 16, "axis": "token", "group": draw.choice([16, 77])}
    if draw.random() < 0.5:
        group = draw.choice([32, 32, 64, 128, draw.choice(TOKEN_GROUPS)])
        return {"bits": bits, "axis": "channel", "group": group, "zero": zero}
    divisors = [n for n in range(1, dim + 1) if dim % n == 0]
    wide = [n for n in divisors if n % 16 == 0]
    return {"bits": bits, "axis": "token", "group": draw.choice([dim, draw.choice(wide), draw.choice(divisors)]), "zero": zero}


def drawn_schedule(
    draw: Random, backend: Backend, spec: AnySpec, target: Target, layout: Params | None = None, **values: Sequence[object]
) -> Schedule:
    """Any schedule that can be lowered, also against hints; of a given layout, any launch. `values`: those of a parameter of the launch."""
    space, default = backend.space(spec, target), backend.default(spec, target)
    for _ in range(20_000):
        chosen = {part: {p.name: draw.choice(p.values) for p in space.parameters if p.part == part} for part in ("layout", "launch")}
        chosen["launch"] |= {name: draw.choice(some) for name, some in values.items()}
        own = layout or (Params(chosen["layout"]) if draw.random() < 0.5 else default.layout)
        schedule = Schedule(backend.name, own, Params(chosen["launch"]))
        if own.get("block", 0) <= MOST_BLOCK and not space.check(schedule):
            return schedule
    return Schedule(backend.name, layout or default.layout, default.launch)


def drawn_tensor(draw: Random, kind: str, batch: int, tokens: int, heads: int, spec: KernelSpec) -> torch.Tensor:
    """K or V [batch, tokens, heads, head_dim] of one kind: a view into wider rows of NaN."""
    random, dim = generator(draw), spec.attention.head_dim
    x = torch.randn(batch, tokens, heads, dim, generator=random)
    if kind == "outliers":
        x[..., :: max(2, dim // 3)] = x[..., :: max(2, dim // 3)] * 6 + 8
    elif kind == "ties":
        x = torch.randint(0, 16, x.shape, generator=random) * 0.5
    elif kind == "constant":
        x[..., ::3], x[:, ::5] = 1.5, -0.75
    elif kind == "tiny":
        x[..., 1::2] *= 3e-7
    wide = torch.full((batch, tokens, heads + draw.randint(0, 1), dim + 16 * draw.randint(0, 1)), torch.nan)
    view = wide.to(torch_dtype(spec.attention.dtype))[:, :, -heads:, :dim]
    view.copy_(x)
    view[view == 0] = 0.0  # which of two zeros is the smaller is not defined
    return view


def drawn_query(draw: Random, spec: KernelSpec, batch: int, tokens: int, keys: torch.Tensor) -> torch.Tensor:
    """Queries [batch, tokens, q_heads, head_dim] whose scores with `keys` [..., head_dim] are at most LARGEST_SCORE."""
    q, k = drawn_tensor(draw, "normal", batch, tokens, spec.attention.q_heads, spec), keys.abs().sum(-1)
    largest = float(k.max()) / spec.attention.head_dim**0.5 * float(q.abs().max()) if k.numel() else 0.0
    return q.mul_(min(1.0, LARGEST_SCORE / max(largest, 1.0)))


def drawn_sinks(draw: Random, spec: KernelSpec) -> torch.Tensor | None:
    """Learned sinks of a spec that has them, far below and above all scores: not all above, where 16 bits would hold no output."""
    if not spec.attention.sinks:
        return None
    return torch.tensor([draw.choice([-80.0, -2.0, 0.0, 4.0, *([8.0, 60.0] if head else [])]) for head in range(spec.attention.q_heads)])


def generator(draw: Random) -> torch.Generator:
    """Of tensors."""
    return torch.Generator().manual_seed(draw.getrandbits(40))


def dense(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape, also in extents of 1."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


# --- operations on a matrix -------------------------------------------------------------------------------------------------


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
