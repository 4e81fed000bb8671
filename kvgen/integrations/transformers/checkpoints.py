"""Models with packed weights as files: `save_quantized` writes what kvgen packed, `load_quantized` reads that, and checkpoints of GPTQ, AWQ
and compressed-tensors, without the packages that made them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvgen.api import get_linear_kernel
from kvgen.errors import host_errors
from kvgen.extras import require
from kvgen.format.dtypes import torch_dtype
from kvgen.integrations.linears import QuantizedLinear, gather, linear_spec
from kvgen.integrations.transformers.weights import (
    Format,
    Place,
    fetch,
    joint_bias,
    places,
    put,
    quantize_head,
    quantized_linears,
    spec_of,
)
from kvgen.integrations.weights import Checkpoint, Weight, in_kernel_groups, opened

FILE = "model.safetensors"
FORMAT = "kvgen-weights"
VERSION = 1
"""Of the file's metadata."""
_SCALE = re.compile(r"(?:[qkv]|output)_scale$|rotary_emb\.inv_freq$")
"""Tensors beside weights: scales of a KV cache, which `load_scales` reads, and what old checkpoints keep of rotary embeddings."""


def save_quantized(model: Any, folder: Path | str) -> None:
    """Write a model whose weights `quantize_weights` or `load_quantized` packed: `config.json` and one file of safetensors.

    The file holds the packed bytes as they are, for the kind of device on which the model lies, and says so in its metadata. Raises
    ValueError for a model without packed weights, HostError where a file cannot be written, ToolchainMissing without safetensors.
    """
    require("save_quantized", "safetensors")
    from safetensors.torch import save_file

    layers = quantized_linears(model)
    if not layers:
        raise ValueError("the model has no packed weights: quantize_weights packs them")
    about = {"version": VERSION, "device": model.device.type, "products": {name: _described(layer) for name, layer in layers.items()}}
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if (tensor.data_ptr(), tensor.shape) not in seen:  # tied weights are there once
            seen.add((tensor.data_ptr(), tensor.shape))
            tensors[name] = tensor.contiguous()
    path = Path(folder)
    with host_errors("write", path):
        path.mkdir(parents=True, exist_ok=True)
        named = {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
        (path / "config.json").write_text(json.dumps({**_unquantized(model.config.to_dict()), **named}, indent=1, default=str))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
        save_file(tensors, path / FILE, {"format": "pt", FORMAT: json.dumps(about)})


def load_quantized(
    folder: Path | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    head: Format | None = None,
    join: bool = True,
    wide: str = "dequantize",
) -> Any:
    """A causal language model with packed weights, from what `save_quantized` wrote or from a checkpoint of GPTQ, AWQ or
    compressed-tensors (pack-quantized), on `device`: by default the GPU, if there is one.

    Of a checkpoint, the codes and zeros are its own, bit for bit, and scales are rounded to `dtype`, by default that of its configuration;
    layers that are not quantized there stay so, but for the output head where `head` is given. What `save_quantized` wrote is as it was.
    `join`, `head` and `wide` are those of `quantize_weights`.

    Raises UnsupportedError, by name, for quantization that kvgen does not compute, ValueError for a file of another layout, version or
    device, for tensors that are missing or do not fit, and as `get_linear_kernel` does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    files = Checkpoint(folder)
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    about = _about(files)
    if about is None and files.method is None:
        raise ValueError(f"{folder} has no quantized weights: load it with transformers, and call quantize_weights")
    config = AutoConfig.for_model(**_unquantized(files.config))
    if about is not None and (head is not None or dtype not in (None, _dtype_of(config))):
        raise ValueError(f"{folder} was saved by kvgen, with its own dtype ({_dtype_of(config)}) and head: give neither")
    with _without_memory():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or _dtype_of(config)).eval()
    _plain(model, files, about["products"] if about is not None else {}, where)
    if about is not None:
        _packed(model, files, about, where, wide)
    else:
        _foreign(model, files, where, join, wide)
        if head is not None:
            quantize_head(model, head, wide=wide)
    gather(quantized_linears(model).values())
    if missing := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise ValueError(f"{folder} lacks {', '.join(missing[:4])}{' and others' if len(missing) > 4 else ''}")
    if (files.folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(files.folder)
    return model.requires_grad_(False)


# --- what files hold ---------------------------------------------------------------------------------------------------------


def _described(layer: QuantizedLinear) -> dict[str, Any]:
    """A product in the metadata. Raises ValueError for one that `quantize_weights` did not make."""
    place = layer.place
    if not isinstance(place, Place):
        raise ValueError(f"{layer.spec.name}: only what quantize_weights and load_quantized put into a model is saved")
    return {"place": asdict(place), "linear": layer.spec.to_json()["linear"]}


def _about(files: Checkpoint) -> dict[str, Any] | None:
    """The metadata of what `save_quantized` wrote; None for other checkpoints. Raises ValueError for another version."""
    file = files.folder / FILE
    if not file.exists():
        return None
    with opened(file) as tensors:
        metadata = tensors.metadata() or {}
    if FORMAT not in metadata:
        return None
    about: dict[str, Any] = json.loads(metadata[FORMAT])
    if about.get("version") != VERSION:
        raise ValueError(
            f"{file} has version {about.get('version')} of {FORMAT}, and this kvgen reads version {VERSION}: quantize the model anew"
        )
    return about


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("quantization_config", "transformers_version")}


def _dtype_of(config: Any) -> torch.dtype:
    """Of a configuration; float16 where it has none."""
    found = config.dtype
    return found if isinstance(found, torch.dtype) else torch_dtype(str(found)) if found else torch.float16


@contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters of modules that are made here have no memory; buffers, which files may lack, have their values."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _plain(model: Any, files: Checkpoint, packed: Mapping[str, Any], device: torch.device) -> None:
    """Put the tensors that are not packed into a model. Raises ValueError for those that it has no place for."""
    unknown = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    owners = dict(model.named_modules())
    for name in files.plain:
        path, _, leaf = name.rpartition(".")
        if path in packed or _SCALE.search(name):
            continue
        owner = owners.get(path)
        places = (owner._parameters, owner._buffers) if owner is not None else ()
        place: dict[str, Any] | None = next((found for found in places if found.get(leaf) is not None), None)
        if place is None or place[leaf].shape != (tensor := files.tensor(name, device)).shape:
            unknown.append(name)
        elif isinstance(place[leaf], nn.Parameter):
            place[leaf] = nn.Parameter(tensor.to(place[leaf].dtype), requires_grad=False)
        else:
            place[leaf] = tensor.to(place[leaf].dtype)
    if unknown:
        more = f" and {len(unknown) - 4} others" if len(unknown) > 4 else ""
        raise ValueError(f"{type(model).__name__} has no place for {', '.join(unknown[:4])}{more} of {files.folder}")
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta and model.config.tie_word_embeddings:
        head.weight = model.get_input_embeddings().weight


def _packed(model: Any, files: Checkpoint, about: Mapping[str, Any], device: torch.device, wide: str) -> None:
    """Put the products of `save_quantized` into a model. Raises ValueError where they were packed for another kind of device."""
    if about["device"] != device.type:
        raise ValueError(
            f"{files.folder} was packed for {about['device']}, whose layout is not that of {device.type}: load it there, or quantize anew"
        )
    wanted = []
    for name, product in about["products"].items():
        place = Place(**{**product["place"], "layers": tuple(product["place"]["layers"])})
        wanted.append((place, linear_spec(name, device, product["linear"])))
    fetch(spec for _, spec in wanted)
    for place, spec in wanted:
        bias = files.tensor(f"{place.name}.bias", device) if spec.linear.bias else None
        put(model, place, spec, files.tensor(f"{place.name}.packed", device), bias, wide)


def _foreign(model: Any, files: Checkpoint, device: torch.device, join: bool, wide: str) -> None:
    """Put the quantized layers of another library's checkpoint into a model."""
    left = set(files.quantized)
    for place in places(model, left.__contains__, join):
        weights = [in_kernel_groups(name, files.weight(name, device)) for name in place.sources]
        left.difference_update(place.sources)
        alike = len({(weight.bits, weight.group) for weight in weights}) == 1
        for each, mine in [(place, weights)] if alike else zip(place.singly, ([weight] for weight in weights), strict=True):
            layers = [model.get_submodule(name) for name in each.sources]
            for name, layer, weight in zip(each.sources, layers, mine, strict=True):
                if weight.codes.shape != (layer.out_features, layer.in_features):
                    shape = [layer.out_features, layer.in_features]
                    raise ValueError(f"{name} of {files.folder} is {list(weight.codes.shape)}, and the model's {shape}")
            whole = _joined(mine)
            spec = spec_of(model, each, {"bits": whole.bits, "group": whole.group, "zero": whole.zeros is not None})
            kernel = get_linear_kernel(spec)
            packed = kernel.pack(whole.codes, whole.scales.to(torch_dtype(spec.linear.dtype)), whole.zeros)
            bias = joint_bias([layer.bias for layer in layers], [layer.out_features for layer in layers])
            put(model, each, spec, packed, bias, wide)
    if left:
        raise ValueError(f"{type(model).__name__} has no linear layer {min(left)}, which {files.folder} quantizes")


def _joined(weights: list[Weight]) -> Weight:
    """The rows of several weights as one."""
    if any(weight.zeros is not None for weight in weights):
        weights = [weight.with_zeros() for weight in weights]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    scales = torch.cat([weight.scales for weight in weights])
    return Weight(weights[0].bits, torch.cat([weight.codes for weight in weights]), scales, torch.cat(zeros) if zeros else None)
