"""The table of supported features, from the back ends themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.arch import Target
from kvgen.errors import KvgenError
from kvgen.lower.backend import NAMES, Backend, get_backend
from kvgen.lower.modifier import extend_refusal
from kvgen.spec import load_spec

_HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
_CHANNEL4 = {"bits": 4, "axis": "channel", "group": 128}
_TOKEN4 = {"bits": 4, "axis": "token", "group": 128}


def _with(attention: Mapping[str, Any] | None = None, key: Any = None, value: Any = None, cache: Any = None) -> dict[str, Any]:
    """A 4-bit spec with K per channel and V per token, with changes."""
    return {
        "arch": "cpu",
        "attention": {**_HEADS, **(attention or {})},
        "key": {**_CHANNEL4, **(key or {})},
        "value": {**_TOKEN4, **(value or {})},
        "cache": cache or {},
    }


def _both(**quant: Any) -> dict[str, Any]:
    return _with(key=quant, value=quant)


def _float(kind: str, **quant: Any) -> dict[str, Any]:
    return {**_with(), "key": {"type": kind, **quant}, "value": {"type": kind, **quant}}


EXTEND = "extend attention (more query tokens than q_len)"
"""Decided separately from the spec: the kernels of a GPU compute decode steps only."""

FEATURES: dict[str, dict[str, Any]] = {
    "K per channel, V per token, 8 bits": _with(key={"bits": 8}, value={"bits": 8}),
    "K per channel, V per token, 4 bits": _with(),
    "K per channel, V per token, 2 bits": _with(key={"bits": 2}, value={"bits": 2}),
    "K 8 bits, V 4 bits": _with(key={"bits": 8}),
    "K 4 bits, V 2 bits": _with(value={"bits": 2}),
    "not quantized (16 bits)": _both(bits=16),
    "K and V per token, 8 bits": _both(axis="token", bits=8),
    "K and V per token, 4 bits": _both(axis="token"),
    "K and V per channel, 8 bits": _both(axis="channel", bits=8),
    "K and V per channel, 4 bits": _both(axis="channel"),
    "K per token, V per channel, 8 bits": _with(key={"axis": "token", "bits": 8}, value={"axis": "channel", "bits": 8}),
    "K and V per token, fp8 (e4m3)": _float("e4m3", axis="token"),
    "K and V per channel, fp8 (e5m2)": _float("e5m2", axis="channel"),
    "K fp8 (e4m3), V 4 bits": {**_with(), "key": {"type": "e4m3", "axis": "channel"}},
    "nvfp4 and mxfp4": {**_with(), "key": {"type": "nvfp4"}, "value": {"type": "mxfp4"}},
    "K and V per token, 4 bits, rotated (Hadamard)": _both(axis="token", rotate="hadamard"),
    "K per channel, V per token, 4 bits, blocks of 64 channels rotated": _both(rotate={"block": 64}),
    "several groups per token (32 channels)": _both(axis="token", group=32),
    "small groups per channel (32 tokens)": _with(key={"group": 32}),
    "smallest groups per channel (16 tokens)": _with(key={"group": 16}),
    "groups per channel of other sizes (48 tokens)": _with(key={"group": 48}),
    "largest groups per channel (512 tokens)": _with(key={"group": 512}),
    "symmetric": _with(key={"zero": False}, value={"zero": False}),
    "static scales, given with the cache": _both(bits=8, scale="head", zero=False),
    "nvfp4 with a static scale per tensor": {
        **_with(),
        "key": {"type": "nvfp4", "scale": "tensor"},
        "value": {"type": "nvfp4", "scale": "tensor"},
    },
    "static scales per channel, tokens quantized as they arrive": {
        **_both(bits=8, scale="channel", zero=False),
        "cache": {"quantize": "arrival"},
    },
    "bfloat16": _with({"dtype": "bfloat16"}),
    "float32": _with({"dtype": "float32"}),
    "head_dim 64": _with({"head_dim": 64}, value={"group": 64}),
    "head_dim 80": _with({"head_dim": 80}, value={"group": 80}),
    "head_dim 80, 2 bits": _with({"head_dim": 80}, key={"bits": 2}, value={"bits": 2, "group": 80}),
    "head_dim 192": _with({"head_dim": 192}, value={"group": 192}),
    "head_dim 256": _with({"head_dim": 256}),
    "head_dim 512": _with({"head_dim": 512}, value={"group": 512}),
    "small groups per token (16 channels)": _both(axis="token", group=16),
    "multi-head (no sharing of K and V)": _with({"kv_heads": 32}),
    "multi-query (32 query heads share K and V)": _with({"kv_heads": 1}),
    "128 query heads per KV head": _with({"q_heads": 128, "kv_heads": 1}),
    "several query tokens (q_len 4)": _with({"q_len": 4}),
    "8 query tokens of 16 heads per KV head": _with({"q_heads": 128, "q_len": 8}),
    EXTEND: _with(),
    "paged cache": _with(cache={"layout": "paged", "page": 128}),
    "pages of 16 tokens": {**_both(axis="token"), "cache": {"layout": "paged", "page": 16}},
    "sliding window": _with({"window": 1024}),
    "soft cap": _with({"softcap": 50.0}),
    "attention sinks (a logit per head)": _with({"sinks": True}),
    "sink and local tokens in full precision": _with(cache={"sink": 32, "local": 128}),
    "tokens may be taken back (speculative decoding)": _with(cache={"rollback": 8}),
    "boosted channels (Kitty)": _with(key={"bits": 2, "boost": {"fraction": 0.125}}, value={"bits": 2}),
    "boosted channels at head_dim 80": _with({"head_dim": 80}, key={"bits": 2, "boost": {"fraction": 0.2}}, value={"bits": 2, "group": 80}),
    "a quarter of the channels boosted, by their range": _with(key={"bits": 2, "boost": {"fraction": 0.25, "select": "range"}}),
}
"""One spec for each feature; otherwise Llama-3.1-8B's heads, fp16, 4 bits, contiguous."""


def support_table() -> str:
    """A Markdown table: a row per feature of the spec language, a column per back end and targets; yes, or – where it is refused.

    Targets of a back end share a column if they are equal; back ends whose libraries are not installed have none. Needs no GPU or compiler.
    """
    columns: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in NAMES:
        try:
            backend = get_backend(name)
        except KvgenError:
            continue
        for target in backend.targets:
            answers = tuple("yes" if _supports(backend, feature, target) else "–" for feature in FEATURES)
            columns.setdefault((name, answers), []).append(target)
    titles = [name if [name] == targets else f"{name} ({', '.join(targets)})" for (name, _), targets in columns.items()]
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---|" * len(titles)]
    lines += [f"| {' | '.join(row)} |" for row in zip(FEATURES, *(answers for _, answers in columns), strict=True)]
    return "\n".join(lines)


def _supports(backend: Backend, feature: str, target: Target) -> bool:
    spec = load_spec({**FEATURES[feature], "arch": target})
    return backend.unsupported(spec, target) is None and (feature != EXTEND or extend_refusal(spec, gpu=target != "cpu") is None)
