"""Specs with fields replaced, and hypothesis strategies for specs, packed layouts and plans."""

from __future__ import annotations

from math import lcm
from typing import Any

from hypothesis import strategies as st

from kvgen.format.layout import Order, PackedLayout, packed_layout
from kvgen.spec import KernelSpec, Workload, load_spec
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


def _quants(head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    divisors = [group for group in range(1, head_dim + 1) if head_dim % group == 0]
    bits, tokens = st.sampled_from([2, 4, 8]), st.sampled_from([16, 32, 48, 64, 128, 512])
    kinds = st.sampled_from(["e4m3", "e5m2"])
    small = [{"type": kind, "axis": "token"} for kind, group in (("nvfp4", 16), ("mxfp4", 32)) if head_dim % group == 0]
    return st.one_of(
        st.just({"bits": 16}),
        st.fixed_dictionaries({"bits": bits, "axis": st.just("channel"), "group": tokens, "zero": st.booleans()}),
        st.fixed_dictionaries({"bits": bits, "axis": st.just("token"), "group": st.sampled_from(divisors), "zero": st.booleans()}),
        st.fixed_dictionaries({"type": kinds, "axis": st.just("channel"), "group": tokens}),
        st.fixed_dictionaries({"type": kinds, "axis": st.just("token"), "group": st.sampled_from(divisors)}),
        st.sampled_from(small),
    )


@st.composite
def _caches(draw: st.DrawFn, key: dict[str, Any], value: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Pages of whole groups, and unquantized tokens where something is quantized."""
    cache: dict[str, Any] = {"rollback": draw(st.sampled_from([0, 0, 1, 40]))}
    whole = lcm(16, *(quant["group"] for quant in (key, value) if quant.get("axis") == "channel"))
    if draw(st.booleans()):
        cache |= {"layout": "paged", "page": whole * draw(st.integers(1, 4))}
    if {key.get("bits"), value.get("bits")} != {16}:
        most = 100 if window is None else min(100, window - 1)
        cache["local"] = draw(st.sampled_from([0, 0, min(1, most), most]))
        cache["sink"] = 0 if window is not None else draw(st.sampled_from([0, 0, 1, 16, 70]))
    return cache


@st.composite
def spec_data(draw: st.DrawFn) -> dict[str, Any]:
    """Data of a valid spec."""
    head_dim = draw(st.integers(1, 8).map(lambda n: 16 * n) | st.sampled_from([192, 256]))
    kv_heads = draw(st.integers(1, 3))
    q_len = draw(st.integers(1, 4))
    window = draw(st.none() | st.integers(1, 300))
    key, value = draw(_quants(head_dim)), draw(_quants(head_dim))
    data = base(
        attention={
            "q_heads": kv_heads * draw(st.integers(1, 5) | st.just(32)),
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
            "q_len": q_len,
            "softcap": draw(st.sampled_from([0.0, 0.001, 30.0, 1e6])),
            "window": window,
            "sinks": draw(st.booleans()),
        },
        key=key,
        value=value,
        cache=draw(_caches(key, value, window)),
        workloads=draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "batch": st.integers(1, 128),
                        "kv_len": st.integers(4, 1 << 20),
                        "q_len": st.integers(1, q_len),
                        "weight": st.floats(0.1, 10.0),
                    }
                ),
                min_size=1,
                max_size=3,
                unique_by=lambda work: (work["batch"], work["kv_len"], work["q_len"]),
            )
        ),
    )
    if key.get("bits") == 2 and key.get("axis") == "channel" and key.get("zero"):
        channels, select = draw(st.integers(0, head_dim - 1)), draw(st.sampled_from(["mean_abs", "range", "static"]))
        data["key"] = {**key, "boost": {"fraction": channels / head_dim, "select": select}}
    return data


def specs() -> st.SearchStrategy[KernelSpec]:
    """Valid specs."""
    return spec_data().map(load_spec)


def workloads() -> st.SearchStrategy[Workload]:
    """Valid workloads."""
    return st.builds(Workload, batch=st.integers(1, 512), kv_len=st.integers(8, 1 << 20), q_len=st.integers(1, 8))


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
