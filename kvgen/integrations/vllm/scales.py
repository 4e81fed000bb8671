"""Static scales of K and V, out of the model's checkpoint or a file beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvgen.format.scales import has_static_scales, static_scales
from kvgen.integrations.checkpoint import load_scales
from kvgen.integrations.vllm.formats import Format, refusing

_loaded = cache(load_scales)


def scales_of(config: Any, form: Format, name: str, device: torch.device) -> Tensor | None:
    """The scales of the layer that vLLM calls `name`, of this rank's heads, float32 [2, kv_heads, head_dim]; None where blocks hold them.

    Raises UnsupportedError, by name, where there are none that fit the format.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    spec = form.spec(form.unit)
    if not has_static_scales(spec):
        return None
    heads = config.model_config.get_total_num_kv_heads()
    whole = replace(spec, attention=replace(spec.attention, kv_heads=heads, q_heads=heads * spec.attention.group))
    number = extract_layer_index(name)
    with refusing("static scales"):
        layers = _loaded(form.file or _folder(config), whole)
        key, value = layers[number] if number < len(layers) else (None, None)
        both = static_scales(whole, key, value, device)
    assert both is not None
    return both[:, _mine(heads, form.layer.kv_heads)].contiguous()


def _mine(heads: int, held: int) -> slice:
    """This rank's KV heads: its share, or one that several ranks have."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    first = get_tensor_model_parallel_rank() * heads // get_tensor_model_parallel_world_size()
    return slice(first, first + held)


def _folder(config: Any) -> Path:
    """Where vLLM has the model's weights from: a folder, or what it has downloaded by then."""
    model = Path(config.model_config.model)
    if model.is_dir():
        return model
    from huggingface_hub import snapshot_download

    where = {"revision": config.model_config.revision, "cache_dir": config.load_config.download_dir}
    return Path(snapshot_download(str(model), local_files_only=True, **where))
