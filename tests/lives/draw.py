"""Specs of the whole language, schedules of the whole space and hard data, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import lcm
from random import Random
from typing import Any

import torch

from kvgen.arch import Target
from kvgen.errors import SpecError
from kvgen.format.dtypes import torch_dtype
from kvgen.lower.backend import Backend, get_backend
from kvgen.lower.cuda.backend import BOOST_STEP, MOST_GROUP
from kvgen.lower.gpu import MAX_Q_ROWS
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.tilelang.backend import CHANNEL_GROUPS as TILELANG_GROUPS
from kvgen.spec import AnySpec, KernelSpec, load_spec

CPU, CUDA, TILELANG = map(get_backend, ("cpu", "cuda", "tilelang"))
TOKEN_GROUPS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 512)
LARGEST_SCORE = 30.0
KINDS = ("normal", "normal", "outliers", "ties", "constant", "tiny")
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
        data["cache"].pop("quantize", None)  # emulated lives compare whole blocks
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
    if not groups and draw.random() < 0.5:
        cache = {**{name: cache[name] for name in ("layout", "page") if name in cache}, "quantize": "arrival"}
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
    blocks = [block for block in (16, 32, 64, 128, 256) if dim % block == 0]
    rotate = {"rotate": {"block": draw.choice([None, *blocks]), "signs": draw.random() < 0.5}} if draw.random() < 0.3 else {}
    if bits == 16:
        return {"bits": 16, "axis": "token", "group": draw.choice([16, 77])}
    if draw.random() < 0.5:
        group = draw.choice([32, 32, 64, 128, draw.choice(TOKEN_GROUPS)])
        return {"bits": bits, "axis": "channel", "group": group, "zero": zero, **rotate}
    divisors = [n for n in range(1, dim + 1) if dim % n == 0]
    wide = [n for n in divisors if n % 16 == 0]
    return {"bits": bits, "axis": "token", "group": draw.choice([dim, draw.choice(wide), draw.choice(divisors)]), "zero": zero, **rotate}


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
