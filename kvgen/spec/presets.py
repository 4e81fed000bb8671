"""Formats that have names: the papers' and KIVI's, as starting points for a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from kvgen.errors import SpecIssue
from kvgen.spec.issues import closest, shown
from kvgen.spec.model import KernelSpec, Model
from kvgen.spec.rules import TOKEN_STEP


def _same(bits: int, axis: str, group: int, zero: bool = True) -> dict[str, Any]:
    """K and V in one format."""
    quant = {"bits": bits, "axis": axis, "group": group, "zero": zero}
    return {"key": {**quant}, "value": quant}


def _float(kind: str, group: int) -> dict[str, Any]:
    """K and V per token, in codes of a float type."""
    quant = {"type": kind, "axis": "token", "group": group}
    return {"key": {**quant}, "value": quant}


def _mixed(bits: int, group: int) -> dict[str, Any]:
    """K per channel, V per token."""
    return {"key": {"bits": bits, "axis": "channel", "group": group}, "value": {"bits": bits, "axis": "token", "group": group}}


def _kitty(fraction: float) -> dict[str, Any]:
    """K per channel, some channels in 4 bits; V per token."""
    form = _mixed(2, 128)
    boosted = {**form["key"], "boost": {"fraction": fraction, "select": "mean_abs"}}
    return {**form, "key": boosted, "cache": {"layout": "paged", "page": 128, "sink": 32, "local": 128}}


def _saw() -> dict[str, Any]:
    """Per token in 4 bits, K after a block-diagonal Hadamard transform."""
    form = _same(4, "token", 128)
    return {**form, "key": {**form["key"], "rotate": {"block": 16, "signs": False}}}


_BF16 = {"attention": {"dtype": "bfloat16"}}

FORMATS: dict[str, dict[str, Any]] = {
    "bitdecoding-int4": _mixed(4, 128),
    "bitdecoding-int2": _mixed(2, 128),
    "turbomind-int8": _same(8, "token", 128),
    "turbomind-int4": _same(4, "token", 128),
    "qserve-int8": _same(8, "token", 128),
    "qserve-int4": _same(4, "token", 128),
    "int4-gqa-rowwise": {**_same(4, "token", 128), **_BF16},
    "int4-gqa-groupwise": {**_same(4, "token", 32), **_BF16},
    "kitty": _kitty(0.125),
    "kitty-pro": _kitty(0.25),
    "int8-per-channel": _same(8, "channel", 128, zero=False),
    "kivi-int2": _mixed(2, 32),
    "saw-int4": {**_saw(), **_BF16},
    "fp8-e4m3": _float("e4m3", 128),
    "nvfp4": _float("nvfp4", 16),
    "mxfp4": _float("mxfp4", 32),
}
"""The fields of each preset; the heads are the spec's own."""


@cache
def presets() -> dict[str, KernelSpec]:
    """Every preset as a spec, with Llama-3.1-8B's heads and the default workload."""
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    return {name: KernelSpec(**overlaid({"name": name, "attention": heads}, chosen)) for name, chosen in FORMATS.items()}


def start_from(data: dict[str, Any]) -> tuple[dict[str, Any], SpecIssue | None, list[str]]:
    """`data` with the fields of its `preset` where it has none itself, what is wrong with the preset, and notes of what differs from it."""
    own = {key: value for key, value in data.items() if key != "preset"}
    name = data["preset"]
    if not isinstance(name, str) or name not in FORMATS:
        close = closest(name, FORMATS) if isinstance(name, str) else None
        hint = f"did you mean {close}?" if close else f"known presets: {', '.join(FORMATS)}"
        return own, SpecIssue("preset", f"no such preset: {shown(name)}", None, hint), []
    for section in FORMATS[name]:
        if isinstance(own.get(section), Model):
            reason = f"with a preset, give a mapping of the fields that differ, not {type(own[section]).__name__}"
            return own, SpecIssue(section, reason), []
    merged = overlaid(FORMATS[name], own)
    return merged, None, list(_fit(name, own, merged))


def _fit(preset: str, own: Mapping[str, Any], merged: dict[str, Any]) -> Iterator[str]:
    """Make the preset's groups of channels divide the heads of `own`, and say so; a group that `own` gives stays as it is."""
    attention = own.get("attention")
    head_dim = attention.get("head_dim") if isinstance(attention, Mapping) else getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim < TOKEN_STEP:
        return
    for operand in ("key", "value"):
        quant, given = merged[operand], own.get(operand, {})
        if not isinstance(given, Mapping) or "group" in given or head_dim % quant["group"] == 0:
            continue
        if quant.get("axis") != "token" or quant.get("bits") == 16:  # no groups of channels
            continue
        fitting = [group for group in range(TOKEN_STEP, quant["group"] + 1, TOKEN_STEP) if head_dim % group == 0]
        if fitting:
            yield f"{operand}.group is {fitting[-1]}: that of the preset {preset}, {quant['group']}, does not divide head_dim ({head_dim})"
            quant["group"] = fitting[-1]


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, mapping by mapping."""
    merged = deepcopy(dict(base))
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = overlaid(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged
