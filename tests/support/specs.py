"""Specs with fields replaced, and hypothesis strategies for specs, packed layouts and plans."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from kvgen.format.layout import Order, PackedLayout, packed_layout
from kvgen.spec import KernelSpec, load_spec
from tests.lives.draw import spec_data as drawn_data
from tests.support.plan import PlanShape


def base(**sections: Any) -> dict[str, Any]:
    """A small valid spec as data; sections given replace its own."""
    data: dict[str, Any] = {
        "name": "base",
        "arch": "cpu",
        "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
        "key": {"bits": 4, "axis": "channel", "group": 32},
        "value": {"bits": 4, "axis": "token", "group": 64},
        "workloads": [{"batch": 1, "kv_len": 256}],
    }
    return {**data, **sections}


def kv4_spec(**sections: Any) -> KernelSpec:
    """A 4-bit spec for SM90, with fields replaced section by section."""
    data: dict[str, Any] = {
        "name": "s",
        "arch": "sm90",
        "attention": {"q_heads": 32, "kv_heads": 8, "head_dim": 128},
        "key": {"bits": 4, "axis": "channel", "group": 128},
        "value": {"bits": 4, "axis": "token", "group": 128},
    }
    return KernelSpec(**{**data, **{name: {**data.get(name, {}), **change} for name, change in sections.items()}})


def spec_data() -> st.SearchStrategy[dict[str, Any]]:
    """Data of a valid spec of one to three workloads: as random lives draw it, and with floats for some of the codes."""
    return st.integers(0, 1 << 40).map(lambda seed: _drawn(Random(seed)))


def _drawn(draw: Random) -> dict[str, Any]:
    data = drawn_data(draw)
    for name in ("key", "value"):
        quant, dim = data[name], data["attention"]["head_dim"]
        if "boost" not in quant and draw.random() < 0.3:
            kind = draw.choice(["e4m3", "e5m2", *(["nvfp4", "mxfp4"] if dim % 32 == 0 else [])])
            plain = {"axis": "token", **({} if kind.endswith("fp4") else {"group": dim})}
            same = {field: quant[field] for field in ("axis", "group")}
            data[name] = {"type": kind, **(plain if kind.endswith("fp4") or quant["bits"] == 16 else same)}
    lengths = draw.sample(range(data["attention"]["q_len"], 1 << 20), draw.randint(1, 3))
    works = [{"batch": draw.randint(1, 128), "kv_len": length, "weight": draw.uniform(0.1, 10.0)} for length in lengths]
    return {**data, "workloads": [{**work, "q_len": draw.randint(1, data["attention"]["q_len"])} for work in works]}


def specs() -> st.SearchStrategy[KernelSpec]:
    """Valid specs."""
    return spec_data().map(load_spec)


def possible_layouts(spec: KernelSpec) -> list[PackedLayout]:
    """Every packed layout of blocks of 16 to 128 tokens that the spec can have."""
    orders: tuple[Order, ...] = ("mma", "simd")
    return [made for tokens in (16, 32, 64, 128) for order in orders if (made := _layout_or_none(spec, tokens, order)) is not None]


def _layout_or_none(spec: KernelSpec, tokens: int, order: Order) -> PackedLayout | None:
    try:
        return packed_layout(spec, tokens, order)
    except ValueError:
        return None


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KernelSpec, PackedLayout]:
    """A spec and one of the packed layouts that it can have."""
    spec = draw(specs().filter(lambda spec: bool(possible_layouts(spec))))
    return spec, draw(st.sampled_from(possible_layouts(spec)))


@st.composite
def planned_steps(draw: st.DrawFn, window: bool = False) -> tuple[PlanShape, list[int], int, bool]:
    """A shape, lengths of its sequences, a limit of lengths, and whether empty sequences are skipped."""
    tile = draw(st.sampled_from((16, 32, 96, 128)))
    q_len = draw(st.integers(1, 9))
    shape = PlanShape(
        batch=draw(st.integers(1, 7)),
        heads=draw(st.integers(1, 5)),
        workers=draw(st.one_of(st.integers(1, 12), st.integers(1, 400))),
        tile_tokens=tile,
        block_tokens=draw(st.sampled_from((16, 32, 128, 512))),
        head_cost=draw(st.integers(0, 4)),
        least_tiles=draw(st.integers(1, 8)),
        window=draw(st.integers(1, 700) if window else st.one_of(st.just(0), st.integers(1, 700))),
        q_len=q_len,
        fresh=draw(st.sampled_from((0, q_len))),
        unpacked=draw(st.one_of(st.just(0), st.integers(0, 600))),
        tile_residual=draw(st.sampled_from((0, 5, 40))),
    )
    lengths = draw(st.lists(lengths_up_to(40 * tile), min_size=shape.batch, max_size=shape.batch))
    return shape, lengths, draw(st.sampled_from((20 * tile, 1 << 20))), draw(st.booleans())


def lengths_up_to(most: int) -> st.SearchStrategy[int]:
    """Tokens of a sequence; none is as likely as all others together are in a batch."""
    return st.one_of(st.just(0), st.integers(0, most))
