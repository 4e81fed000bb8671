"""Static scales of K and V out of a checkpoint: what compressed-tensors and ModelOpt write beside a model's weights, and calibrated tensors
of one's own in the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvgen.extras import require
from kvgen.format.scales import static_scales
from kvgen.integrations.weights import opened
from kvgen.spec import KernelSpec, QuantSpec
from kvgen.spec.layers import read_config

Pair = tuple[torch.Tensor | None, torch.Tensor | None]
"""Scales of K and of V of a layer; None where blocks hold them."""
_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*?(?:(k|v)_proj\.output_scale|(?:k_proj\.|v_proj\.|attn\.)?(k|v)_scale)$")
"""`model.layers.3.self_attn.k_scale`; ModelOpt's `self_attn.k_proj.k_scale`; `k_proj.output_scale` of older checkpoints."""
_UNUSED = re.compile(r"\.(?:q_proj\.|attn\.)?q_scale$|\.prob_output_scale$")
"""Scales of q and of the softmax weights, which kernels with 8-bit products need: here both keep 16 bits."""
_ASYMMETRIC = re.compile(r"\.(?:k|v)_(?:zero_point|offset)$|\.[kv]_proj\.output_zero_point$")
_STRATEGIES = {"tensor": "tensor", "attn_head": "head", "head": "head", "channel": "channel"}


def load_scales(checkpoint: Path | str, spec: KernelSpec | Sequence[KernelSpec]) -> list[Pair]:
    """The scales of every layer, for `new_cache(scales=...)` and `KvgenCache(scales=...)`: float32, of the granularity of the format.

    `checkpoint` is a folder with `config.json` and `*.safetensors`, or one file of tensors. `spec` is the format of every layer, which
    `kvgen.spec.layers.layer_specs` makes, or one for all, of which there are as many as layers in the checkpoint. Scales of q are not used.

    Raises ValueError where the checkpoint's `kv_cache_scheme` has other codes, is dynamic or asymmetric, where a layer has no scale, or one
    of another granularity, or one that is not finite and positive; ToolchainMissing without safetensors; HostError for files that cannot
    be read.
    """
    require("reading a checkpoint", "safetensors")
    path = Path(checkpoint)
    found = _tensors(path)
    layers = 1 + max((layer for layer, _ in found), default=-1)
    specs = [spec] * layers if isinstance(spec, KernelSpec) else list(spec)
    if not specs or layers > len(specs):
        raise ValueError(f"{path} has scales of K or V for {layers} layers, and formats were given for {len(specs)}")
    if path.is_dir() and (path / "config.json").exists():
        _check_scheme(read_config(path), specs)
    return [_of_layer(layer, each, found) for layer, each in enumerate(specs)]


def _tensors(path: Path) -> dict[tuple[int, str], torch.Tensor]:
    """The scales by layer and `key` or `value`. Only they are read, of however many files."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no *.safetensors")
    found: dict[tuple[int, str], torch.Tensor] = {}
    for file in files:
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if _ASYMMETRIC.search(name):
                    raise ValueError(f"{name}: a static scale has no zero point")
                if _UNUSED.search(name) or (match := _NAME.search(name)) is None:
                    continue
                place = int(match[1]), {"k": "key", "v": "value"}[match[2] or match[3]]
                if place in found:
                    raise ValueError(f"{path} has two scales of {place[1]} in layer {place[0]}: the second is {name}")
                found[place] = tensors.get_tensor(name)
    return found


def _check_scheme(config: Mapping[str, Any], specs: Sequence[KernelSpec]) -> None:
    """Raises ValueError where the configuration says something else of codes and scales than the formats."""
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if not isinstance(scheme, Mapping):
        return
    if scheme.get("dynamic"):
        raise ValueError("kv_cache_scheme of the checkpoint is dynamic: it has no scales, and a format with `scale: dynamic` needs none")
    if scheme.get("symmetric") is False:
        raise ValueError("kv_cache_scheme of the checkpoint is asymmetric, and static scales have no zero")
    kind, bits, strategy = scheme.get("type", "float"), scheme.get("num_bits", 8), scheme.get("strategy", "tensor")
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"kv_cache_scheme of the checkpoint has the strategy {strategy!r:.40}, and static scales are per tensor, head or channel"
        )
    for layer, spec in enumerate(specs):
        for name, quant in (("key", spec.key), ("value", spec.value)):
            own = "int" if quant.type == "int" else "float"
            if quant.static and (kind, bits) != (own, quant.bits):
                codes = f"{quant.type} of {quant.bits} bits"
                raise ValueError(
                    f"layer {layer}: kv_cache_scheme of the checkpoint has {kind} codes of {bits} bits, and {name} of the format {codes}"
                )
            if quant.static and _STRATEGIES[strategy] != quant.scale:
                _refuse_granularity(layer, name, quant, _STRATEGIES[strategy])


def _of_layer(layer: int, spec: KernelSpec, found: Mapping[tuple[int, str], torch.Tensor]) -> Pair:
    both = []
    for name, quant in (("key", spec.key), ("value", spec.value)):
        scale = found.get((layer, name)) if quant.static else None
        if quant.static and scale is None:
            raise ValueError(f"layer {layer}: the checkpoint has no scale of {name} (model.layers.{layer}.self_attn.{name[0]}_scale)")
        both.append(None if scale is None else _shaped(layer, name, quant, spec, scale))
    try:
        static_scales(spec, both[0], both[1])
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}") from None
    return both[0], both[1]


def _shaped(layer: int, name: str, quant: QuantSpec, spec: KernelSpec, scale: torch.Tensor) -> torch.Tensor:
    """A scale as the format has it, of any shape with as many numbers."""
    heads, dim = spec.attention.kv_heads, spec.attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {"tensor": (), "head": (heads,), "channel": (heads, dim)}
    if scale.numel() != torch.Size(shapes[quant.scale]).numel():
        of = [kind for kind, shape in shapes.items() if torch.Size(shape).numel() == scale.numel()]
        _refuse_granularity(layer, name, quant, of[0] if of else f"of shape {list(scale.shape)}")
    return scale.float().reshape(shapes[quant.scale])


def _refuse_granularity(layer: int, name: str, quant: QuantSpec, found: str) -> None:
    hint = f": write {name}.scale: {found}" if found in _STRATEGIES.values() else ""
    raise ValueError(f"layer {layer}: the checkpoint's scale of {name} is {_per(found)}, and the format's is {_per(quant.scale)}{hint}")


def _per(kind: str) -> str:
    return f"per {kind}" if kind in _STRATEGIES.values() else kind
