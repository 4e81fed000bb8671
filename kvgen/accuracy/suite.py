"""The formats that are compared, and any format with the heads of the small transformer."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvgen.accuracy.recipe import Shape
from kvgen.arch import Arch
from kvgen.errors import KvgenError
from kvgen.spec import KernelSpec, load_spec, presets

SAME_AS = {"qserve-int8": "turbomind-int8", "qserve-int4": "turbomind-int4", "int4-gqa-rowwise": "turbomind-int4"}
"""Presets that store the same codes as another one, but for the type of what is not quantized."""

_BITS: dict[str, tuple[int, int]] = {"k8v4": (8, 4), "k4v2": (4, 2), "k2v4": (2, 4)}


@cache
def formats() -> dict[str, dict[str, Any]]:
    """Formats by name, as mappings without heads: the presets, mixed widths, and what tells the parts of Kitty apart."""
    return {
        **{name: {"preset": name} for name in presets() if name not in SAME_AS},
        **{name: {"preset": "bitdecoding-int4", "key": {"bits": k}, "value": {"bits": v}} for name, (k, v) in _BITS.items()},
        "kitty-unboosted": {"preset": "kitty", "key": {"boost": {"fraction": 0.0}}},
        "kitty-static": {"preset": "kitty", "key": {"boost": {"fraction": 0.125, "select": "static"}}},
        "kitty-pro-static": {"preset": "kitty-pro", "key": {"boost": {"fraction": 0.25, "select": "static"}}},
    }


@cache
def suite() -> dict[str, KernelSpec]:
    """The same as specs, with Llama-3.1-8B's heads in float16."""
    heads = {**presets()["kitty"].attention.to_json(), "dtype": "float16"}
    return {name: load_spec({**fields, "name": name, "attention": heads}) for name, fields in formats().items()}


def for_model(spec: KernelSpec, shape: Shape, arch: Arch) -> KernelSpec:
    """A spec's format with a model's heads. The attention around it is the model's: no window, soft cap or learned sinks.

    Raises KvgenError where groups of channels do not fit the model's heads.
    """
    for name, quant in (("key", spec.key), ("value", spec.value)):
        if quant.quantized and quant.axis == "token" and shape.head_dim % quant.group:
            raise KvgenError(
                f"{spec.name}: {name}.group is {quant.group} channels, and the heads of the model that accuracy is taken with have"
                f" {shape.head_dim}; only formats whose groups divide them can be compared"
            )
    heads = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": spec.attention.dtype}
    fields = spec.to_json()
    return load_spec({**{part: fields[part] for part in ("key", "value", "cache")}, "name": spec.name, "arch": arch, "attention": heads})


def unquantized(spec: KernelSpec) -> KernelSpec:
    """The same attention over a cache of 16 bits."""
    wide = {"bits": 16, "axis": "token", "group": spec.attention.head_dim}
    attention = spec.attention.to_json()
    return load_spec({"name": "unquantized", "arch": spec.arch, "attention": attention, "key": wide, "value": wide})
